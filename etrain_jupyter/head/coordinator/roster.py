"""Workers of a cluster: those that are connected, and those that were declared dead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from etrain_jupyter.rules.membership.silence import Hearing


@dataclass
class WorkerFacts:
    """A worker that has a supervisor."""

    name: str
    address: str
    device: str
    pid: int
    incarnation: int = 0
    """How often its supervisor was reset."""
    leaves_at: float = 0.0
    """When its machine will be reclaimed, by the coordinator's clock; 0 without a notice."""
    at_risk: bool = False
    """Whether its machine is likely to be reclaimed."""
    is_stuck: bool = False
    """Whether its supervisor's outbox is full, so that its trainers wait."""
    is_released: bool = False
    """Whether it was handed back to the pool."""
    fingerprint: dict[str, str] = field(default_factory=dict)
    """Installed versions, see ``wire.versions``; empty if unknown."""


class WorkerRoster:
    """Keep the connected workers, and fence those that were declared dead. Time is an argument.

    A worker whose heartbeats time out counts as dead, although its connection may still be open.
    Its messages are dropped, until its supervisor has killed its trainers and registers again with
    a new incarnation::

        w2, incarnation 0   heartbeats ...   (paused for 12 s)   report     hello, incarnation 1
        coordinator                          declares it dead    dropped,   accepted
                                                                 sends a reset

    Args:
        silence_s: Heartbeat timeout.
        tick_s: Interval at which ``tick`` is called.
    """

    def __init__(self, *, silence_s: float, tick_s: float) -> None:
        self._hearing = Hearing(limit_s=silence_s, tick_s=tick_s)
        self._by_name: dict[str, WorkerFacts] = {}
        self._given_up: dict[str, int] = {}
        """Incarnations that were declared dead, by address."""

    def __iter__(self) -> Iterator[WorkerFacts]:
        return iter(list(self._by_name.values()))

    def __len__(self) -> int:
        return len(self._by_name)

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def get(self, name: str) -> WorkerFacts | None:
        """Return the worker of that name, if it is connected."""
        return self._by_name.get(name)

    def greet(self, facts: WorkerFacts, now: float) -> bool:
        """Add a worker after its hello; return False if that incarnation was declared dead."""
        if facts.incarnation <= self._given_up.get(facts.address, -1):
            return False
        self._given_up.pop(facts.address, None)
        self._by_name[facts.name] = facts
        self._hearing.hear(facts.name, now)
        return True

    def hear(self, address: str, now: float) -> WorkerFacts | None:
        """Note a message from an address; return its worker, None if that is fenced or unknown."""
        facts = next((w for w in self._by_name.values() if w.address == address), None)
        if facts is not None:
            self._hearing.hear(facts.name, now)
        return facts

    def given_up(self, address: str) -> int | None:
        """Return the incarnation at an address that was declared dead; None without one."""
        return self._given_up.get(address)

    def remove(self, address: str) -> WorkerFacts | None:
        """Forget a worker whose connection is closed; return it if it was known."""
        self._given_up.pop(address, None)
        facts = next((w for w in self._by_name.values() if w.address == address), None)
        if facts is not None:
            del self._by_name[facts.name]
            self._hearing.forget(facts.name)
        return facts

    def tick(self, now: float) -> float:
        """Note the time; return how many seconds the coordinator itself was suspended."""
        return self._hearing.tick(now)

    def give_up_silent(self, now: float) -> list[tuple[WorkerFacts, float]]:
        """Declare workers dead whose heartbeats timed out; return them with their silence."""
        given_up = []
        for name, silence_s in self._hearing.silent(now).items():
            facts = self._by_name.pop(name)
            self._hearing.forget(name)
            self._given_up[facts.address] = facts.incarnation
            given_up.append((facts, silence_s))
        return given_up
