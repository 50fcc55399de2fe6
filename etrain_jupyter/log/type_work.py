"""Samples and times of the workers on one machine type, from the reports of the ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TypeWork:
    """Samples and busy time of the workers on one machine type, added up."""

    samples: int = 0
    busy_s: float = 0.0
    """Time of their steps without waiting for other workers, in seconds."""

    def plus(self, samples: int, busy_s: float) -> TypeWork:
        """Return the sum."""
        return TypeWork(samples=self.samples + samples, busy_s=self.busy_s + max(0.0, busy_s))
