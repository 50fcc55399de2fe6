"""Detection of machines on which training needs all cores."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import psutil

MIN_OWN_CORES = 0.1
"""A process that uses fewer cores than this does not compete for them: it waits, or uses a GPU."""
MAX_IDLE = 0.15
"""Maximum idle share of all cores of a busy machine."""
WINDOW_S = 0.25
"""Minimum length of a measurement in seconds."""
MAX_WINDOW_S = 1.0
"""A longer measurement contains a pause in the training and is not used, in seconds."""


class Usage(NamedTuple):
    """Times in seconds since an arbitrary moment."""

    now_s: float
    own_s: float
    """Processor time of this process."""
    idle_s: float
    """Idle time of all cores together."""
    total_s: float
    """Idle and busy time of all cores together."""


def read_usage() -> Usage:
    """Return the current times."""
    times = psutil.cpu_times()
    # Linux counts the time of guests in ``user`` as well.
    guests_s = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    return Usage(
        now_s=time.monotonic(),
        own_s=time.process_time(),
        idle_s=times.idle + getattr(times, "iowait", 0.0),
        total_s=sum(times) - guests_s,
    )


class BusyCores:
    """Measure whether all cores are busy, and this process is one of those that keep them busy.

    Args:
        read: Returns the current times.
    """

    def __init__(self, read: Callable[[], Usage] = read_usage) -> None:
        self._read = read
        self._since = read()
        self._are_busy = False

    def are_busy(self) -> bool:
        """Return the result for the last fraction of a second."""
        now, since = self._read(), self._since
        elapsed_s = now.now_s - since.now_s
        if elapsed_s < WINDOW_S:
            return self._are_busy
        self._since = now
        total_s = now.total_s - since.total_s
        if elapsed_s <= MAX_WINDOW_S and total_s > 0:
            own_cores = (now.own_s - since.own_s) / elapsed_s
            idle = (now.idle_s - since.idle_s) / total_s
            self._are_busy = own_cores >= MIN_OWN_CORES and idle <= MAX_IDLE
        return self._are_busy
