"""How much slower training is while a checkpoint is written in the background."""

from __future__ import annotations

import statistics
from collections import deque

NUM_USUAL = 31
"""Steps without a checkpoint whose median is the ordinary step."""
FEWEST_USUAL = 5
"""With fewer nobody knows what is ordinary, and nothing is told."""


class Slowdown:
    """Compares the steps made while a checkpoint is written with those before."""

    def __init__(self) -> None:
        self._usual: deque[float] = deque(maxlen=NUM_USUAL)
        self._extra_s = 0.0

    def begin(self) -> None:
        """A checkpoint begins to be written."""
        self._extra_s = 0.0

    def take_step(self, seconds: float, *, is_writing: bool) -> None:
        """Take a step that was made while one was written, or was not."""
        if not is_writing:
            self._usual.append(seconds)
        elif len(self._usual) >= FEWEST_USUAL:
            # Also what is shorter: what else the machine does has no sign.
            self._extra_s += seconds - statistics.median(self._usual)

    @property
    def extra_s(self) -> float:
        """Seconds beyond as many ordinary steps, since the checkpoint began."""
        return max(0.0, self._extra_s)
