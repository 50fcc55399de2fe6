"""How soon a trainer is started again on a worker on which trainers keep ending.

Faults of machines are unlimited, but a machine that is broken, and comes back only to fail, must
not disturb the others each time: every fault in a row doubles the wait.
"""

from __future__ import annotations

from dataclasses import dataclass

HEALTHY_S = 10.0
"""A trainer that stepped so long ended for another reason than the ones before it."""

FORGET_S = 180.0
"""A fault that long ago has nothing to do with the next one; longer than any wait."""

FIRST_WAIT_S = 1.0
MAX_WAIT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Health:
    """What is known of a worker whose trainer ended by itself."""

    num_faults: int
    """In a row."""
    last_at: float
    """When the last one came."""
    retry_at: float
    """When the next trainer may start."""


def after_fault(before: Health | None, *, now: float, stepped_s: float, was_ready: bool) -> Health:
    """Count a fault and say when the next trainer may start.

    Args:
        before: What was known of the worker; None if nothing was.
        now: When the trainer ended.
        stepped_s: How long it had been stepping in its generation.
        was_ready: Whether it had ever been ready to train. One that had been may come back at
            once after its first fault, because the others miss it.

    >>> first = after_fault(None, now=0.0, stepped_s=0.0, was_ready=False)
    >>> first.retry_at, after_fault(first, now=5.0, stepped_s=0.0, was_ready=False).retry_at
    (1.0, 7.0)
    """
    num_faults = 1
    if before is not None and stepped_s < HEALTHY_S and now - before.last_at < FORGET_S:
        num_faults = before.num_faults + 1
    wait_s = wait_after(num_faults - was_ready)
    return Health(num_faults=num_faults, last_at=now, retry_at=now + wait_s)


def wait_after(num_faults: int) -> float:
    """Return how long to wait after so many faults in a row.

    >>> [wait_after(n) for n in (0, 1, 2, 3, 7, 99)]
    [0.0, 1.0, 2.0, 4.0, 60.0, 60.0]
    """
    if num_faults < 1:
        return 0.0
    return min(MAX_WAIT_S, FIRST_WAIT_S * 2.0 ** min(num_faults - 1, 10))
