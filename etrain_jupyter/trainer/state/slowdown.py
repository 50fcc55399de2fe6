"""Measure how much slower training is while a checkpoint is written in the background."""

from __future__ import annotations

import statistics
from collections import deque

NUM_USUAL = 31
"""Number of steps without a checkpoint; their median duration is the usual step time."""
MIN_USUAL = 5
"""With fewer steps, there is no usual step time yet, and no slowdown is reported."""


class Slowdown:
    """Compare the steps during a checkpoint with the steps before it.

    The main thread writes; the writer thread reads ``extra_s``, a single number.
    """

    def __init__(self) -> None:
        self._usual: deque[float] = deque(maxlen=NUM_USUAL)
        self._extra_s = 0.0

    def begin_generation(self) -> None:
        """Forget the usual step time, which depends on the number of ranks."""
        self._usual.clear()
        self._extra_s = 0.0

    def begin(self) -> None:
        """Record that the writer has started a checkpoint."""
        self._extra_s = 0.0

    def take_step(self, seconds: float, *, is_writing: bool) -> None:
        """Record the duration of a step, and whether a checkpoint was being written."""
        if not is_writing:
            self._usual.append(seconds)
        elif len(self._usual) >= MIN_USUAL:
            # Steps shorter than usual are subtracted, so that random variations cancel out.
            self._extra_s += seconds - statistics.median(self._usual)

    @property
    def extra_s(self) -> float:
        """Seconds by which the steps since ``begin`` took longer than usual."""
        return max(0.0, self._extra_s)
