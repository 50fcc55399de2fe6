"""Curves of several jobs over a common axis, reduced to the resolution of a chart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from etrain_jupyter.display.charts import Curve
from etrain_jupyter.errors import ConfigError
from etrain_jupyter.insight.measures import Floats, to_floats
from etrain_jupyter.insight.runs import AXES, Axis, Run, Task

MAX_POINTS = 400
MAX_VALUE = 1e300
"""Larger values are left out, like NaN, because their differences would overflow a float."""
STEPPED = ("world_size",)
"""Columns whose value holds until the next step, so that a mean of two values has no meaning."""
NAMES = {"world_size": "workers", "lr": "learning rate", "samples_per_s": "samples/s"}
"""Names of columns in charts; the prefix ``eval_`` becomes a word."""
MIN_RATIO = 1.05
"""Numbers of workers, which are means, count as equal if their ratio is below this."""


class Compared(Protocol):
    """The part of a ``Comparison`` that its page and its figure show."""

    runs: tuple[Run, ...]
    labels: tuple[str, ...]
    rows: list[dict[str, Any]]
    notes: tuple[str, ...]
    differences: dict[str, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Label and unit of an axis."""

    label: str
    factor: float = 1.0
    """Positions in hours, dollars, steps or samples are multiplied by this."""


def available_axes(runs: Sequence[Run]) -> list[Axis]:
    """Return the axes on which at least one job has curves."""
    return [axis for axis in AXES if axis != "usd" or any(run.has_prices for run in runs)]


def scale_of(over: Axis, runs: Sequence[Run]) -> Scale:
    """Return the label of an axis; the unit of the time suits the longest job."""
    match over:
        case "steps":
            return Scale(label="step")
        case "samples":
            return Scale(label="samples")
        case "usd":
            return Scale(label="US dollars")
        case "time":
            longest = max((run.hours for run in runs if run.num_steps), default=0.0)
            if longest >= 2:
                return Scale(label="hours")
            if longest >= 2 / 60:
                return Scale(label="minutes", factor=60.0)
            return Scale(label="seconds", factor=3600.0)


def name_of(column: str) -> str:
    """Return the name of a column for a chart.

    >>> name_of("eval_accuracy"), name_of("world_size"), name_of("loss")
    ('accuracy (evaluation)', 'workers', 'loss')
    """
    if column.startswith("eval_"):
        return f"{column.removeprefix('eval_')} (evaluation)"
    return NAMES.get(column, column)


def default_columns(runs: Sequence[Run]) -> list[str]:
    """Return the columns of a comparison's charts: losses, evaluations and workers."""
    known = dict.fromkeys(name for run in runs for name in run.columns)
    return ["loss", *(name for name in known if name.startswith("eval_")), "world_size"]


def check_columns(columns: Sequence[str], runs: Sequence[Run]) -> None:
    """Check that at least one job has each column.

    Raises:
        ConfigError: If no job has one of them; the message lists the columns.
    """
    known = dict.fromkeys(name for run in runs for name in run.columns)
    for column in columns:
        if column not in known:
            raise ConfigError(
                f"no job has a column {column!r}", hint=f"known columns: {', '.join(known)}"
            )


def curves_of(
    labels: Sequence[str], runs: Sequence[Run], column: str, over: Axis
) -> Iterator[Curve]:
    """Yield the curve of each job that has values in the column and positions on the axis."""
    factor = scale_of(over, runs).factor
    for index, (label, run) in enumerate(zip(labels, runs, strict=True)):
        if column not in run.columns:
            continue
        x, y = run.positions(over) * factor, to_floats(run.columns[column])
        shown = np.isfinite(x) & (np.abs(y) < MAX_VALUE)
        if shown.any():
            x, y = _reduce(x[shown], y[shown], is_stepped=column in STEPPED)
            yield Curve(index=index, label=label, x=x, y=y)


def _reduce(x: Floats, y: Floats, *, is_stepped: bool) -> tuple[Floats, Floats]:
    if is_stepped:
        # Keep the steps at which the value changes, and the last one.
        kept = np.flatnonzero(np.diff(y, prepend=math.inf) != 0)
        kept = np.unique([*kept, len(y) - 1])
        kept = kept[:: -(-len(kept) // (2 * MAX_POINTS))]
        return x[kept], y[kept]
    if len(x) <= MAX_POINTS:
        return x, y
    # The mean of neighboring points, so noise averages out, and jobs of different lengths remain
    # comparable.
    starts = np.arange(0, len(x), -(-len(x) // MAX_POINTS))
    counts = np.diff([*starts, len(x)])
    return np.add.reduceat(x, starts) / counts, np.add.reduceat(y, starts) / counts


@dataclass(frozen=True, kw_only=True)
class ScalingPoints:
    """Points of a chart of throughput by number of workers."""

    measured: tuple[tuple[int, float, float], ...]
    """Index of a job, its mean number of workers, and its samples per second."""
    ideal: tuple[tuple[tuple[float, float], tuple[float, float]], ...]
    """Per task, the ends of a line: numbers of workers, and samples per second."""


def scaling_points(runs: Sequence[Run], rows: Sequence[Mapping[str, Any]]) -> ScalingPoints | None:
    """Return the points of the jobs that have an efficiency.

    None if all of them have the same number of workers.
    """
    by_task: dict[Task, list[int]] = {}
    for index, row in enumerate(rows):
        if not math.isnan(row["efficiency"]):
            by_task.setdefault(runs[index].task, []).append(index)
    measured, ideal = [], []
    for members in by_task.values():
        points = [(i, runs[i].workers, runs[i].samples_per_s) for i in members]
        _, fewest, rate = min(points, key=lambda point: point[1])
        most = max(workers for _, workers, _ in points)
        if most > MIN_RATIO * fewest:
            measured += points
            ideal.append(((fewest, most), (rate, rate * most / fewest)))
    if not measured:
        return None
    return ScalingPoints(measured=tuple(measured), ideal=tuple(ideal))
