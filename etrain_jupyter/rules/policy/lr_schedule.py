"""Learning rate schedule: a warm-up and a decay, counted in samples.

Counting samples rather than steps makes it independent of the batch size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Decay = Literal["none", "linear", "cosine"]


@dataclass(frozen=True, kw_only=True)
class LrSchedule:
    """A linear warm-up, then a decay to the end of the job."""

    warmup: int = 0
    """Samples until the learning rate reaches that of the optimizer."""
    decay: Decay = "none"
    """``linear`` and ``cosine`` decrease to 0 at the end; ``none`` stays constant."""
    end: int
    """Samples that the whole job trains on; later steps have the final rate."""

    def factor(self, position: int, count: int) -> float:
        """Return the learning rate factor for one step.

        At a constant batch of B samples, with a warm-up of W steps out of T, these are the usual
        formulas, with step t from 0: ``(t + 1) / W`` in the warm-up, so that the first
        step trains too; then ``(T - t) / (T - W)`` or ``(1 + cos(pi (t - W) / (T - W))) / 2``.

        Args:
            position: Samples trained on before the step.
            count: Samples in the step.

        >>> schedule = LrSchedule(warmup=200, decay="linear", end=1000)
        >>> [schedule.factor(position, 100) for position in (0, 100, 200, 600, 900)]
        [0.5, 1.0, 1.0, 0.5, 0.125]
        """
        # Use the end of the step in the warm-up and its start in the decay, so that the factor is
        # never 0.
        if position < self.warmup:
            return min(1.0, (position + count) / self.warmup)
        if self.decay == "none":
            return 1.0
        passed = min(1.0, (position - self.warmup) / max(1, self.end - self.warmup))
        return 1.0 - passed if self.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * passed))
