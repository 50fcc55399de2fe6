"""Decide how long warm newcomers wait for others, so that one change admits all of them."""

from __future__ import annotations

ADMISSION_GRACE_S = 1.0
"""Time to wait until the duration of a change is known, and before the first generation."""
MAX_WINDOW_S = 30.0


def admission_window_s(*, change_s: float, num_training: int, num_waiting: int) -> float:
    """Return the time for which the first newcomer waits for those that still warm up.

    While newcomers wait, their own time is lost. A change of its own for each of them would stop
    all ranks. They wait until both cost the same, so that the cost is at most twice that of knowing
    when the others will be warm.

    Args:
        change_s: Duration of a recent change, in seconds; 0 if it is unknown.
        num_training: Ranks that a change stops.
        num_waiting: Newcomers that are warm.

    >>> admission_window_s(change_s=0.2, num_training=3, num_waiting=1)
    0.8
    """
    if not num_waiting:
        return 0.0
    if not num_training or not change_s:
        return ADMISSION_GRACE_S
    return min(MAX_WINDOW_S, change_s * (num_training + num_waiting) / num_waiting)
