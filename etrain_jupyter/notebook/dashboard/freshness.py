"""Decide whether the newest durable checkpoint is too old, without I/O.

The clock starts at the last checkpoint or, if that is later, when training last started or resumed.
Time spent waiting does not count, because no work is at risk then.
"""

from __future__ import annotations

from typing import Any

from etrain_jupyter.config.fields import Interval
from etrain_jupyter.notebook.dashboard.snapshot import CheckpointDue, Snapshot

OVERDUE_AFTER = 3
"""Number of intervals after which a checkpoint is overdue: one may be in flight, one late."""
MIN_LIMIT_S = 30.0
"""Minimum time until a checkpoint is overdue, so that short intervals cause no false alarms."""


class Freshness:
    """Track when the next checkpoint is overdue."""

    def __init__(self) -> None:
        self._every: Interval | None = None
        self._since: float | None = None
        self._duration_s = 0.0
        self._failed = ""

    def configure(self, config: dict[str, Any]) -> None:
        """Set ``checkpoint.every`` from the JSON form of a job's configuration."""
        text = (config.get("checkpoint") or {}).get("every")
        self._every = Interval.parse(text) if text else None

    def choose(self, interval_s: float) -> None:
        """Set the interval that ``checkpoint.every: auto`` has chosen."""
        self._every = Interval(value=interval_s, unit="s")

    def start_training(self, time: float) -> None:
        """Start the clock when training starts or resumes."""
        # Never move it back: a checkpoint may have been committed after this event.
        self._since = max(time, self._since or time)

    def commit(self, time: float, duration_s: float) -> None:
        """Restart the clock, because a checkpoint is durable."""
        self._since, self._duration_s, self._failed = time, duration_s, ""

    def fail(self, step: int, error: str) -> None:
        """Record that a checkpoint could not be written."""
        self._failed = f"step {step:,}: {error}"

    def due(self, *, step_s: float | None, steps_per_epoch: int | None) -> CheckpointDue:
        """Return when the next checkpoint is overdue.

        Args:
            step_s: Current seconds per step; None if unknown.
            steps_per_epoch: Planned steps per epoch; None if unknown.
        """
        interval_s = self._interval_s(step_s, steps_per_epoch)
        limit_s = None
        if interval_s is not None:
            # A checkpoint counts once it is durable; assume that this takes as long as last time.
            limit_s = max(OVERDUE_AFTER * interval_s + self._duration_s, MIN_LIMIT_S)
        return CheckpointDue(since=self._since, limit_s=limit_s, failed=self._failed)

    def _interval_s(self, step_s: float | None, steps_per_epoch: int | None) -> float | None:
        every = self._every
        if every is None:
            return None  # `auto` chooses an interval once it has measured a checkpoint
        if every.unit == "s":
            return every.value
        steps = every.value
        if every.unit == "epochs":
            # Without a plan, the length of an epoch and thus the limit is unknown: return None
            # below.
            steps *= steps_per_epoch or 0
        return steps * step_s if step_s is not None and steps else None


def trouble_of(snapshot: Snapshot, now: float) -> str:
    """Return ``failed`` or ``overdue``; empty if checkpoints are in order.

    Args:
        snapshot: The job.
        now: Seconds since the epoch.
    """
    due = snapshot.checkpoint_due
    if due.failed:
        return "failed"
    # A paused or waiting job is not training, so no work could be lost.
    if snapshot.status != "running" or due.since is None or due.limit_s is None:
        return ""
    return "overdue" if now - due.since > due.limit_s else ""
