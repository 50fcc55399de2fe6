"""Detection of machines on which training needs all cores."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

MIN_OWN_CORES = 0.1
"""A process that uses fewer cores than this does not compete for them: it waits, or uses a GPU."""
MAX_IDLE = 0.15
"""Maximum idle share of all cores of a busy machine."""
WINDOW_S = 0.25
"""Minimum length of a measurement in seconds."""
MAX_WINDOW_S = 1.0
"""A longer measurement contains a pause in the training and is not used, in seconds."""


class BusyCores:
    """Measure whether all cores are busy, and this process is one of those that keep them busy.

    Args:
        now_s: Returns the time, in seconds.
        own_s: Returns the processor time of this process, in seconds.
        busy_percent: Returns the busy share of all cores since the last call, in percent.
    """

    def __init__(
        self,
        *,
        now_s: Callable[[], float] = time.monotonic,
        own_s: Callable[[], float] = time.process_time,
        busy_percent: Callable[[], float] = psutil.cpu_percent,
    ) -> None:
        self._now_s, self._own_s, self._busy_percent = now_s, own_s, busy_percent
        self._since_s, self._own_since_s = now_s(), own_s()
        self._are_busy = False

    def are_busy(self) -> bool:
        """Return the result for the last fraction of a second."""
        now_s = self._now_s()
        elapsed_s = now_s - self._since_s
        if elapsed_s < WINDOW_S:
            return self._are_busy
        own_s, idle = self._own_s(), 1 - self._busy_percent() / 100
        own_cores = (own_s - self._own_since_s) / elapsed_s
        self._since_s, self._own_since_s = now_s, own_s
        if elapsed_s <= MAX_WINDOW_S:
            self._are_busy = own_cores >= MIN_OWN_CORES and idle <= MAX_IDLE
        return self._are_busy
