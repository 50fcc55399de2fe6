"""Clock for the coordinator's decisions.

Changes of the wall clock do not affect it, so they shift no deadline and no retry. It continues
while the machine sleeps, because the notice period of a spot machine does, too. Wall time is used
only in events, and in data from logs and other machines; it is converted once, on arrival.
"""

from __future__ import annotations

import time

# Available on Linux. Elsewhere the clock may stop while the machine sleeps.
_BOOT: int | None = getattr(time, "CLOCK_BOOTTIME", None)


def now() -> float:
    """Return the time in seconds since an arbitrary instant."""
    return time.monotonic() if _BOOT is None else time.clock_gettime(_BOOT)


def from_wall(instant: float) -> float:
    """Convert seconds since the epoch, using the current setting of the wall clock."""
    return now() + (instant - time.time())
