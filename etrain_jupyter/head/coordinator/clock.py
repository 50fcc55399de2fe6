"""Clock of the coordinator's decisions.

It is monotonic: a step of the wall clock moves no deadline and no retry. It runs while the machine
is suspended, as the notice of a spot machine elsewhere does. Wall time is for events, and for what
other machines send or logs contain; it is converted once, where it comes in.
"""

from __future__ import annotations

import time

_BOOT: int | None = getattr(time, "CLOCK_BOOTTIME", None)
"""Linux has it; elsewhere the clock may stop while the machine sleeps."""


def now() -> float:
    """Return the time in seconds since an arbitrary instant."""
    return time.monotonic() if _BOOT is None else time.clock_gettime(_BOOT)


def from_wall(instant: float) -> float:
    """Convert seconds since the epoch, by this machine's wall clock as it is set now."""
    return now() + (instant - time.time())
