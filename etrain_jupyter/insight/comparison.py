"""Compare jobs: one row per job, with notes about everything that limits the comparison."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etrain_jupyter.display.numbers import duration
from etrain_jupyter.display.tables import data_frame
from etrain_jupyter.errors import ConfigError, EtrainError
from etrain_jupyter.insight.figures import plot_runs
from etrain_jupyter.insight.measures import MAX_OUTSIDE, divide
from etrain_jupyter.insight.page import render_cell, render_differences, render_page, render_text
from etrain_jupyter.insight.runs import Axis, Job, Run, Task, check_axis, config_by_key, read_run
from etrain_jupyter.untrusted import plain_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

Row = dict[str, Any]

HTML_SUFFIXES = (".html", ".htm")


class Comparison:
    """Jobs next to each other: a table, notes, differences between their cells, and curves.

    A notebook displays it as HTML. ``str(comparison)`` is the table as text.

    Args:
        runs: The jobs, in the order of the rows.

    Attributes:
        runs: The jobs.
        rows: One row per job; see ``to_frame``.
        notes: Sentences about the limits of the comparison, for example if the jobs train different
            tasks.
        differences: Values of the keys in which the jobs' configurations differ, by dotted key; one
            value per job, empty for a default without a value.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = tuple(runs)
        self.labels = _labels_of(self.runs)
        groups = _groups_of(self.runs)
        self.rows = [
            {"job": label, **_row_of(run), **_relative_to(run, _baseline_of(run, groups))}
            for label, run in zip(self.labels, self.runs, strict=True)
        ]
        self.notes = tuple(_notes_on(dict(zip(self.labels, self.runs, strict=True)), groups))
        self.differences = _differences_between(self.runs)

    def to_frame(self) -> DataFrame:
        """Return the table as a ``pandas.DataFrame``; unknown values are NaN.

        The columns are

        - ``job``: its name, or its id if several of the jobs share the name;
        - ``id``, ``status``, ``device``;
        - ``workers``: the mean number of workers, weighted by the time of the steps;
        - ``steps``, ``epochs``, ``samples``, and ``batch``: the mean number of samples per step;
        - ``samples_per_s``: samples per second of step time, without loading, evaluation, saving
          and recovery;
        - ``samples_per_s_overall``: samples per second of ``hours``;
        - ``steps_per_s``: steps per second of ``step_hours``;
        - ``speedup``: ``samples_per_s`` relative to the job with the fewest workers;
        - ``efficiency``: ``speedup`` divided by the ratio of workers, 1.0 for linear scaling;
        - ``best_NAME``, ``final_NAME``: each metric of the evaluations;
        - ``train_loss``: mean training loss of the last steps;
        - ``hours``: from the beginning of the first step to the end of the last one;
        - ``step_hours``: the part of ``hours`` spent in steps;
        - ``usd``, ``on_demand_usd``, ``saved_usd``, ``wasted_usd``: as in ``job.cost()``;
        - ``usd_per_worker_h``: ``usd`` divided by ``hours`` and by ``workers``;
        - ``interruptions``: workers that were preempted or lost.

        Raises:
            ConfigError: If pandas is not installed.
        """
        return data_frame(self.rows, otherwise="comparison.rows has the same values as dicts")

    def plot(self, over: str = "steps", columns: Sequence[str] | None = None) -> Figure:
        """Return a Matplotlib figure with the curves of all jobs in the same axes.

        If the jobs have different numbers of workers, the last chart shows their throughput next to
        linear scaling. Requires the matplotlib package.

        Args:
            over: ``steps``, ``samples``, ``time`` or ``usd``.
            columns: Columns of ``job.history()``; by default the loss and the evaluations.

        Raises:
            ConfigError: If the axis or a column is unknown, or matplotlib is not installed.
        """
        axis: Axis = check_axis(over, self.runs)
        return plot_runs(self, axis, columns)

    def to_html(self) -> str:
        """Return one self-contained page without scripts: table, notes, differences and curves."""
        return render_page(self)

    def write_html(self, path: str | Path) -> Path:
        """Write the page to a file, which is replaced if it exists, and return its path.

        Raises:
            ConfigError: If the name does not end in ``.html``.
            EtrainError: If the file cannot be written.
        """
        path = Path(path).expanduser()
        # An existing file is replaced, so protect notebooks and other files from a mistyped name.
        if path.suffix.lower() not in HTML_SUFFIXES:
            raise ConfigError(f"{path} does not end in .html", hint=f"write {path.stem}.html")
        try:
            path.write_text(self.to_html(), encoding="utf-8")
        except OSError as exc:
            raise EtrainError(
                f"{path} cannot be written: {exc.strerror or exc}. Nothing was written. Name a "
                "file in an existing folder that is writable."
            ) from exc
        return path

    def __str__(self) -> str:
        parts = [render_text(self.rows), render_differences(self.labels, self.differences)]
        notes = "\n".join(f"Note: {note}" for note in self.notes)
        # Devices in notes come from the log, which another user may have written.
        return plain_text("\n\n".join(part for part in (*parts, notes) if part))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return render_cell(self)


def compare_jobs(jobs: Iterable[Job]) -> Comparison:
    """Compare jobs, each once, in the given order.

    Raises:
        ConfigError: If ``jobs`` is empty.
    """
    runs = {job.id: job for job in jobs}
    if not runs:
        raise ConfigError(
            "compare() received an empty list of jobs",
            hint="name them: %etrain compare JOB JOB; %etrain ls lists all jobs",
        )
    return Comparison([read_run(job) for job in runs.values()])


# --- the table ------------------------------------------------------------------------------------


def _labels_of(runs: Sequence[Run]) -> tuple[str, ...]:
    num_named = Counter(run.name for run in runs)
    return tuple(run.name if num_named[run.name] == 1 else run.job_id for run in runs)


def _row_of(run: Run) -> Row:
    cost = run.cost
    usd = cost.spent_usd if cost else math.nan
    on_demand_usd = cost.on_demand_usd if cost else math.nan
    row: Row = {
        "id": run.job_id,
        "status": run.status,
        "device": run.device,
        "workers": run.workers,
        "steps": run.num_steps,
        "epochs": divide(run.num_samples, run.task.num_train_samples),
        "samples": run.num_samples,
        "batch": divide(run.num_samples, run.num_steps),
        "samples_per_s": run.samples_per_s,
        "samples_per_s_overall": divide(run.num_samples, 3600 * run.hours),
        "steps_per_s": divide(run.num_steps, 3600 * run.step_hours),
    }
    for name, score in run.scores().items():
        row |= {f"best_{name}": score.best, f"final_{name}": score.final}
    return row | {
        "train_loss": run.train_loss,
        "hours": run.hours,
        "step_hours": run.step_hours,
        "usd": usd,
        "on_demand_usd": on_demand_usd,
        "saved_usd": max(0.0, on_demand_usd - usd) if cost else math.nan,
        "wasted_usd": cost.wasted_usd if cost else math.nan,
        "usd_per_worker_h": divide(usd, run.hours * run.workers),
        "interruptions": run.num_interruptions,
    }


def _relative_to(run: Run, baseline: Run | None) -> Row:
    if baseline is None:
        return {"speedup": math.nan, "efficiency": math.nan}
    speedup = divide(run.samples_per_s, baseline.samples_per_s)
    return {"speedup": speedup, "efficiency": speedup / divide(run.workers, baseline.workers)}


def _groups_of(runs: Sequence[Run]) -> dict[Task, list[Run]]:
    """Group the jobs that have trained by their task."""
    groups: dict[Task, list[Run]] = {}
    for run in runs:
        # The length and the size of a job that has not started are not known.
        if run.num_steps:
            groups.setdefault(run.task, []).append(run)
    return groups


def _baseline_of(run: Run, groups: dict[Task, list[Run]]) -> Run | None:
    """Return the job with the fewest workers among those of the same task.

    None if the job has no steps, or is the only job of its task.
    """
    same = groups.get(run.task, []) if run.num_steps else []
    return min(same, key=lambda other: other.workers) if len(same) > 1 else None


# --- notes ----------------------------------------------------------------------------------------


def _notes_on(runs: dict[str, Run], groups: dict[Task, list[Run]]) -> list[str]:
    if len(runs) == 1:
        [label] = runs
        return [
            f"{label} is the only job, so its speed-up and efficiency are unknown. Name other jobs "
            "too: %etrain compare JOB JOB; %etrain ls lists them.",
            *_notes_on_runs(runs),
        ]
    return [*_notes_on_tasks(runs, groups), *_notes_on_devices(runs, groups), *_notes_on_runs(runs)]


def _notes_on_tasks(runs: dict[str, Run], groups: dict[Task, list[Run]]) -> list[str]:
    if len(groups) < 2:
        return []
    first, *others = groups
    # Keep the order of the fields, and name each one once.
    fields = dict.fromkeys(name for other in others for name in first.differences(other))
    members = [
        ", ".join(label for label, run in runs.items() if run.num_steps and run.task == task)
        for task in groups
    ]
    return [
        f"The jobs train different tasks ({'; '.join(members)}): they differ in "
        f"{', '.join(fields)}. Their losses and metrics are not comparable, and no speed-up or "
        "efficiency is computed between them."
    ]


def _notes_on_devices(runs: dict[str, Run], groups: dict[Task, list[Run]]) -> list[str]:
    notes = []
    for same in groups.values():
        devices = dict.fromkeys(
            run.device.replace(" on-demand", "").replace(" spot", "") for run in same
        )
        if len(devices) > 1:
            notes.append(
                f"The jobs ran on different devices ({'; '.join(devices)}), so the efficiency "
                "includes the difference between the devices."
            )
    return notes


def _notes_on_runs(runs: dict[str, Run]) -> list[str]:
    trained = {label: run for label, run in runs.items() if run.num_steps}
    notes = [
        f"{label} has no steps (status {run.status}), so it has no throughput and no curves. "
        f"%etrain logs {run.job_id} shows its log."
        for label, run in runs.items()
        if not run.num_steps
    ]
    for label, run in trained.items():
        outside = divide(run.hours - run.step_hours, run.hours)
        if outside > MAX_OUTSIDE:
            notes.append(
                f"{label}: its steps take {duration(run.step_hours)} of {duration(run.hours)}. The "
                f"other {outside:.0%} are evaluations, checkpoints, recovery and waiting."
            )
    without_prices = [label for label, run in trained.items() if not run.has_prices]
    if 0 < len(without_prices) < len(trained):
        notes.append(f"The pools of {', '.join(without_prices)} have no prices.")
    return notes


def _differences_between(runs: Sequence[Run]) -> dict[str, tuple[str, ...]]:
    flat = [config_by_key(run.config) for run in runs]
    keys = dict.fromkeys(key for config in flat for key in config if key != "name")
    values = {key: tuple(config.get(key, "") for config in flat) for key in keys}
    return {key: each for key, each in values.items() if len(set(each)) > 1}
