"""Filter repeated step records, and measure the duration of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class StepClock:
    """Accept each step record once and in order, even if a new rank 0 resends some."""

    step_s: float = 0.0
    """Duration of a step in seconds, smoothed over about ten steps; 0 before the first."""
    ranks: tuple[str, ...] = field(default=())
    """Trainers of the current generation in rank order."""

    def take(self, records: Sequence[dict[str, Any]], *, after: int) -> list[dict[str, Any]]:
        """Return the new records. A gap before them is not an error here; the audit reports it.

        Args:
            records: Step records, oldest first.
            after: The newest step in the log.
        """
        fresh = []
        for record in records:
            if record["step"] <= after:
                continue
            after = record["step"]
            duration_s = record["samples"] / max(record["samples_per_s"], 1e-9)
            # Exponential moving average, initialized by the first step.
            self.step_s = 0.9 * self.step_s + 0.1 * duration_s if self.step_s else duration_s
            fresh.append(record)
        return fresh
