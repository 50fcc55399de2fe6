"""Store the exhibits of a job: figures, texts and tables that ``eval.score`` returned."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping

from etrain_jupyter.head.jobs.job_spec import JobSpec
from etrain_jupyter.log import events
from etrain_jupyter.log.exhibits import (
    MAX_EVALUATION_BYTES,
    MAX_PER_EVALUATION,
    InvalidExhibitError,
    digest_of,
    exhibit_key,
    parse_exhibit,
    remove_exhibits,
    write_exhibit,
)
from etrain_jupyter.log.job_record import JobRecord
from etrain_jupyter.wire import messages as m

MAX_JOB_BYTES = 100_000_000
"""Maximum size of a job's exhibits."""

MAX_EVALUATIONS = 200
"""Maximum number of evaluations with exhibits: more than a slider can distinguish."""


class ExhibitFolder:
    """The exhibits in a run folder. For a job in a bucket, the log's uploader uploads them.

    Args:
        spec: The job.
        record: Fold of the job's log, to which ``log`` adds each event.
        log: Appends an event, given its class and fields.
    """

    def __init__(self, spec: JobSpec, record: JobRecord, log: Callable[..., None]) -> None:
        self._spec, self._record, self._log = spec, record, log

    def store(self, report: m.ExhibitFound, worker: str) -> None:
        """Check an exhibit and write its file; remove others if the job has too many."""
        # Workers are not trusted to keep to the limits that the scoring process has checked.
        try:
            parse_exhibit(report.format, report.data)
            key = exhibit_key(step=report.step, name=report.name, format=report.format)
            self._check_room(report)
            write_exhibit(self._spec.run_dir, key, report.data)
        except InvalidExhibitError as exc:
            self._warn(report, worker, f"was refused: it {exc}")
        except OSError as exc:
            why = exc.strerror or str(exc)
            where = self._spec.run_dir
            self._warn(report, worker, f"could not be stored in {where}: {why}. Training continues")
        else:
            self._log(
                events.ExhibitStored,
                generation=report.generation,
                step=report.step,
                name=report.name,
                format=report.format,
                size_bytes=len(report.data),
                digest=digest_of(report.data),
            )
        sizes = {
            step: sum(event.size_bytes for event in named.values())
            for step, named in self._record.exhibits.items()
        }
        why = "the job has too many; the first and the newest are kept"
        self._remove(choose_removed(sizes), why)

    def remove_after(self, step: int) -> None:
        """Remove the exhibits of steps that are undone, because the job returned to ``step``."""
        undone = sorted(other for other in self._record.exhibits if other > step)
        self._remove(undone, f"the job returned to step {step:,}")

    def _remove(self, steps: Iterable[int], reason: str) -> None:
        for step in steps:
            files = []
            for event in self._record.exhibits.get(step, {}).values():
                # Another user may have written the log of a resumed job.
                with contextlib.suppress(InvalidExhibitError):
                    files.append(exhibit_key(step=step, name=event.name, format=event.format))
            # Log first, because a file that no event names does no harm, but an event without a
            # file would show as an error.
            self._log(events.ExhibitsRemoved, step=step, files=files, reason=reason)
            remove_exhibits(self._spec.run_dir, files)

    def _check_room(self, report: m.ExhibitFound) -> None:
        others = dict(self._record.exhibits.get(report.step, {}))
        others.pop(report.name, None)
        size_bytes = len(report.data) + sum(event.size_bytes for event in others.values())
        if len(others) >= MAX_PER_EVALUATION or size_bytes > MAX_EVALUATION_BYTES:
            raise InvalidExhibitError(
                f"exceeds the limit of {MAX_PER_EVALUATION} exhibits and "
                f"{MAX_EVALUATION_BYTES:,} bytes for one evaluation"
            )

    def _warn(self, report: m.ExhibitFound, worker: str, problem: str) -> None:
        text = f"the exhibit {report.name[:64]!r} of step {report.step} from {worker} {problem}"
        values = {"generation": report.generation, "level": "warning", "worker": ""}
        self._log(events.LogLine, **values, text=text)


def choose_removed(
    sizes: Mapping[int, int],
    *,
    max_bytes: int = MAX_JOB_BYTES,
    max_evaluations: int = MAX_EVALUATIONS,
) -> list[int]:
    """Return the steps whose exhibits to remove: the oldest, but never the first or the newest.

    The first evaluation is kept for comparison with the newest.

    Args:
        sizes: Size of an evaluation's exhibits in bytes, by step.
        max_bytes: Maximum size of those that remain.
        max_evaluations: Maximum number of steps that remain.

    >>> choose_removed({10: 5, 20: 5, 30: 5, 40: 5}, max_bytes=12, max_evaluations=9)
    [20, 30]
    """
    total, count = sum(sizes.values()), len(sizes)
    removed = []
    for step in sorted(sizes)[1:-1]:
        if total <= max_bytes and count <= max_evaluations:
            break
        removed.append(step)
        total -= sizes[step]
        count -= 1
    return removed
