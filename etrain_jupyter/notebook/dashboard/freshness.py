"""Whether the newest durable checkpoint is as new as the job's cell promised: a rule without I/O.

What counts is the time in which something was trained that is not durable. So the clock starts with
the last checkpoint, or when training last began or went on, whichever is later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etrain_jupyter.config.fields import Interval

OVERDUE_AFTER = 3
"""Intervals without a checkpoint that are too many: one may be in flight, one late."""
LEAST_S = 30.0
"""Never overdue sooner: people do not read the screen more often."""


class Freshness:
    """Folds what the screen must know to tell that no checkpoint comes any more."""

    def __init__(self) -> None:
        self._every: Interval | None = None
        self._since: float | None = None
        self._duration_s = 0.0
        self._failed = ""

    def promise(self, config: dict[str, Any]) -> None:
        """Take ``checkpoint.every`` from the JSON form of a job's configuration."""
        text = (config.get("checkpoint") or {}).get("every")
        self._every = Interval.parse(text) if text else None

    def choose(self, interval_s: float) -> None:
        """Take the interval that ``auto`` has come to."""
        self._every = Interval(value=interval_s, unit="s")

    def train_from(self, time: float) -> None:
        """Training began or went on."""
        self._since = max(time, self._since or time)

    def commit(self, time: float, duration_s: float) -> None:
        """A checkpoint is durable."""
        self._since, self._duration_s, self._failed = time, duration_s, ""

    def fail(self, step: int, error: str) -> None:
        """A checkpoint could not be written."""
        self._failed = f"step {step:,}: {error}"

    def to_dict(self, *, step_s: float | None, steps_per_epoch: int | None) -> dict[str, Any]:
        """Return since when, and after how many seconds from then, a checkpoint is overdue.

        Args:
            step_s: Seconds a step takes now; None while that is unknown.
            steps_per_epoch: Steps of an epoch; None while that is unknown.
        """
        interval_s = self._interval_s(step_s, steps_per_epoch)
        limit_s = None
        if interval_s is not None:
            limit_s = max(OVERDUE_AFTER * interval_s + self._duration_s, LEAST_S)
        return {"since": self._since, "limit_s": limit_s, "failed": self._failed}

    def _interval_s(self, step_s: float | None, steps_per_epoch: int | None) -> float | None:
        every = self._every
        if every is None:
            return None  # auto has saved none so far: it does not know what one costs
        if every.unit == "s":
            return every.value
        steps = every.value
        if every.unit == "epochs":
            steps *= steps_per_epoch or 0
        return steps * step_s if step_s is not None and steps else None


def trouble_of(snapshot: Mapping[str, Any], now: float) -> str:
    """Return ``failed`` or ``overdue``, or nothing where all is well.

    Args:
        snapshot: What ``JobView.snapshot`` gave.
        now: Seconds since the epoch.
    """
    due = snapshot["checkpoint_due"]
    if due["failed"]:
        return "failed"
    if snapshot["status"] != "running" or due["since"] is None or due["limit_s"] is None:
        return ""
    return "overdue" if now - due["since"] > due["limit_s"] else ""
