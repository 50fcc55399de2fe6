"""Back off on workers whose trainers keep exiting.

A job survives any number of machine faults. Each consecutive fault doubles the wait, so that a
broken machine that keeps coming back does not disturb the other machines each time.
"""

from __future__ import annotations

from dataclasses import dataclass

HEALTHY_S = 10.0
"""If a trainer stepped for this many seconds, its exit is unrelated to the previous one."""

FORGET_S = 180.0
"""Faults at least this many seconds apart are unrelated; longer than any back-off."""

FIRST_WAIT_S = 1.0
MAX_WAIT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Health:
    """Fault count and back-off for a worker whose trainer exited on its own."""

    num_faults: int
    """Consecutive faults."""
    last_at: float
    """Time of the last fault."""
    retry_at: float
    """When the next trainer may start."""


def after_fault(
    previous: Health | None, *, now: float, stepped_s: float, was_ready: bool
) -> Health:
    """Count a fault and return when the next trainer may start.

    Args:
        previous: The worker's earlier faults; None if there are none.
        now: When the trainer exited.
        stepped_s: Seconds for which it had been stepping in its generation.
        was_ready: True if it had ever been ready to train. Such a trainer restarts immediately
            after its first fault, because the other ranks wait for it.

    >>> first = after_fault(None, now=0.0, stepped_s=0.0, was_ready=False)
    >>> first.retry_at, after_fault(first, now=5.0, stepped_s=0.0, was_ready=False).retry_at
    (1.0, 7.0)
    """
    num_faults = 1
    # Faults are consecutive unless a long healthy phase or a long pause is between them.
    if previous is not None and stepped_s < HEALTHY_S and now - previous.last_at < FORGET_S:
        num_faults = previous.num_faults + 1
    wait_s = wait_after(num_faults - was_ready)  # no wait after the first fault if it was ready
    return Health(num_faults=num_faults, last_at=now, retry_at=now + wait_s)


def wait_after(num_faults: int) -> float:
    """Return the back-off in seconds after ``num_faults`` consecutive faults.

    >>> [wait_after(n) for n in (0, 1, 2, 3, 7, 99)]
    [0.0, 1.0, 2.0, 4.0, 60.0, 60.0]
    """
    if num_faults < 1:
        return 0.0
    # The exponent is bounded, because a float overflows at 2.0 ** 1024.
    return min(MAX_WAIT_S, FIRST_WAIT_S * 2.0 ** min(num_faults - 1, 10))
