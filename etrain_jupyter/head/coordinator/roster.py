"""Roster of a cluster's active and fenced workers, and facts about their machines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from etrain_jupyter.head.coordinator.nodes import NodeSource
from etrain_jupyter.rules.membership.silence import HeartbeatMonitor


@dataclass
class WorkerFacts:
    """A worker that has a supervisor."""

    name: str
    address: str
    device: str
    pid: int
    incarnation: int = 0
    """Number of times its supervisor has been reset."""
    leaves_at: float = 0.0
    """When its machine will be interrupted, on the coordinator's clock; 0 if not announced."""
    at_risk: bool = False
    """True if its machine is likely to be interrupted."""
    is_stuck: bool = False
    """True if its supervisor's outbox is full. The supervisor then stops reading its trainers'
    messages, and the trainers wait."""
    is_released: bool = False
    """True if it was released to the pool."""
    fingerprint: dict[str, str] = field(default_factory=dict)
    """Versions installed on its machine (see ``wire.versions``); empty if unknown."""


class WorkerRoster:
    """Track the workers, and fence those that time out. Callers pass in the current time.

    A worker that has timed out is evicted, even if its connection is still open. Its later messages
    are dropped until its supervisor has stopped its trainers and sends a hello with a new
    incarnation::

        hello 1 -> messages -> timeout: fenced -> messages dropped -> reset -> hello 2

    Args:
        silence_s: Seconds without a message after which a supervisor has timed out.
        tick_s: Interval between calls to ``tick``, in seconds.
    """

    def __init__(self, *, silence_s: float, tick_s: float) -> None:
        self.silence_s = silence_s
        self._heartbeats = HeartbeatMonitor(limit_s=silence_s, tick_s=tick_s)
        self._by_name: dict[str, WorkerFacts] = {}
        self._by_address: dict[str, WorkerFacts] = {}  # the same workers, to look up senders
        self._evicted: dict[str, int] = {}  # fenced incarnation, by address

    def __iter__(self) -> Iterator[WorkerFacts]:
        return iter(list(self._by_name.values()))

    def __len__(self) -> int:
        return len(self._by_name)

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def get(self, name: str) -> WorkerFacts | None:
        """Return the worker with this name, or None."""
        return self._by_name.get(name)

    def is_stuck(self, names: Iterable[str]) -> bool:
        """Return True if the supervisor of one of these workers blocks its trainers."""
        facts = [self._by_name.get(name) for name in names]
        return any(known is not None and known.is_stuck for known in facts)

    def greet(self, facts: WorkerFacts, now: float) -> bool:
        """Process a hello; return False if this incarnation is fenced."""
        # A fenced supervisor may reconnect before it has received the reset. Its trainers are still
        # in an old generation; they are gone only in its next incarnation.
        if facts.incarnation <= self._evicted.get(facts.address, -1):
            return False
        self._evicted.pop(facts.address, None)
        previous = self._by_name.get(facts.name)
        if previous is not None:
            self._by_address.pop(previous.address, None)
        self._by_name[facts.name] = facts
        self._by_address[facts.address] = facts
        self._heartbeats.hear(facts.name, now)
        return True

    def hear(self, address: str, now: float) -> WorkerFacts | None:
        """Record a message, and return its worker; None if the address is fenced or unknown."""
        facts = self._by_address.get(address)
        if facts is not None:
            self._heartbeats.hear(facts.name, now)
        return facts

    def evicted_incarnation(self, address: str) -> int | None:
        """Return the fenced incarnation at an address, or None."""
        return self._evicted.get(address)

    def remove(self, address: str) -> WorkerFacts | None:
        """Remove a worker whose connection is closed; return it unless it was fenced."""
        self._evicted.pop(address, None)
        facts = self._by_address.pop(address, None)
        if facts is not None:
            del self._by_name[facts.name]
            self._heartbeats.forget(facts.name)
        return facts

    def tick(self, now: float) -> float:
        """Set the current time, and return for how many seconds the coordinator was suspended."""
        return self._heartbeats.tick(now)

    def evict_silent(self, now: float) -> list[tuple[WorkerFacts, float]]:
        """Evict the workers that have timed out.

        Return each of them with the seconds since its last message.
        """
        evicted = []
        for name, silence_s in self._heartbeats.silent(now).items():
            facts = self._by_name.pop(name)
            self._by_address.pop(facts.address, None)
            self._heartbeats.forget(name)
            self._evicted[facts.address] = facts.incarnation
            evicted.append((facts, silence_s))
        return evicted


class MachineFacts:
    """Facts about the workers' machines, from the pool and the roster."""

    def __init__(self, nodes: NodeSource, roster: WorkerRoster) -> None:
        self._nodes = nodes
        self._roster = roster
        self._by_worker: dict[str, dict[str, Any]] | None = None

    def forget(self) -> None:
        """Read the pool's nodes again at the next call of ``describe``."""
        self._by_worker = None

    def describe(self, worker: str) -> dict[str, Any]:
        """Return the facts about a worker's machine, as fields of ``WorkerJoined``."""
        facts = self._roster.get(worker)
        # Listing the nodes takes time proportional to their number, and a job may start trainers on
        # all of them.
        if self._by_worker is None or worker not in self._by_worker:
            self._by_worker = {node["worker"]: node for node in reversed(self._nodes.nodes())}
        node = self._by_worker.get(worker, {})
        machine: dict[str, Any] = (
            {"device": facts.device, "address": facts.address} if facts else {}
        )
        if node.get("zone"):
            machine |= {
                "machine": node["type"],
                "zone": node["zone"],
                "lifecycle": node["lifecycle"],
                "usd_per_h": node["price_usd_per_h"],
            }
        return machine
