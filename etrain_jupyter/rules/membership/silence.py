"""Detect supervisors whose heartbeats time out, not counting suspensions of the coordinator."""

from __future__ import annotations

from dataclasses import dataclass, field

LATE_S = 2.0
"""A tick that is this many seconds late means that the coordinator itself was suspended: its
process was stopped, or its event loop was blocked."""


@dataclass
class HeartbeatMonitor:
    """Record when each supervisor sent its last message. Callers pass the time.

    Only time during which the coordinator was running counts: a suspension of the head does not
    make a supervisor count as silent.
    """

    limit_s: float
    """Timeout in seconds without a message from a supervisor."""
    tick_s: float
    """Normal interval between calls to ``tick``, in seconds."""
    last_seen: dict[str, float] = field(default_factory=dict)
    _ticked_at: float | None = None  # None before the first tick

    def hear(self, name: str, now: float) -> None:
        """Record a message from a supervisor."""
        self.last_seen[name] = now

    def forget(self, name: str) -> None:
        """Expect no more messages from a supervisor."""
        self.last_seen.pop(name, None)

    def tick(self, now: float) -> float:
        """Advance the time, and return the seconds for which the coordinator was suspended."""
        # tick   tick                           tick    tick_s is the normal interval
        #  |------|------- suspended ------------|
        #         |<-tick_s->|<---- asleep_s --->|      last_seen moves by asleep_s
        passed_s = self.tick_s if self._ticked_at is None else now - self._ticked_at
        self._ticked_at = now
        if 0 <= passed_s < LATE_S:
            return 0.0
        asleep_s = passed_s - self.tick_s
        # Do not count the suspended time: messages sent then may still be waiting in the sockets.
        for name in self.last_seen:
            self.last_seen[name] += asleep_s
        return asleep_s

    def silent(self, now: float) -> dict[str, float]:
        """Return the supervisors that have timed out, and the seconds since their last message."""
        silences = {name: now - last_seen for name, last_seen in self.last_seen.items()}
        return {name: silence for name, silence in silences.items() if silence > self.limit_s}
