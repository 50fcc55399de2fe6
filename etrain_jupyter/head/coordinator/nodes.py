"""Interface of the coordinator to the pool that starts and ends workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class NodeCost:
    """Cost of one node since its start."""

    node_id: str
    workers: tuple[str, ...]
    """The workers that it has or had."""
    lifecycle: str
    """``spot`` or ``on-demand``."""
    spent_usd: float
    """It may fall: EC2 waives the first hour of a spot machine that it reclaims."""
    on_demand_usd: float
    """Cost of the same hours at on-demand prices."""
    is_alive: bool
    hours: float = 0.0
    """Its age."""


class NodeSource(Protocol):
    """Start and end workers. Called on the scheduler's event loop; no method blocks."""

    replaces_early: bool
    """Whether a worker with a notice is replaced at once, not when it is released. It is where each
    worker has a machine of its own."""

    def want(self, count: int, *, reason: str) -> None:
        """Have ``count`` workers, or as many as the pool can: start those that are missing."""
        ...

    def capacity(self) -> int | None:
        """Return the maximum number of workers; None if unknown."""
        ...

    def nodes(self) -> list[dict[str, Any]]:
        """Return a record for each worker: ``worker``, ``pid``, ``state``, ``device``."""
        ...

    def release(self, worker: str, *, drain_s: float) -> None:
        """End a worker gently, and kill it after ``drain_s``."""
        ...

    def kill(self, worker: str) -> None:
        """Kill a worker with SIGKILL, as an injected fault."""
        ...

    def note_notice(self, worker: str, *, kind: str, deadline: float = 0.0) -> None:
        """Note that a worker's machine got a notice: one more worker may run until its end.

        Args:
            worker: Its name.
            kind: ``rebalance`` or ``interruption``.
            deadline: When the machine is reclaimed, in seconds since the epoch; 0.0 if unknown.
        """
        ...


class NoNodes:
    """For clusters whose workers others start and end."""

    replaces_early = True

    def want(self, count: int, *, reason: str) -> None:
        """Do nothing."""

    def capacity(self) -> int | None:
        """Return None: unknown."""
        return None

    def nodes(self) -> list[dict[str, Any]]:
        """Return no records."""
        return []

    def release(self, worker: str, *, drain_s: float) -> None:
        """Do nothing."""

    def kill(self, worker: str) -> None:
        """Do nothing."""

    def note_notice(self, worker: str, *, kind: str, deadline: float = 0.0) -> None:
        """Do nothing."""
