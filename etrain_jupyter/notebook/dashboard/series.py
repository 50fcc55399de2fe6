"""Growing columns of numbers, and thinning to the resolution of a screen."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
SmallFloats: TypeAlias = npt.NDArray[np.float32]
Indices: TypeAlias = npt.NDArray[np.intp]

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
        # Double the capacity, which makes the cost of an append constant on average.
        if self._length == len(self._x):
            self._x = np.concatenate([self._x, np.empty_like(self._x)])
            self._y = np.concatenate([self._y, np.empty_like(self._y)])
        self._x[self._length] = x
        # A diverging loss exceeds float32: it becomes infinite, without a warning in the cell.
        with np.errstate(over="ignore"):
            self._y[self._length] = y
        self._length += 1

    def extend(self, x: npt.NDArray[Any], y: npt.NDArray[Any]) -> None:
        """Append points, shape ``(n,)`` each; ``x`` must not decrease."""
        length = self._length + len(x)
        while length > len(self._x):
            self._x = np.concatenate([self._x, np.empty_like(self._x)])
            self._y = np.concatenate([self._y, np.empty_like(self._y)])
        self._x[self._length : length] = x
        with np.errstate(over="ignore"):
            self._y[self._length : length] = y
        self._length = length

    def cut_from(self, x: float) -> bool:
        """Remove the points at and after ``x``; return whether there were any."""
        # Only the length changes: the memory is overwritten by the next append.
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
    # Use double precision: a sum of many float32 values would lose digits.
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
    places: Indices = np.minimum(inside + np.arange(num_buckets) * size, len(y) - 1)
    return places
