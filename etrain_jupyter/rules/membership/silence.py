"""Detect supervisors whose heartbeats time out, not counting suspensions of the coordinator."""

from __future__ import annotations

from dataclasses import dataclass, field

LATE_S = 2.0
"""A tick that is this many seconds late means that the coordinator itself was suspended: its
process was stopped, or its event loop was blocked."""

BEAT_S = 1.0
"""Heartbeat interval in a small cluster, in seconds."""

BEATS_PER_S = 250.0
"""Maximum number of heartbeats per second from all supervisors together."""

MAX_BEAT_S = 4.0
"""Maximum heartbeat interval in seconds, so that a lost machine is still detected soon."""

BEATS_PER_LIMIT = 2.5
"""Minimum number of heartbeat intervals until a supervisor counts as silent."""

BEAT_CHANGE = 1.5
"""The interval is changed only by at least this factor, because every supervisor is notified."""


def choose_beat_s(num_workers: int, *, current_s: float, limit_s: float) -> float:
    """Return the supervisors' heartbeat interval in seconds.

    Args:
        num_workers: Number of supervisors.
        current_s: Their interval now; kept unless it should change by ``BEAT_CHANGE``.
        limit_s: Timeout without a message from a supervisor.

    >>> [choose_beat_s(n, current_s=1.0, limit_s=10.0) for n in (1, 250, 300, 500, 2000)]
    [1.0, 1.0, 1.0, 2.0, 4.0]
    """
    most_s = max(BEAT_S, min(MAX_BEAT_S, limit_s / BEATS_PER_LIMIT))
    wanted_s = min(most_s, max(BEAT_S, num_workers / BEATS_PER_S))
    is_near = current_s / BEAT_CHANGE < wanted_s < current_s * BEAT_CHANGE
    return current_s if is_near and BEAT_S <= current_s <= most_s else wanted_s


@dataclass
class HeartbeatMonitor:
    """Record when each supervisor sent its last message. Callers pass the time.

    Only time during which the coordinator was running counts, so a suspension of the head does not
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
        # Do not count the suspended time, as messages sent then may still be waiting in the
        # sockets.
        for name in self.last_seen:
            self.last_seen[name] += asleep_s
        return asleep_s

    def silent(self, now: float) -> dict[str, float]:
        """Return the supervisors that have timed out, and the seconds since their last message."""
        silences = {name: now - last_seen for name, last_seen in self.last_seen.items()}
        return {name: silence for name, silence in silences.items() if silence > self.limit_s}
