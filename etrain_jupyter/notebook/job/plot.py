"""Draw a job's history with Matplotlib, which is an optional dependency."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from etrain_jupyter.errors import ConfigError
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
SIZE_INCHES = (8.0, 6.0)
COLORS = {"lost": "tab:red", "preempted": "tab:orange"}


class PlottedJob(Protocol):
    """The part of a ``TrainingJob`` that a plot needs."""

    @property
    def id(self) -> str:
        """Return its id."""

    def history(self) -> Mapping[str, Sequence[Any]]:
        """Return its columns, one row per step."""

    def events(self) -> Sequence[Event]:
        """Return its events, in order."""


def plot_job(job: PlottedJob) -> Figure:
    """Return a figure with loss, learning rate and number of workers by step.

    Raises:
        ConfigError: If matplotlib is not installed.
    """
    try:
        from matplotlib.ticker import MaxNLocator

        figure = _figure_class()(figsize=SIZE_INCHES, layout="constrained")
    except ImportError as exc:
        raise ConfigError(
            "job.plot() needs the package matplotlib, which is not installed",
            hint="pip install matplotlib; job.history() has the same values for other tools",
        ) from exc
    columns, marks = job.history(), worker_marks(job.events())
    axes = figure.subplots(3, sharex=True, height_ratios=[3, 1, 1])
    loss, rate, workers = axes
    steps = columns["step"]
    loss.plot(steps, columns["loss"], linewidth=1, label="training")
    _plot_evaluations(loss, steps, columns.get("eval_loss", ()))
    rate.plot(steps, columns["lr"], linewidth=1)
    workers.plot(steps, columns["world_size"], linewidth=1, drawstyle="steps-post")
    workers.set_ylim(bottom=0)
    workers.yaxis.set_major_locator(MaxNLocator(integer=True))
    for axis, label in zip(axes, ("loss", "learning rate", "workers"), strict=True):
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    workers.set_xlabel("step")
    loss.set_title(job.id)
    _mark(axes, marks)
    loss.legend(loc="upper right")
    return figure


@cache
def _figure_class() -> type[Figure]:
    """Return a figure class that a notebook can display.

    ``pyplot`` is not used because it never frees its figures, and a notebook displays them twice.
    Without ``pyplot``, IPython cannot draw a plain ``Figure``.
    """
    from matplotlib.figure import Figure

    class NotebookFigure(Figure):
        """A figure with a PNG representation."""

        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            self.savefig(file, format="png")
            return file.getvalue()

    return NotebookFigure


def worker_marks(events: Sequence[Event]) -> list[tuple[int, str, str]]:
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


def _plot_evaluations(axis: Axes, steps: Sequence[int], losses: Sequence[float]) -> None:
    # Use strict=False: a job without evaluations has no such column, so `losses` is empty.
    points = [(s, x) for s, x in zip(steps, losses, strict=False) if not math.isnan(x)]
    if points:
        axis.plot(*zip(*points, strict=True), marker=".", linewidth=1, label="evaluation")


def _mark(axes: Sequence[Axes], marks: Sequence[tuple[int, str, str]]) -> None:
    shown: set[str] = set()
    for step, worker, kind in marks:
        for axis in axes:
            # Only the first axis has a legend, in which each kind should appear once.
            label = "_nolegend_" if kind in shown else f"worker {kind}"
            axis.axvline(step, color=COLORS[kind], linestyle="--", linewidth=1, label=label)
        shown.add(kind)
        if len(marks) <= MAX_LABELS:
            axes[0].annotate(
                f"{worker} {kind}",
                xy=(step, 0.98),
                xycoords=axes[0].get_xaxis_transform(),
                rotation=90,
                ha="right",
                va="top",
                fontsize="small",
                color=COLORS[kind],
            )
