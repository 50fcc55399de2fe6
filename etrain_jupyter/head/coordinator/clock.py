"""Clock for the coordinator's decisions.

Changes to the wall clock do not affect it, so they do not shift deadlines or retries. It keeps
running while the machine sleeps, as does the notice period of a spot machine. Wall time occurs only
in events and in data from logs or other machines. Such data is converted once, on arrival.
"""

from __future__ import annotations

import time

# Available on Linux. On other systems the clock may stop while the machine sleeps.
_BOOT: int | None = getattr(time, "CLOCK_BOOTTIME", None)


def now() -> float:
    """Return the time in seconds since an arbitrary instant."""
    return time.monotonic() if _BOOT is None else time.clock_gettime(_BOOT)


def from_wall(instant: float) -> float:
    """Convert seconds since the epoch to this clock, based on the current wall time."""
    return now() + (instant - time.time())
