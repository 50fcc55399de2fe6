"""Contract suite for loggers: subclass ``LoggerContract`` and provide a place.

::

    class TestMyLogger(LoggerContract):
        @pytest.fixture
        def place(self, tmp_path):
            return MyPlace(tmp_path)

The place creates loggers and reads what a user of the destination sees; see ``LoggerPlace``.
``MemoryLogger`` and ``MemoryPlace`` are the in-memory implementation, for tests.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

import pytest

from etrain_jupyter.errors import ConfigError
from etrain_jupyter.log.event_log import EventLog
from etrain_jupyter.log.events import (
    EvalCompleted,
    EvalScored,
    Event,
    ExhibitStored,
    JobRestored,
    JobResumed,
    JobStatus,
    JobStatusChanged,
    JobSubmitted,
    SchedulerRestarted,
    StepCompleted,
)
from etrain_jupyter.log.exhibits import Table, digest_of, encode_table, exhibit_key, write_exhibit
from etrain_jupyter.log.loggers.base import (
    Exhibit,
    Logger,
    LoggerEntry,
    Note,
    Record,
    RunInfo,
    Values,
)
from etrain_jupyter.log.loggers.feed import LogFeed, export_log

JOB_ID = "digits-00c0ffee"
CONFIG = {"model": "Net()", "optimizer": {"name": "Adam", "lr": 0.25}, "seed": None}
_COMMON: dict[str, Any] = {"job_id": JOB_ID, "generation": 1}
_SUBMITTED_AT = 1_700_000_000.0


@dataclass
class Stored:
    """The content of the destination for one job, as its user sees it."""

    values: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    """(step, value) by tag, in the order in which they are displayed."""
    exhibits: dict[str, list[int]] = field(default_factory=dict)
    """Steps of the exhibits, by name."""
    notes: list[str] = field(default_factory=list)
    status: str = ""
    """Final status of the job; empty if the destination does not have one, or while it runs."""


class LoggerPlace(Protocol):
    """A destination, for example one tracking server."""

    has_exhibits: bool
    has_notes: bool
    has_status: bool

    def make(self) -> Logger:
        """Return a new logger for the destination, as in another process."""
        ...

    def read(self) -> Stored:
        """Return what the destination displays for the job ``JOB_ID``."""
        ...


class MemoryLogger:
    """Logger that keeps its records in memory, in a list that several loggers share.

    Args:
        stored: The destination.
        can_drop: False for a logger that cannot remove records.
    """

    def __init__(self, stored: MemoryRuns, *, can_drop: bool = False) -> None:
        self._stored, self._can_drop = stored, can_drop

    @classmethod
    def from_entry(cls, entry: LoggerEntry) -> Self:
        """Create a logger with a destination of its own; it has no options."""
        if entry.values:
            raise ConfigError("the in-memory logger has no options")
        return cls(MemoryRuns())

    @property
    def options(self) -> dict[str, Any]:
        """Return no options."""
        return {}

    def open(self, run: RunInfo) -> int:
        """Continue the revision of the run."""
        self._stored.opened.append(run)
        if self._stored.revision != run.revision:
            self._stored.records.clear()
        self._stored.revision = run.revision
        self._stored.status = None
        return len(self._stored.records)

    def write(self, records: Sequence[Record]) -> None:
        """Append records; fail if ``MemoryRuns.failures`` has an exception."""
        if self._stored.failures:
            raise self._stored.failures.pop(0)
        self._stored.records += records

    def drop_after(self, step: int, time: float) -> bool:
        """Remove later records, if this logger can."""
        if self._can_drop:
            kept = [r for r in self._stored.records if r.step <= step or isinstance(r, Note)]
            self._stored.records[:] = kept
        return self._can_drop

    def close(self, status: JobStatus | None) -> None:
        """Store the status."""
        self._stored.status = status


@dataclass
class MemoryRuns:
    """Destination of ``MemoryLogger``."""

    records: list[Record] = field(default_factory=list)
    opened: list[RunInfo] = field(default_factory=list)
    revision: int = 0
    status: JobStatus | None = None
    failures: list[Exception] = field(default_factory=list)
    """Exceptions that the next writes raise."""


class MemoryPlace:
    """Place of ``MemoryLogger``."""

    has_exhibits = has_notes = has_status = True

    def __init__(self, *, can_drop: bool) -> None:
        self.runs = MemoryRuns()
        self._can_drop = can_drop

    def make(self) -> MemoryLogger:
        """Return a new logger."""
        return MemoryLogger(self.runs, can_drop=self._can_drop)

    def read(self) -> Stored:
        """Return the records by tag."""
        stored = Stored(status=self.runs.status or "")
        for record in self.runs.records:
            match record:
                case Values():
                    for tag, value in record.values.items():
                        stored.values.setdefault(tag, []).append((record.step, value))
                case Exhibit():
                    stored.exhibits.setdefault(record.name, []).append(record.step)
                case Note():
                    stored.notes.append(record.text)
        return stored


class Job:
    """Writes the log of a job for the suite.

    Args:
        folder: The job's folder.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "events.jsonl"
        self._log = EventLog(self.path, fsync_every_s=None)
        self._time = _SUBMITTED_AT
        self._log.append(
            [
                JobSubmitted(
                    **_COMMON,
                    time=self._time,
                    name="digits",
                    min_workers=1,
                    max_workers=4,
                    config=dict(CONFIG),
                )
            ]
        )

    def append(self, *events: Event) -> None:
        """Append events."""
        self._log.append(events)

    def _now(self) -> float:
        self._time += 1.0
        return self._time

    def steps(self, numbers: Iterable[int], *, loss: float = 0.5) -> None:
        """Log steps; the loss of step n is ``loss / n``."""
        values: dict[str, Any] = {"epoch": 0, "first": 0, "samples": 32, "sample_checksum": 7}
        values |= {"lr": 0.25, "world_size": 2, "samples_per_s": 10.0, "data_s": 0.125}
        values |= {"compute_s": 2.0, "communication_s": 1.0, "optimizer_s": 0.075}
        values |= {"ranks_agree": True, "skipped": False}
        for n in numbers:
            self.append(
                StepCompleted(
                    **_COMMON,
                    **values,
                    time=self._now(),
                    step=n,
                    loss=loss / n,
                    metrics={"top-5 (%)": 0.75},
                )
            )

    def evaluation(self, step: int, loss: float) -> None:
        """Log an evaluation and its score."""
        common = {**_COMMON, "step": step, "samples": 9, "duration_s": 0.1}
        self.append(
            EvalCompleted(**common, time=self._now(), epoch=0, loss=loss, metrics={"f1": 0.5}),
            EvalScored(**common, time=self._now(), scores={"map": 0.125}),
        )

    def exhibits(self, step: int) -> None:
        """Store a figure, a text and a table."""
        table = Table(("name", "loss"), (("a", 0.5), ("b <i>", None)))
        contents: dict[str, tuple[Any, bytes]] = {
            "curve": ("png", _png()),
            "report": ("text", b"f1  0.5\n <b>"),
            "worst": ("table", encode_table(table)),
        }
        for name, (format, data) in contents.items():
            key = exhibit_key(step=step, name=name, format=format)
            write_exhibit(self.path.parent, key, data)
            self.append(
                ExhibitStored(
                    **_COMMON,
                    time=self._now(),
                    step=step,
                    name=name,
                    format=format,
                    size_bytes=len(data),
                    digest=digest_of(data),
                )
            )

    def restored(self, step: int, num_undone: int) -> None:
        """Log a return to an older step."""
        time = self._now()
        self.append(JobRestored(**_COMMON, time=time, step=step, num_undone=num_undone))

    def status(self, status: JobStatus) -> None:
        """Log a status."""
        self.append(JobStatusChanged(**_COMMON, time=self._now(), status=status))

    def resumed(self, step: int) -> None:
        """Log that the user resumed the job after its end."""
        self.append(
            JobResumed(
                **_COMMON,
                time=self._now(),
                from_status="stopped",
                step=step,
                min_workers=1,
                max_workers=4,
                config=dict(CONFIG),
                differs=["epochs: 1 -> 2"],
            )
        )

    def scheduler_restarted(self, step: int) -> None:
        """Log that the scheduler died and restarted."""
        self.append(SchedulerRestarted(**_COMMON, time=self._now(), step=step, away_s=2.5))


def losses(start: int, end: int, loss: float = 0.5) -> list[tuple[int, float]]:
    """Return (step, loss) of ``Job.steps``, including step ``end``."""
    return [(n, loss / n) for n in range(start, end + 1)]


class LoggerContract:
    """The suite; a subclass provides the fixture ``place``."""

    @pytest.fixture
    def place(self) -> LoggerPlace:
        """Return a place whose destination has no run of the job yet."""
        raise NotImplementedError

    @pytest.fixture
    def job(self, tmp_path: Path) -> Job:
        """Return a job that has just been submitted."""
        return Job(tmp_path / JOB_ID)

    def test_ended_job_is_stored_once_however_often_it_is_exported(
        self, place: LoggerPlace, job: Job
    ) -> None:
        """A second export changes nothing."""
        job.steps(range(1, 6))
        job.evaluation(5, 0.25)
        job.exhibits(5)
        job.status("finished")

        first = export_log(job.path, place.make())
        again = export_log(job.path, place.make())

        stored = place.read()
        assert (first, again) == ("finished", "finished")
        _assert_equal(stored.values["train/loss"], losses(1, 5))
        _assert_equal(stored.values["train/lr"], [(n, 0.25) for n in range(1, 6)])
        _assert_equal(stored.values["eval/loss"], [(5, 0.25)])
        _assert_equal(stored.values["eval/map"], [(5, 0.125)])
        accuracy = [tag for tag in stored.values if tag.startswith("train/top-5")]
        assert len(accuracy) == 1
        if place.has_exhibits:
            assert stored.exhibits == {"curve": [5], "report": [5], "worst": [5]}
        assert stored.status == ("finished" if place.has_status else "")

    def test_returns_to_older_steps_leave_one_value_per_step(
        self, place: LoggerPlace, job: Job
    ) -> None:
        """Undone values disappear, and repeated steps appear once."""
        # The feed follows the log, so every record is written before the job returns.
        feed = LogFeed(job.path, place.make())
        job.steps(range(1, 5))
        job.evaluation(4, 0.5)
        job.exhibits(4)
        feed.catch_up()
        job.restored(2, num_undone=2)
        job.steps(range(3, 6), loss=0.25)
        feed.catch_up()
        job.evaluation(4, 0.125)
        job.restored(5, num_undone=0)
        job.steps([6], loss=0.25)
        job.status("stopped")
        feed.catch_up()
        feed.close()

        stored = place.read()
        _assert_equal(stored.values["train/loss"], [*losses(1, 2), *losses(3, 6, loss=0.25)])
        _assert_equal(stored.values["eval/loss"], [(4, 0.125)])
        assert stored.exhibits.get("report", []) == []
        if place.has_notes:
            assert stored.notes == [
                "Returned to step 2; 2 steps are repeated.",
                "Returned to step 5.",
            ]
        if place.has_status:
            assert stored.status == "stopped"

    def test_restart_and_resume_continue_without_gaps_and_repeats(
        self, place: LoggerPlace, job: Job
    ) -> None:
        """Later loggers continue the run."""
        job.steps(range(1, 4))
        feed = LogFeed(job.path, place.make())
        feed.catch_up()
        # The scheduler dies with its loggers, so nothing is closed.
        job.scheduler_restarted(3)
        job.steps([4])
        job.status("stopped")
        export_log(job.path, place.make())
        job.resumed(4)
        job.steps(range(5, 8))
        job.evaluation(7, 0.25)
        job.status("failed")
        export_log(job.path, place.make())

        stored = place.read()
        _assert_equal(stored.values["train/loss"], losses(1, 7))
        _assert_equal(stored.values["eval/loss"], [(7, 0.25)])
        if place.has_notes:
            assert stored.notes == [
                "The scheduler restarted at step 3 after 2.5 s.",
                "Resumed at step 4 (epochs: 1 -> 2).",
            ]
        if place.has_status:
            assert stored.status == "failed"

    def test_losses_that_are_not_finite_are_kept(self, place: LoggerPlace, job: Job) -> None:
        """NaN and infinity are values."""
        job.steps([1], loss=float("inf"))
        job.steps([2], loss=float("nan"))
        job.steps([3])

        export_log(job.path, place.make())

        stored = place.read().values["train/loss"]
        assert [step for step, _ in stored] == [1, 2, 3]
        assert stored[0][1] > 1e300
        assert stored[1][1] != stored[1][1]

    def test_options_recreate_the_logger(self, place: LoggerPlace) -> None:
        """The scheduler creates the same logger from its options."""
        logger = place.make()
        entry = LoggerEntry(name="any", values=logger.options)

        recreated = type(logger).from_entry(entry)  # type: ignore[attr-defined]

        assert recreated.options == logger.options


def _assert_equal(found: list[tuple[int, float]], wanted: list[tuple[int, float]]) -> None:
    assert [step for step, _ in found] == [step for step, _ in wanted]
    assert [value for _, value in found] == pytest.approx([value for _, value in wanted], rel=1e-6)


def _png() -> bytes:
    """Return a picture of 4 x 2 gray pixels."""
    header = struct.pack(">IIBBBBB", 4, 2, 8, 0, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(bytes(10))), (b"IEND", b"")]
    parts = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)
