"""Which supervisors have gone silent, by the time in which anybody could have heard them."""

from __future__ import annotations

from dataclasses import dataclass, field

LATE_S = 2.0
"""A tick that comes so late tells that the coordinator itself stood still: its process was
suspended, or its event loop was held up."""


@dataclass
class Hearing:
    """Remembers who was heard when. Time is an argument; nothing here looks at a clock.

    Only the time in which the coordinator was awake counts as silence: after a suspension of the
    head nobody is silent, though nobody was heard for long.
    """

    limit_s: float
    """How long a supervisor may be silent."""
    tick_s: float
    """How often ``tick`` is called while all is well."""
    heard_at: dict[str, float] = field(default_factory=dict)
    _ticked_at: float | None = None

    def hear(self, name: str, now: float) -> None:
        """Somebody said something."""
        self.heard_at[name] = now

    def forget(self, name: str) -> None:
        """Somebody is not expected to say anything any more."""
        self.heard_at.pop(name, None)

    def tick(self, now: float) -> float:
        """Take in that time has passed, and return how much of it was slept through."""
        passed_s = self.tick_s if self._ticked_at is None else now - self._ticked_at
        self._ticked_at = now
        if 0 <= passed_s < LATE_S:
            return 0.0
        asleep_s = passed_s - self.tick_s
        for name in self.heard_at:
            self.heard_at[name] += asleep_s
        return asleep_s

    def silent(self, now: float) -> dict[str, float]:
        """Return who has been silent for too long, and for how long."""
        silences = {name: now - heard_at for name, heard_at in self.heard_at.items()}
        return {name: silence for name, silence in silences.items() if silence > self.limit_s}
