"""Immutable values that the head's event loop and the reconcile thread exchange."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from etrain_jupyter.head.coordinator.nodes import JobProgress, NodeCost


@dataclass(frozen=True, kw_only=True)
class NodeNotice:
    """EC2's notice to a node."""

    kind: str
    """``rebalance`` or ``interruption``."""
    deadline: float
    """When EC2 reclaims the machine, in seconds since the epoch; 0.0 if unknown."""


@dataclass(frozen=True, kw_only=True)
class DesiredFleet:
    """Sent by the event loop: number of workers wanted, and the scheduler's view of nodes."""

    wanted: int = 0
    """Number of workers wanted."""
    connected: frozenset[str] = frozenset()
    """Nodes with a worker that is connected to the scheduler."""
    busy: frozenset[str] = frozenset()
    """Nodes used by a job."""
    releasing: Mapping[str, float] = field(default_factory=dict)
    """Nodes to terminate, with their deadlines in seconds since the epoch."""
    killing: frozenset[str] = frozenset()
    """Nodes to terminate immediately."""
    noticed: Mapping[str, NodeNotice] = field(default_factory=dict)
    jobs: tuple[JobProgress, ...] = ()
    """Active jobs, in order of submission."""


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """One machine, as the event loop shows it."""

    id: str
    type: str
    zone: str
    lifecycle: str
    workers: tuple[str, ...]
    """Names of its workers."""
    device: str
    usd_per_h: float
    is_leaving: bool


@dataclass(frozen=True, kw_only=True)
class FleetSnapshot:
    """Sent by the thread: the nodes and their costs."""

    nodes: tuple[NodeFacts, ...] = ()
    costs: tuple[NodeCost, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Reports:
    """Callbacks for the thread; each one forwards its arguments to the event loop."""

    gone: Callable[[str, str], None]
    """Called with a worker whose machine is gone, and the reason."""
    warning: Callable[[str], None]
    note: Callable[[str], None]
    """Called with progress, such as a phase of a node's boot."""
    halt: Callable[[str], None]
    leaving: Callable[[str, float], None]
    """Called with a worker, and when its machine will end, in seconds since the epoch."""


def worker_names(node: str, count: int) -> tuple[str, ...]:
    """Return the names of a node's workers; ``node_of`` is the inverse.

    >>> worker_names("i-1", 2)
    ('i-1:0', 'i-1:1')
    """
    # The machine's agent derives the same names, see `machine.children.names_of`.
    return (node,) if count == 1 else tuple(f"{node}:{number}" for number in range(count))


def node_of(worker: str) -> str:
    """Return the node of a worker."""
    return worker.partition(":")[0]
