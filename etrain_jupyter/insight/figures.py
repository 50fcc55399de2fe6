"""Draw jobs with Matplotlib, which is an optional dependency."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from etrain_jupyter.display.charts import COLORS
from etrain_jupyter.errors import ConfigError
from etrain_jupyter.insight.curves import (
    MAX_VALUE,
    STEPPED,
    Compared,
    ScalingPoints,
    check_columns,
    curves_of,
    default_columns,
    name_of,
    scale_of,
    scaling_points,
)
from etrain_jupyter.insight.measures import Floats, to_floats
from etrain_jupyter.insight.runs import Axis, Job, Run, check_axis, read_run
from etrain_jupyter.log.columns import STEP_COLUMNS
from etrain_jupyter.log.events import (
    Event,
    GenerationFormed,
    PreemptionNoticed,
    StepCompleted,
    WorkerLost,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_LABELS = 12
"""Maximum number of marked workers for which the markers have labels."""
MAX_METRICS = 3
"""Maximum number of metrics in the figure of one job."""
WIDTH_INCHES = 8.0
MARK_COLORS = {"lost": "tab:red", "preempted": "tab:orange"}


def plot_job(job: Job, over: str = "steps") -> Figure:
    """Return a figure with loss, metrics, learning rate and number of workers of one job.

    Raises:
        ConfigError: If the axis is unknown, the pool has no prices for ``usd``, or matplotlib is
            not installed.
    """
    make_figure = figure_class()
    from matplotlib.ticker import MaxNLocator

    run = read_run(job)
    axis = check_axis(over, [run])
    scale = scale_of(axis, [run])
    x = run.positions(axis) * scale.factor
    metrics = _metrics_of(run.columns)[:MAX_METRICS]
    panels = ["loss", *metrics, "lr", "world_size"]
    heights = [3, *[2] * len(metrics), 1, 1]
    figure = make_figure(figsize=(WIDTH_INCHES, 1.2 * sum(heights)), layout="constrained")
    axes = list(figure.subplots(len(panels), sharex=True, height_ratios=heights))
    for panel, column in zip(axes, panels, strict=True):
        style = {"drawstyle": "steps-post"} if column in STEPPED else {}
        if column in run.columns:
            panel.plot(x, run.columns[column], linewidth=1, label="training", **style)
        _plot_evaluations(panel, x, run.columns.get(f"eval_{column}", ()))
        panel.set_ylabel(_plain(name_of(column)))
        panel.grid(alpha=0.3)
    axes[-1].set_ylim(bottom=0)
    axes[-1].yaxis.set_major_locator(MaxNLocator(integer=True))
    axes[-1].set_xlabel(scale.label)
    axes[0].set_title(job.id)
    _mark(axes, _placed(worker_marks(job.events()), to_floats(run.columns["step"]), x))
    axes[0].legend(loc="upper right")
    return figure


def plot_runs(compared: Compared, over: Axis, columns: Sequence[str] | None = None) -> Figure:
    """Return a figure with the curves of several jobs in the same axes.

    The charts are those of ``columns``; by default the loss, the evaluations and the workers,
    followed by the throughput by number of workers.

    Raises:
        ConfigError: If a column is unknown, or matplotlib is not installed.
    """
    make_figure = figure_class()
    labels, runs = compared.labels, compared.runs
    shown = default_columns(runs) if columns is None else list(columns)
    check_columns(shown, runs)
    points = scaling_points(runs, compared.rows) if columns is None else None
    num_charts = len(shown) + (points is not None)
    num_rows = -(-num_charts // 2)
    figure = make_figure(figsize=(1.5 * WIDTH_INCHES, 3 * num_rows), layout="constrained")
    charts = list(np.atleast_1d(figure.subplots(num_rows, min(2, num_charts))).flat)
    for chart, column in zip(charts, shown, strict=False):
        _plot_curves(chart, labels, runs, column, over)
    if points is not None:
        _plot_scaling(charts[len(shown)], labels, points)
    for chart in charts[num_charts:]:
        chart.set_axis_off()
    # A job without steps has no curve, so collect the entries of all charts.
    entries: dict[str, Any] = {}
    for chart in charts:
        for line, name in zip(*chart.get_legend_handles_labels(), strict=True):
            entries.setdefault(name, line)
    if entries:
        figure.legend(entries.values(), entries.keys(), loc="outside upper center", ncols=4)
    return figure


def _plot_curves(
    chart: Axes, labels: Sequence[str], runs: Sequence[Run], column: str, over: Axis
) -> None:
    is_stepped = column in STEPPED
    for curve in curves_of(labels, runs, column, over):
        chart.plot(
            curve.x,
            curve.y,
            color=COLORS[curve.index % len(COLORS)],
            linestyle="-" if curve.index < len(COLORS) else "--",
            drawstyle="steps-post" if is_stepped else "default",
            marker="." if column.startswith("eval_") else None,
            label=_plain(curve.label),
        )
    if is_stepped:
        chart.set_ylim(bottom=0)
    chart.set_ylabel(_plain(name_of(column)))
    chart.set_xlabel(scale_of(over, runs).label)
    chart.grid(alpha=0.3)


def _plot_scaling(chart: Axes, labels: Sequence[str], points: ScalingPoints) -> None:
    for xs, ys in points.ideal:
        chart.plot(xs, ys, color="gray", linestyle=":", label="linear scaling")
    for index, workers, rate in points.measured:
        chart.plot(
            workers, rate, marker="o", linestyle="", color=COLORS[index % len(COLORS)],
            label=_plain(labels[index]),
        )  # fmt: skip
    chart.set_xlabel("workers")
    chart.set_ylabel("samples/s")
    chart.set_xlim(left=0)
    chart.set_ylim(bottom=0)
    chart.grid(alpha=0.3)


def _plain(text: str) -> str:
    # Matplotlib reads text between dollar signs as a formula, and metrics may have any name.
    return text.replace("$", r"\$")


def _metrics_of(columns: Mapping[str, Sequence[Any]]) -> list[str]:
    """Return the metrics that were measured in training or in evaluations."""
    measured = [name for name in columns if name not in STEP_COLUMNS]
    names = dict.fromkeys(name.removeprefix("eval_") for name in measured)
    return [name for name in names if name != "loss"]


@cache
def figure_class() -> type[Figure]:
    """Return a figure class that a notebook can display.

    ``pyplot`` is not used because it never frees its figures, and a notebook displays them twice.
    Without ``pyplot``, IPython cannot draw a plain ``Figure``.

    Raises:
        ConfigError: If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise ConfigError(
            "plot() needs the package matplotlib, which is not installed",
            hint="pip install matplotlib; job.history() has the same values for other tools",
        ) from exc

    class NotebookFigure(Figure):
        """A figure with a PNG representation."""

        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            self.savefig(file, format="png")
            return file.getvalue()

    return NotebookFigure


def worker_marks(events: Iterable[Event]) -> list[tuple[int, str, str]]:
    """Return the lost and preempted workers: step, worker, ``lost`` or ``preempted``.

    A worker that vanishes after its notice is marked once, at the notice.
    """
    step, marks = 0, []
    noticed: set[str] = set()
    for event in events:
        match event:
            # A generation that starts from a checkpoint is at an earlier step than the last one.
            case StepCompleted() | GenerationFormed():
                step = event.step
            case PreemptionNoticed():
                noticed.add(event.worker)
                marks.append((step, event.worker, "preempted"))
            case WorkerLost() if event.worker not in noticed:
                marks.append((step, event.worker, "lost"))
    return marks


def _placed(
    marks: Sequence[tuple[int, str, str]], steps: Floats, x: Floats
) -> list[tuple[float, str, str]]:
    """Replace the step of each mark by its position on the axis."""
    # Marks before the first step are at the beginning of the axis.
    rows = np.searchsorted(steps, [step for step, _, _ in marks], side="right") - 1
    places = [float(x[row]) if row >= 0 else 0.0 for row in rows]
    return [(at, worker, kind) for at, (_, worker, kind) in zip(places, marks, strict=True)]


def _plot_evaluations(axis: Axes, x: Floats, values: Sequence[float]) -> None:
    # A job without evaluations has no such column.
    if not len(values):
        return
    y = to_floats(values)
    shown = np.abs(y) < MAX_VALUE
    if shown.any():
        axis.plot(x[shown], y[shown], marker=".", linewidth=1, label="evaluation")


def _mark(axes: Sequence[Axes], marks: Sequence[tuple[float, str, str]]) -> None:
    shown: set[str] = set()
    for at, worker, kind in marks:
        for axis in axes:
            # Only the first axis has a legend, in which each kind should appear once.
            label = "_nolegend_" if kind in shown else f"worker {kind}"
            axis.axvline(at, color=MARK_COLORS[kind], linestyle="--", linewidth=1, label=label)
        shown.add(kind)
        if len(marks) <= MAX_LABELS:
            axes[0].annotate(
                _plain(f"{worker} {kind}"),
                xy=(at, 0.98),
                xycoords=axes[0].get_xaxis_transform(),
                rotation=90,
                ha="right",
                va="top",
                fontsize="small",
                color=MARK_COLORS[kind],
            )
