"""What the head of a cluster needs of whoever starts and ends its workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from etrain_jupyter.head.coordinator.nodes import NodeCost, NodeSource
from etrain_jupyter.process.cluster_dir import ClusterDir
from etrain_jupyter.process.cluster_settings import ClusterSettings


@dataclass(frozen=True, kw_only=True)
class HeadFacts:
    """What the head tells those that it makes; everything is called on its event loop."""

    cluster: ClusterDir
    settings: ClusterSettings
    lifeline: int
    """The pipe that processes of this machine get, see ``lifeline``."""
    num_lives: int
    """Which of the cluster's schedulers this is, from 1."""
    is_connected: Callable[[str], bool]
    """Whether the scheduler knows a worker of that name."""
    on_gone: Callable[[str, str], None]
    """To be told of a worker whose machine is gone, and why: its connection may stand for long."""
    on_warning: Callable[[str], None]
    """To be told what whoever watches a job should know."""
    on_notice: Callable[[str, float], None]
    """To be told of a worker whose machine will be ended though a job uses it, and when, in seconds
    since the epoch."""
    on_halt: Callable[[str], None]
    """To be told that there will be no more workers, and why: the jobs save and stop."""


class HeadNodes(NodeSource, Protocol):
    """Starts and ends the workers of one cluster; made anew by each of its heads."""

    is_busy: Callable[[str], bool] | None
    """Tells whether a job uses a worker; None if nobody knows."""

    async def start(self, scheduler_address: str) -> None:
        """Begin, now that the scheduler listens.

        Raises:
            PoolError: If what it needs cannot be had.
        """
        ...

    def hold(self, count: int, *, reason: str) -> None:
        """Have at least ``count`` workers whatever the jobs want."""
        ...

    def reap(self) -> None:
        """Take note of workers that have ended; called every second or so, never blocks."""
        ...

    def costs(self) -> Sequence[NodeCost]:
        """Return what each node has cost since the cluster began, also those that have ended."""
        ...

    async def close(self, *, grace_s: float) -> None:
        """End all workers, gently for ``grace_s`` seconds, and return when none is left."""
        ...
