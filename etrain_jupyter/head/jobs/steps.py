"""Which steps the log has, and how long one takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class StepClock:
    """Takes step records once each and in order, whoever sends them again."""

    logged_step: int = 0
    """The newest step in the log."""
    step_s: float = 0.0
    """How long a step takes, smoothed over the last ten or so; 0 before the first."""
    ranks: tuple[str, ...] = field(default=())
    """Trainers of the living generation in rank order."""

    def take(self, records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return those records that are new; the audit tells if one is missing before them."""
        fresh = []
        for record in records:
            if record["step"] <= self.logged_step:
                continue
            self.logged_step = record["step"]
            took = record["samples"] / max(record["samples_per_s"], 1e-9)
            self.step_s = took if not self.step_s else 0.9 * self.step_s + 0.1 * took
            fresh.append(record)
        return fresh
