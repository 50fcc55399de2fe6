"""Diagnose a job: verdict, remedy and the parts of a step, as text, HTML or a table."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.display.numbers import MISSING, counted, seconds
from etrain_jupyter.display.tables import align_columns, data_frame, html_list, html_of, html_table
from etrain_jupyter.insight.diagnosis.measured import Measured, read_step_times
from etrain_jupyter.insight.diagnosis.remedies import Facts, Remedy, remedy_of
from etrain_jupyter.insight.diagnosis.rules import (
    NOTED_FROM,
    Cause,
    Finding,
    StepParts,
    Verdict,
    core_wait_of,
    doubt_exchange,
    judge,
)
from etrain_jupyter.insight.runs import Job
from etrain_jupyter.untrusted import plain_line, plain_text

if TYPE_CHECKING:
    from pandas import DataFrame

VERDICTS: dict[Cause, str] = {
    "input": "input-bound",
    "communication": "communication-bound",
    "straggler": "held up by a straggler",
    "compute": "compute-bound",
    "overhead": "overhead-bound",
    "optimizer": "bound by the optimizer's update",
    "metrics": "bound by its metrics",
    "evaluation": "bound by its evaluations",
    "checkpoint": "bound by its checkpoints",
}
WHY: dict[Cause, str] = {
    "input": "Workers wait for samples",
    "communication": "Workers wait for the transfer of gradients",
    "straggler": "The other workers wait for {workers}",
    "compute": "Workers run forward and backward passes",
    "overhead": "Time that does not depend on the number of samples takes",
    "optimizer": "The optimizer updates the weights",
    "metrics": "Workers compute the cell's metrics",
    "evaluation": "Workers evaluate",
    "checkpoint": "Checkpoints block training",
}
NOT_MEASURED: dict[Cause, str] = {
    "metrics": "the metrics (on a GPU)",
    "overhead": "the fixed cost of a pass (it needs an epoch whose last step is smaller)",
}
PARTS = {
    "data_s": "data",
    "passes_s": "passes",
    "metrics_s": "metrics",
    "communication_s": "exchange",  # only in the data frame: the others show its two parts
    "transfer_s": "transfer",
    "wait_s": "wait",
    "optimizer_s": "update",
    "evaluation_s": "evaluation",
    "checkpoint_s": "checkpoint",
    "rest_s": "rest",
}
"""Headings of the parts of a step."""
ALWAYS = ("data_s", "passes_s", "optimizer_s")
"""Parts that the text and the HTML show even if they are zero on all workers."""

Row = dict[str, Any]


class Diagnosis:
    """Cause that slows a job down, its remedy, and the parts of a step on each worker.

    A notebook displays it as HTML. ``str(diagnosis)`` is the same as text.

    Attributes:
        job_id: Id of the job.
        measured: The parts of the steps.
        verdict: The cause with its share, interval and confidence; ``verdict.main`` is None if the
            diagnosis abstains.
        remedy: The change that should help; None without a verdict, or if the job's configuration
            is from another version.
    """

    def __init__(
        self, job_id: str, measured: Measured, verdict: Verdict, remedy: Remedy | None
    ) -> None:
        self.job_id = job_id
        self.measured = measured
        self.verdict = verdict
        self.remedy = remedy

    @property
    def rows(self) -> list[Row]:
        """One row per worker; see ``to_frame``."""
        return [_row_of(worker) for worker in self.measured.workers]

    def to_frame(self) -> DataFrame:
        """Return the parts of a step as a ``pandas.DataFrame``, one row per worker.

        The columns are ``worker``, ``place`` (its host and the type of its machine), ``step_s``
        (the mean time from one step to the next one) and its parts in seconds: ``data_s``,
        ``passes_s``, ``metrics_s``, ``communication_s`` (which consists of ``transfer_s`` and
        ``wait_s``), ``optimizer_s``, ``evaluation_s``, ``checkpoint_s`` and ``rest_s``. Parts that
        were not measured are NaN.

        Raises:
            ConfigError: If pandas is not installed.
        """
        return data_frame(self.rows, otherwise="diagnosis.rows has the same values as dicts")

    def to_html(self) -> str:
        """Return the diagnosis as HTML without scripts and styles."""
        head, *lines = self._sentences()
        body = "".join(f"<p>{_html(line)}</p>" for line in lines)
        if self.remedy and self.remedy.line:
            body += f"<pre>{_html(self.remedy.line)}</pre>"
        heads, *rows = self._table()
        table = html_table(heads, rows, has_row_heads=True)
        return f"<div><h4>{_html(head)}</h4>{body}{table}{html_list(self._notes())}</div>"

    def _repr_html_(self) -> str:
        return self.to_html()

    def __str__(self) -> str:
        lines = self._sentences()
        if self.remedy and self.remedy.line:
            lines.append(f"    {self.remedy.line}")
        notes = "\n".join(self._notes())
        # Names of workers come from the log, which another user may have written.
        return plain_text("\n\n".join(["\n".join(lines), align_columns(self._table()), notes]))

    __repr__ = __str__

    def _sentences(self) -> list[str]:
        main = self.verdict.main
        if main is None:
            return [f"{self.job_id}: no verdict", self.verdict.reason]
        lines = [
            f"{self.job_id}: {VERDICTS[main.cause]} ({main.confidence} confidence)",
            self._describe(main),
        ]
        if self.remedy:
            gain = self.remedy.gain
            if gain is None:
                predicted = " (the gain cannot be predicted)"
            else:
                predicted = f" (predicted {gain:+.0%})" if gain > 0 else ""
            lines.append(f"Remedy: {self.remedy.text}{predicted}.")
        return lines

    def _describe(self, finding: Finding) -> str:
        why = WHY[finding.cause].format(workers=self._names(finding))
        share = f"{finding.share:.0%}"
        if finding.interval is not None:
            share += f" ({finding.interval[0]:.0%} to {finding.interval[1]:.0%})"
        verb = "" if why.endswith("takes") else " for"
        text = f"{why}{verb} {share} of the time."
        if finding.ceiling is not None:
            text += f" Without it: {finding.ceiling:+.0%}."
        return text

    def _names(self, finding: Finding) -> str:
        places = {one.worker: one.place for one in self.measured.workers}
        found = (
            f"{name} on {places[name]}" if places.get(name) else name for name in finding.workers
        )
        return plain_line(", ".join(found))

    def _notes(self) -> list[str]:
        notes = [
            f"Also: {VERDICTS[one.cause]}. {self._describe(one)}" for one in self.verdict.others
        ]
        unknown = [NOT_MEASURED.get(cause, cause) for cause in self.verdict.not_measured]
        if unknown:
            notes.append(f"Not measured: {'; '.join(unknown)}.")
        measured = self.measured
        core_wait = core_wait_of(measured.workers)
        if core_wait is not None and core_wait >= NOTED_FROM:
            notes.append(
                f"The workers waited for a core {core_wait:.0%} of the time in which they could "
                "have computed, so all durations depend on what else runs on the machine, and a "
                "predicted gain may be too high."
            )
        notes.append(
            f"From {measured.num_steps:,} steps up to step {measured.last_step:,}, with "
            f"{counted(len(measured.workers), 'worker')} (generation {measured.generation})."
        )
        if measured.model_size:
            notes.append(f"The model has {measured.model_size}.")
        return notes

    def _table(self) -> list[list[str]]:
        rows = self.rows
        shown = [
            key
            for key in PARTS
            if key in ALWAYS or (key != "communication_s" and any(row[key] > 0 for row in rows))
        ]
        lines = [["worker", *(PARTS[key] for key in shown), "step"]]
        for row in rows:
            parts = [_part(row[key], row["step_s"]) for key in shown]
            lines.append([plain_line(row["worker"]), *parts, seconds(row["step_s"])])
        return lines


def diagnose_job(job: Job, *, is_running: bool = False, cores: float = math.inf) -> Diagnosis:
    """Find the cause that slows a job down, from the times in its log.

    Args:
        job: The job, running or ended.
        is_running: True to suggest commands for the running job where they help.
        cores: Cores of this machine, which limit a prediction for workers that share them.

    Raises:
        ConfigError: If the job has no steps, or no worker has reported its times yet.
    """
    measured = read_step_times(job)
    verdict = judge(
        measured.workers,
        rounds=measured.rounds,
        num_steps=measured.num_steps,
        fixed_s=measured.fixed_s,
    )
    verdict = doubt_exchange(verdict, measured.workers, writing_s=measured.saves.writing_s)
    config: TrainConfig | None = None
    remedy: Remedy | None = None
    with contextlib.suppress(ValidationError):  # a configuration from another version
        config = TrainConfig.model_validate(measured.config)
    if verdict.main is not None and config is not None:
        facts = Facts(
            config=config,
            workers=measured.workers,
            fixed_s=measured.fixed_s,
            running_job=job.id if is_running else "",
            steps_between_saves=measured.saves.steps_between,
            cores=cores if measured.share_cores else math.inf,
            gradient_bytes=measured.gradient_bytes,
        )
        remedy = remedy_of(verdict.main, facts)
    return Diagnosis(job.id, measured, verdict, remedy)


def _row_of(worker: StepParts) -> Row:
    parts = {key: getattr(worker, key) for key in PARTS}
    known = {key: math.nan if value is None else value for key, value in parts.items()}
    return {"worker": worker.worker, "place": worker.place, "step_s": worker.total_s, **known}


def _part(part_s: float, whole_s: float) -> str:
    is_known = whole_s > 0 and not math.isnan(part_s)
    return f"{part_s / whole_s:.0%}" if is_known else MISSING


def _html(text: str) -> str:
    return html_of(text, 2000)
