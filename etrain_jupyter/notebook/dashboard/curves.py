"""The curves of a job: loss, metrics and throughput over steps, world size over steps and time.

A curve grows with the job, and is thinned to the resolution of a screen.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from etrain_jupyter.log.blocks import StepRun
from etrain_jupyter.log.events import EvalCompleted, EvalScored, StepCompleted

Floats: TypeAlias = npt.NDArray[np.float64]
SmallFloats: TypeAlias = npt.NDArray[np.float32]
Indices: TypeAlias = npt.NDArray[np.intp]

BY_TIME = "time."
"""Name prefix of curves over seconds since the start; all others are over steps."""
UNDONE = "undone."
"""Name prefix of the curves of undone steps."""
MAX_POINTS = 1000
"""Maximum points per curve of undone steps, since the number of rewinds is not limited."""
FIRST_CAPACITY = 256


class Series:
    """One curve: ``y`` over a non-decreasing ``x``, with appends in amortized constant time.

    A point takes 12 bytes. ``y`` is single precision, which is enough for a screen; the durable log
    has the exact numbers.
    """

    def __init__(self) -> None:
        self._x: Floats = np.empty(FIRST_CAPACITY, np.float64)
        self._y: SmallFloats = np.empty(FIRST_CAPACITY, np.float32)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def x(self) -> Floats:
        """The positions, shape ``(n,)``: a view that the next append may invalidate."""
        return self._x[: self._length]

    @property
    def y(self) -> SmallFloats:
        """The values, shape ``(n,)``: a view that the next append may invalidate."""
        return self._y[: self._length]

    def append(self, x: float, y: float) -> None:
        """Append a point; ``x`` must not be less than the last one."""
        self._reserve(self._length + 1)
        self._x[self._length] = x
        # A diverging loss exceeds float32: it becomes infinite, without a warning in the cell.
        with np.errstate(over="ignore"):
            self._y[self._length] = y
        self._length += 1

    def extend(self, x: npt.NDArray[Any], y: npt.NDArray[Any]) -> None:
        """Append points, shape ``(n,)`` each; ``x`` must not decrease."""
        length = self._length + len(x)
        self._reserve(length)
        self._x[self._length : length] = x
        with np.errstate(over="ignore"):
            self._y[self._length : length] = y
        self._length = length

    def _reserve(self, length: int) -> None:
        # Double the capacity, which makes the cost of an append constant on average.
        while length > len(self._x):
            self._x = np.concatenate([self._x, np.empty_like(self._x)])
            self._y = np.concatenate([self._y, np.empty_like(self._y)])

    def cut_from(self, x: float) -> bool:
        """Remove the points at and after ``x``; return whether there were any."""
        # Only the length changes; the next append overwrites the memory.
        length = int(np.searchsorted(self.x, x, side="left"))
        was_cut = length < self._length
        self._length = length
        return was_cut


def thin(x: Floats, y: SmallFloats, max_points: int) -> tuple[Floats, SmallFloats]:
    """Keep about ``max_points`` points, such that every peak and dip remains visible.

    Split the curve into buckets with the same number of points. Keep the minimum and the maximum of
    each bucket at their positions, and the first and the last point. NaN is never a minimum or a
    maximum.

    Args:
        x: Positions, shape ``(n,)``.
        y: Values, shape ``(n,)``.
        max_points: Number of points to keep, at least 4; up to two more may be returned.

    Returns:
        The kept positions and values, in order.
    """
    num_points = len(x)
    if num_points <= max_points:
        return x, y
    # Two points per bucket:
    #
    #   bucket     |  .       |      .   |   .      |
    #              | . .   .  | . .. . . | . .  .   |
    #              |  ..      |     .    |     . .  |
    #   kept         max, min   max, min   max, min
    #
    # A mean would hide a spike in the loss, and taking every n-th point would miss most spikes.
    num_buckets = max(1, max_points // 2)
    size = -(-num_points // num_buckets)  # rounded up
    kept = np.concatenate(
        [[0, num_points - 1], _extremes(y, size, np.inf), _extremes(y, size, -np.inf)]
    )
    # Sort the points, and drop duplicates: a point may be both the minimum and the maximum of its
    # bucket.
    kept = np.unique(kept)
    return x[kept], y[kept]


def means(x: Floats, y: SmallFloats, max_points: int) -> tuple[Floats, SmallFloats]:
    """Average neighbouring points, so that at most ``max_points`` are left.

    NaN values are ignored; the mean is NaN only if all values are NaN.

    Args:
        x: Positions, shape ``(n,)``.
        y: Values, shape ``(n,)``.
        max_points: Maximum points to return, at least 1.
    """
    if len(x) <= max_points:
        return x, y
    # Smoothed lines are drawn from these means. If they were drawn from the minima and maxima of
    # `thin`, they would run halfway between the extremes instead of where most points are.
    starts = np.arange(0, len(x), -(-len(x) // max_points))
    counts = np.diff([*starts, len(x)])
    shown = np.isfinite(y)
    # Use double precision, because a sum of many float32 values would lose digits.
    sums = np.add.reduceat(np.where(shown, y, 0).astype(np.float64), starts)
    num_shown = np.add.reduceat(shown.astype(np.int64), starts)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):  # 0 / 0 if all are NaN
        mean_y = (sums / num_shown).astype(np.float32)
    return np.add.reduceat(x, starts) / counts, mean_y


def between(x: Floats, y: SmallFloats, first: float, last: float) -> tuple[Floats, SmallFloats]:
    """Return the points from ``first`` to ``last``, and one more at each end."""
    # Include a point beyond each end, so that the line reaches the edges of the chart.
    start = max(0, int(np.searchsorted(x, first)) - 1)
    end = int(np.searchsorted(x, last, side="right")) + 1
    return x[start:end], y[start:end]


def _extremes(y: SmallFloats, size: int, never: float) -> Indices:
    """Return the index of each bucket's minimum (``never=inf``) or maximum (``-inf``)."""
    # `never` is larger or smaller than all values, so it is never chosen. It pads the last bucket
    # and replaces NaN, which argmin would otherwise return.
    num_buckets = -(-len(y) // size)
    padded = np.full(num_buckets * size, never, np.float32)
    padded[: len(y)] = np.where(np.isnan(y), np.float32(never), y)
    table = padded.reshape(num_buckets, size)
    inside = table.argmin(axis=1) if never > 0 else table.argmax(axis=1)
    indices: Indices = np.minimum(inside + np.arange(num_buckets) * size, len(y) - 1)
    return indices


class CurveSet:
    """All curves of a job, by name."""

    def __init__(self) -> None:
        self._series: dict[str, Series] = {}
        self._undone = UndoneCurves()
        self._num_samples = 0

    def add_step(self, event: StepCompleted, elapsed_s: float) -> None:
        """Append a step; ``elapsed_s`` counts from the start of the job."""
        self._num_samples += event.samples
        self._append("loss", event.step, event.loss)
        self._append("lr", event.step, event.lr)
        self._append("samples", event.step, self._num_samples)
        self._append("elapsed_s", event.step, elapsed_s)
        self._append("samples_per_s", event.step, event.samples_per_s)
        for name, value in event.metrics.items():
            self._append(f"metrics.{name}", event.step, value)

    def add_run(self, run: StepRun, started_at: float) -> None:
        """Append a run of steps; ``add_step`` has added the step before it."""
        # All steps of the run have the same metrics, so every curve of the run already exists.
        steps = run.column("step")
        samples = self._num_samples + np.cumsum(run.column("samples"))
        self._num_samples = int(samples[-1]) if len(run) else self._num_samples
        self._series["samples"].extend(steps, samples)
        self._series["elapsed_s"].extend(steps, run.column("time") - started_at)
        for name in ("loss", "lr", "samples_per_s"):
            self._series[name].extend(steps, run.column(name))
        for name, column in run.metrics().items():
            self._series[f"metrics.{name}"].extend(steps, column)

    def add_eval(self, event: EvalCompleted | EvalScored) -> None:
        """Append an evaluation."""
        for name, value in event.values.items():
            self._append(f"eval.{name}", event.step, value)

    def add_world_size(self, world_size: int, *, step: int, elapsed_s: float | None) -> None:
        """Append the world size if it has changed; ``elapsed_s`` is None before the job starts."""
        # One curve is over steps, for the charts of a run; the other is over time, to show when
        # workers joined and left.
        positions = {"world_size": float(step)}
        if elapsed_s is not None:
            positions[f"{BY_TIME}world_size"] = elapsed_s
        for name, x in positions.items():
            curve = self._series.get(name)
            if curve is None or not len(curve) or curve.y[-1] != world_size:
                self._append(name, x, world_size)

    def rewind_to(self, step: int) -> None:
        """Remove the points after ``step`` from the curves over steps."""
        # Curves over time keep their points, which show when there were how many workers.
        for name, series in self._series.items():
            if not name.startswith(BY_TIME):
                self._undone.keep(name, series, step)
                series.cut_from(step + 1)
        # `cut_from` has removed the undone steps, so the last point counts the samples that still
        # count as trained.
        samples = self._series.get("samples")
        self._num_samples = int(samples.y[-1]) if samples else 0

    def to_dict(self) -> dict[str, tuple[Floats, SmallFloats]]:
        """Return every curve as ``(x, y)`` over steps: views that the next append may change.

        The names are ``loss``, ``lr``, ``samples_per_s``, ``world_size`` (one point per change),
        ``metrics.NAME``, ``eval.loss`` and ``eval.NAME``. ``samples`` and ``elapsed_s`` convert
        steps to the other units of the axis. ``time.world_size`` is over seconds since the start;
        rewinds do not change it. ``undone.NAME`` has the points that a rewind discarded.
        """
        curves = {name: (series.x, series.y) for name, series in self._series.items()}
        return curves | self._undone.to_dict()

    def _append(self, name: str, x: float, y: float) -> None:
        self._series.setdefault(name, Series()).append(x, y)


class UndoneCurves:
    """Keep the last value of each step before it was undone, with a limited number of points.

    The charts draw them faintly, to show how much a rewind discarded and whether the repeated steps
    have similar values.
    """

    def __init__(self) -> None:
        self._curves: dict[str, tuple[Floats, SmallFloats]] = {}

    def keep(self, name: str, series: Series, step: int) -> None:
        """Store the points from ``step`` on, before the curve removes them."""
        #   before          1 2 3 4 5 6 7
        #   rewind to 4     1 2 3 4              undone: 4 5 6 7, so that it starts on the curve
        #   5, then to 2    1 2                  undone: 2 3 4 5 (new) and 6 7 (of the first rewind)
        #
        # Keep only the curves that the charts draw faintly: the loss and the metrics.
        if name != "loss" and not name.startswith("metrics."):
            return
        start = int(np.searchsorted(series.x, step))
        x, y = series.x[start:].copy(), series.y[start:].copy()
        # The curve has no point after the step, so nothing is lost.
        if not len(x) or x[-1] <= step:
            return
        previous = self._curves.get(name)
        if previous is not None:
            # An earlier rewind may have discarded steps beyond those of this one.
            is_beyond = previous[0] > x[-1]
            x, y = np.append(x, previous[0][is_beyond]), np.append(y, previous[1][is_beyond])
        self._curves[name] = thin(x, y, MAX_POINTS)

    def to_dict(self) -> dict[str, tuple[Floats, SmallFloats]]:
        """Return the curves by name."""
        return {UNDONE + name: curve for name, curve in self._curves.items()}
