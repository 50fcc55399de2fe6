"""What every pool offers: the ``Pool`` protocol and the words that it speaks in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from etrain_jupyter.process.address import SchedulerAddress


@dataclass(frozen=True, kw_only=True)
class Node:
    """One machine or process that a pool keeps for one worker."""

    id: str
    """The worker's name, unique in the cluster's life."""
    state: str
    """``starting``, ``running`` or ``draining``."""
    type: str = ""
    """What it is, for example ``CPU slot``, ``NVIDIA H200`` or ``g5.xlarge``."""
    zone: str = ""
    """Where it is; empty if that has no meaning."""
    lifecycle: str = "local"
    """``local``, ``on-demand``, ``spot``, or ``existing`` for what somebody else has started."""
    price_usd_per_h: float = 0.0
    """What it costs."""
    pid: int = 0
    """Process id of its worker, 0 if unknown or on another machine."""
    device: str = "cpu"
    """Where its ranks compute, as torch says it."""


@dataclass(frozen=True, kw_only=True)
class CostReport:
    """What a pool's machines cost since it is up."""

    spent_usd: float = 0.0
    on_demand_usd: float = 0.0
    """What the same hours would have cost without spot prices."""
    node_hours: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Leftovers:
    """What is still there after a pool was taken down. Empty, and so false, when all is well."""

    processes: tuple[str, ...] = ()
    """One text a process or machine, with its id first."""
    files: tuple[str, ...] = ()
    """Paths or URLs."""

    @classmethod
    def of_all(cls, ends: Iterable[Leftovers]) -> Leftovers:
        """Return what several ends have left, as one."""
        known = tuple(ends)
        return cls(
            processes=tuple(process for end in known for process in end.processes),
            files=tuple(file for end in known for file in end.files),
        )

    def __bool__(self) -> bool:
        return bool(self.processes or self.files)

    def __str__(self) -> str:
        return ", ".join((*self.processes, *self.files)) or "nothing"


class Pool(Protocol):
    """Where workers come from: one file and one registry line a kind, one suite for all."""

    is_head_elsewhere: bool
    """Whether its scheduler sees no folder of this machine: jobs must lie in a bucket."""

    def up(self) -> SchedulerAddress:
        """Find the cluster or start it; return once its scheduler answers."""
        ...

    def want(self, n: int, *, reason: str) -> None:
        """Ask for ``n`` workers, whether or not a job needs them; never waits for one to come."""
        ...

    def nodes(self) -> list[Node]:
        """Return the nodes that there are, the oldest first."""
        ...

    def release(self, node_id: str, *, drain_s: float) -> None:
        """End a node gently, within ``drain_s`` seconds. Demand brings another one."""
        ...

    def shared_place(self) -> str:
        """Return the URL of a place that its workers reach, for checkpoints.

        Empty where they see the folders of this machine.
        """
        ...

    def price(self, max_workers: int) -> str:
        """Return what that many workers can cost at worst, in words, before anything is started."""
        ...

    def cost(self) -> CostReport:
        """Return what the nodes cost so far."""
        ...

    def down(self, *, timeout_s: float) -> Leftovers:
        """End the cluster and everything under it; callable from any process, more than once."""
        ...
