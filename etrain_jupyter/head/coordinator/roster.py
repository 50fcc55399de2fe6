"""The workers of a cluster as the coordinator knows them: who is here, who was given up."""

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
    """When its machine will be taken, by the coordinator's clock; 0 if nothing is known of that."""
    at_risk: bool = False
    """Whether its machine is likely to be taken."""
    is_stuck: bool = False
    """Whether its supervisor can keep no more messages: it does not read what its trainers send,
    and they wait."""
    is_released: bool = False
    """Whether it was handed back to the pool."""
    fingerprint: dict[str, str] = field(default_factory=dict)
    """What is installed there, see ``node.fingerprint``; empty if it does not tell."""


class WorkerRoster:
    """Knows the workers, and fences those that were given up. Time is an argument.

    A worker that was silent for too long counts as gone, although its connection may still stand.
    What it says afterwards is dropped, until its supervisor has ended its trainers and says hello
    in a new incarnation.

    Args:
        silence_s: How long a supervisor may be silent.
        tick_s: How often ``tick`` is called.
    """

    def __init__(self, *, silence_s: float, tick_s: float) -> None:
        self._hearing = Hearing(limit_s=silence_s, tick_s=tick_s)
        self._by_name: dict[str, WorkerFacts] = {}
        self._given_up: dict[str, int] = {}
        """Address to the incarnation that is not listened to any more."""

    def __iter__(self) -> Iterator[WorkerFacts]:
        return iter(list(self._by_name.values()))

    def __len__(self) -> int:
        return len(self._by_name)

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def get(self, name: str) -> WorkerFacts | None:
        """Return the worker of that name, if it is here."""
        return self._by_name.get(name)

    def greet(self, facts: WorkerFacts, now: float) -> bool:
        """Take in a hello; False if this incarnation was given up."""
        if facts.incarnation <= self._given_up.get(facts.address, -1):
            return False
        self._given_up.pop(facts.address, None)
        self._by_name[facts.name] = facts
        self._hearing.hear(facts.name, now)
        return True

    def hear(self, address: str, now: float) -> WorkerFacts | None:
        """Return the worker that speaks from there; None for one that is not listened to."""
        facts = next((w for w in self._by_name.values() if w.address == address), None)
        if facts is not None:
            self._hearing.hear(facts.name, now)
        return facts

    def given_up(self, address: str) -> int | None:
        """Return the incarnation there that was given up; None if none was."""
        return self._given_up.get(address)

    def remove(self, address: str) -> WorkerFacts | None:
        """Forget a worker whose connection is closed; return it if it was here."""
        self._given_up.pop(address, None)
        facts = next((w for w in self._by_name.values() if w.address == address), None)
        if facts is not None:
            del self._by_name[facts.name]
            self._hearing.forget(facts.name)
        return facts

    def tick(self, now: float) -> float:
        """Take in that time has passed; return how much of it the coordinator slept through."""
        return self._hearing.tick(now)

    def give_up_silent(self, now: float) -> list[tuple[WorkerFacts, float]]:
        """Give up who has been silent for too long; return them and how long they were."""
        given_up = []
        for name, silence_s in self._hearing.silent(now).items():
            facts = self._by_name.pop(name)
            self._hearing.forget(name)
            self._given_up[facts.address] = facts.incarnation
            given_up.append((facts, silence_s))
        return given_up
