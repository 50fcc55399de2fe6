"""What the head's event loop and the reconcile thread tell each other: values, swapped whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from etrain_jupyter.head.coordinator.nodes import NodeCost
from etrain_jupyter.pools.ec2.ledger import Charge


@dataclass(frozen=True, kw_only=True)
class NodeNotice:
    """What EC2 has told a node."""

    kind: str
    """``rebalance`` or ``interruption``."""
    deadline: float
    """When EC2 takes it, in seconds since the epoch; 0.0 if unknown."""


@dataclass(frozen=True, kw_only=True)
class DesiredFleet:
    """From the loop: what is wanted, and what the scheduler knows of nodes."""

    wanted: int = 0
    """Workers."""
    connected: frozenset[str] = frozenset()
    """Nodes of which the scheduler has a worker."""
    busy: frozenset[str] = frozenset()
    """Nodes that a job uses."""
    releasing: Mapping[str, float] = field(default_factory=dict)
    """Nodes to be ended, and when at the latest, in seconds since the epoch."""
    killing: frozenset[str] = frozenset()
    """Nodes to be ended now."""
    noticed: Mapping[str, NodeNotice] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """One machine, as the loop shows it."""

    id: str
    type: str
    zone: str
    lifecycle: str
    workers: tuple[str, ...]
    """Names."""
    device: str
    usd_per_h: float
    is_leaving: bool
    launched_at: float


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """From the thread: what there is, and what it costs."""

    nodes: tuple[NodeFacts, ...] = ()
    costs: tuple[NodeCost, ...] = ()
    charge: Charge = field(default_factory=Charge)
    rate_usd: float = 0.0
    prices: str = ""
    """Where prices come from."""
    halted: str = ""


@dataclass(frozen=True, kw_only=True)
class Reports:
    """What the thread calls; each brings its words to the loop by itself."""

    gone: Callable[[str, str], None]
    """A worker's name, and why."""
    warning: Callable[[str], None]
    halt: Callable[[str], None]
    leaving: Callable[[str, float], None]
    """A worker's name, and when its machine is ended, in seconds since the epoch."""


def worker_names(node: str, count: int) -> tuple[str, ...]:
    """Return the names of a node's workers.

    >>> worker_names("i-1", 2)
    ('i-1:0', 'i-1:1')
    """
    return (node,) if count == 1 else tuple(f"{node}:{number}" for number in range(count))


def node_of(worker: str) -> str:
    """Return the node of a worker."""
    return worker.partition(":")[0]
