"""Decide when a worker whose machine will be interrupted stops training."""

from __future__ import annotations

LAST_STEP_S = 10.0
"""Time before the interruption at which a worker leaves at the latest, in seconds. At most a
quarter of the notice period, unless its last step may take longer."""

STEPS_PER_LEAD = 2.0
"""Time reserved for the last step, as a multiple of the duration of recent steps: one in progress,
and the one after which all ranks leave."""


def last_step_lead_s(left_s: float, *, step_s: float = 0.0) -> float:
    """Return the time before the interruption at which a worker leaves without a replacement.

    Args:
        left_s: Notice period, in seconds.
        step_s: Duration of recent steps, in seconds.

    >>> last_step_lead_s(120.0), last_step_lead_s(8.0), last_step_lead_s(120.0, step_s=30.0)
    (10.0, 2.0, 60.0)
    """
    return max(min(LAST_STEP_S, left_s / 4), min(left_s, STEPS_PER_LEAD * step_s))
