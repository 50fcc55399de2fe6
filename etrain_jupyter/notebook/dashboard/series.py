"""Columns that grow, and their thinning to what a screen can show."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
SmallFloats: TypeAlias = npt.NDArray[np.float32]
Indices: TypeAlias = npt.NDArray[np.intp]

FIRST_CAPACITY = 256


class Series:
    """One curve: ``y`` over a never falling ``x``; appending costs amortised constant time.

    Doubling keeps a million points at 12 bytes each; ``y`` is single precision because a screen
    needs no more, and the durable log has the exact numbers.
    """

    def __init__(self) -> None:
        self._x: Floats = np.empty(FIRST_CAPACITY, np.float64)
        self._y: SmallFloats = np.empty(FIRST_CAPACITY, np.float32)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def x(self) -> Floats:
        """The positions so far, shape ``(n,)``; a view that the next append may leave behind."""
        return self._x[: self._length]

    @property
    def y(self) -> SmallFloats:
        """The values so far, shape ``(n,)``; a view that the next append may leave behind."""
        return self._y[: self._length]

    def append(self, x: float, y: float) -> None:
        """Add one point; ``x`` must not be smaller than the last one."""
        if self._length == len(self._x):
            self._x = np.concatenate([self._x, np.empty_like(self._x)])
            self._y = np.concatenate([self._y, np.empty_like(self._y)])
        self._x[self._length] = x
        with np.errstate(over="ignore"):  # a diverging loss is drawn as infinite, not warned of
            self._y[self._length] = y
        self._length += 1

    def extend(self, x: npt.NDArray[Any], y: npt.NDArray[Any]) -> None:
        """Add points, shape ``(n,)`` each; their ``x`` must not fall."""
        length = self._length + len(x)
        while length > len(self._x):
            self._x = np.concatenate([self._x, np.empty_like(self._x)])
            self._y = np.concatenate([self._y, np.empty_like(self._y)])
        self._x[self._length : length] = x
        with np.errstate(over="ignore"):
            self._y[self._length : length] = y
        self._length = length

    def cut_from(self, x: float) -> bool:
        """Forget the points at ``x`` and after; tell whether there were any."""
        length = int(np.searchsorted(self.x, x, side="left"))
        was_cut = length < self._length
        self._length = length
        return was_cut


def thin(x: Floats, y: SmallFloats, max_points: int) -> tuple[Floats, SmallFloats]:
    """Keep at most about ``max_points`` points so that every peak and dip still shows.

    The row is cut into equal buckets and each keeps its smallest and its largest value at their
    own places; the first and the last point always stay. NaN counts as neither small nor large.

    Args:
        x: Positions, shape ``(n,)``.
        y: Values, shape ``(n,)``.
        max_points: How many to keep, 4 or more; up to two more are returned.

    Returns:
        The kept positions and values, in order.
    """
    num_points = len(x)
    if num_points <= max_points:
        return x, y
    num_buckets = max(1, max_points // 2)
    size = -(-num_points // num_buckets)
    kept = np.concatenate(
        [[0, num_points - 1], _extremes(y, size, np.inf), _extremes(y, size, -np.inf)]
    )
    kept = np.unique(kept)
    return x[kept], y[kept]


def means(x: Floats, y: SmallFloats, max_points: int) -> tuple[Floats, SmallFloats]:
    """Average neighbours until at most ``max_points`` points are left.

    A smoothed line is drawn from these: the smallest and largest values alone would put it between
    the extremes, not where most points are. NaN counts for nothing; where there is nothing else,
    the mean is NaN.

    Args:
        x: Positions, shape ``(n,)``.
        y: Values, shape ``(n,)``.
        max_points: How many to return, 1 or more.
    """
    if len(x) <= max_points:
        return x, y
    starts = np.arange(0, len(x), -(-len(x) // max_points))
    counts = np.diff([*starts, len(x)])
    shown = np.isfinite(y)
    sums = np.add.reduceat(np.where(shown, y, 0).astype(np.float64), starts)
    num_shown = np.add.reduceat(shown.astype(np.int64), starts)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        mean_y = (sums / num_shown).astype(np.float32)
    return np.add.reduceat(x, starts) / counts, mean_y


def between(x: Floats, y: SmallFloats, first: float, last: float) -> tuple[Floats, SmallFloats]:
    """Return the points from ``first`` to ``last`` and one more on either side."""
    start = max(0, int(np.searchsorted(x, first)) - 1)
    end = int(np.searchsorted(x, last, side="right")) + 1
    return x[start:end], y[start:end]


def _extremes(y: SmallFloats, size: int, never: float) -> Indices:
    """Return each bucket's index of the minimum (``never=inf``) or maximum (``-inf``)."""
    num_buckets = -(-len(y) // size)
    padded = np.full(num_buckets * size, never, np.float32)
    padded[: len(y)] = np.where(np.isnan(y), np.float32(never), y)
    table = padded.reshape(num_buckets, size)
    inside = table.argmin(axis=1) if never > 0 else table.argmax(axis=1)
    places: Indices = np.minimum(inside + np.arange(num_buckets) * size, len(y) - 1)
    return places
