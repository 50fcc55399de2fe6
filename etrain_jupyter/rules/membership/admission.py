"""Decide how long warm newcomers wait for others, so that one change admits all of them."""

from __future__ import annotations

ADMISSION_GRACE_S = 1.0
"""Seconds without another newcomer after which those that are warm are admitted, before the first
generation and while the duration of a change is unknown."""

MAX_ADMISSION_WAIT_S = 5.0
"""Seconds after which they stop waiting even if others keep becoming warm."""

MAX_WINDOW_S = 30.0
"""Limit for the wait once the duration of a change is known."""


def is_admission_due(
    *, waited_s: float, idle_s: float, change_s: float, num_training: int, num_waiting: int
) -> bool:
    """Return True if warm newcomers are admitted now, although others are still warming up.

    Args:
        waited_s: Seconds since the first of them became warm.
        idle_s: Seconds since the newest of them became warm.
        change_s: Duration of a recent change, in seconds; 0 if it is unknown.
        num_training: Ranks that a change stops.
        num_waiting: Newcomers that are warm.
    """
    if not num_training or not change_s:
        return idle_s >= ADMISSION_GRACE_S or waited_s >= MAX_ADMISSION_WAIT_S
    return waited_s >= admission_window_s(
        change_s=change_s, num_training=num_training, num_waiting=num_waiting
    )


def admission_window_s(*, change_s: float, num_training: int, num_waiting: int) -> float:
    """Return the time for which the first newcomer waits for those that still warm up.

    While newcomers wait, their own time is lost. A change of its own for each of them would stop
    all ranks. They wait until both cost the same, so that the cost is at most twice that of knowing
    when the others will be warm.

    Args:
        change_s: Duration of a recent change, in seconds.
        num_training: Ranks that a change stops.
        num_waiting: Newcomers that are warm; at least 1.

    >>> admission_window_s(change_s=0.2, num_training=3, num_waiting=1)
    0.8
    """
    return min(MAX_WINDOW_S, change_s * (num_training + num_waiting) / num_waiting)
