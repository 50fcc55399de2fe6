"""What the coordinator asks of whoever starts and ends workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class NodeCost:
    """What one node has cost since it was started."""

    node_id: str
    workers: tuple[str, ...]
    """The workers that it has, or had."""
    lifecycle: str
    """``spot`` or ``on-demand``."""
    spent_usd: float
    """It may fall: EC2 waives the first hour of a spot machine that it takes back."""
    on_demand_usd: float
    """What the same hours would have cost without spot prices."""
    is_alive: bool
    hours: float = 0.0
    """How long it has been there."""


class NodeSource(Protocol):
    """Starts and ends workers. Called on the scheduler's event loop; no method blocks."""

    replaces_early: bool
    """Whether a worker whose machine will be taken, or is likely to be, is replaced at once and not
    when it is released: so it is where the newcomer gets a machine of its own."""

    def want(self, count: int, *, reason: str) -> None:
        """Have ``count`` workers, or as many as the pool can: starts those that are missing."""
        ...

    def capacity(self) -> int | None:
        """Return how many workers there can ever be; None if nobody knows."""
        ...

    def nodes(self) -> list[dict[str, Any]]:
        """Return a record a worker: ``worker``, ``pid``, ``state``, ``device``."""
        ...

    def release(self, worker: str, *, drain_s: float) -> None:
        """End a worker gently, and by force after ``drain_s``."""
        ...

    def kill(self, worker: str) -> None:
        """End a worker with SIGKILL: a fault on purpose."""
        ...

    def note_notice(self, worker: str, *, kind: str, deadline: float = 0.0) -> None:
        """Hear what a worker's machine was told: another one may come besides.

        Args:
            worker: Its name.
            kind: ``rebalance`` or ``interruption``.
            deadline: When the machine is taken, in seconds since the epoch; 0.0 if unknown.
        """
        ...


class NoNodes:
    """For clusters whose workers somebody else starts and ends."""

    replaces_early = True

    def want(self, count: int, *, reason: str) -> None:
        """Do nothing."""

    def capacity(self) -> int | None:
        """Know nothing."""
        return None

    def nodes(self) -> list[dict[str, Any]]:
        """Know of none."""
        return []

    def release(self, worker: str, *, drain_s: float) -> None:
        """Do nothing."""

    def kill(self, worker: str) -> None:
        """Do nothing."""

    def note_notice(self, worker: str, *, kind: str, deadline: float = 0.0) -> None:
        """Do nothing."""
