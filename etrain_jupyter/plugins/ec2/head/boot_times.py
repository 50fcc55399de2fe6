"""Measure how long machines take from their launch until their workers are connected."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from etrain_jupyter.plugins.ec2.head.view import Machine

USUAL_BOOT_S = 300.0
"""Boot time until one has been measured, in seconds."""
NUM_BOOTS = 20


@dataclass(kw_only=True)
class BootTimes:
    """The last boot times. Used by the reconcile thread only."""

    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_BOOTS))
    _booting: set[str] = field(default_factory=set)

    def observe(self, machines: Sequence[Machine], now: float) -> None:
        """Record the machines that have become ready since the last call."""
        for machine in machines:
            # A head that takes over does not know when the machines that it finds became ready.
            if machine.is_ready and machine.id in self._booting:
                self._seconds.append(now - machine.launched_at)
        self._booting = {m.id for m in machines if not m.is_ready}

    @property
    def longest_s(self) -> float:
        """The longest of the last boot times, in seconds."""
        return max(self._seconds, default=USUAL_BOOT_S)

    @property
    def mean_s(self) -> float:
        """The mean of the last boot times, in seconds."""
        return sum(self._seconds) / len(self._seconds) if self._seconds else USUAL_BOOT_S
