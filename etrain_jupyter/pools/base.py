"""The ``Pool`` protocol and its value types."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from etrain_jupyter.process.address import SchedulerAddress


@dataclass(frozen=True, kw_only=True)
class Node:
    """One machine or process that a pool runs for one worker."""

    id: str
    """The worker's name; never reused while the cluster runs."""
    state: str
    """``starting``, ``running`` or ``draining``."""
    type: str = ""
    """Hardware, for example ``CPU slot``, ``NVIDIA H200`` or ``g5.xlarge``."""
    zone: str = ""
    """Availability zone; empty if the pool has no zones."""
    lifecycle: str = "local"
    """``local``, ``on-demand``, ``spot``, a batch system, or ``existing`` for a worker of another
    Dask cluster."""
    price_usd_per_h: float = 0.0
    """Price per hour in US dollars; 0.0 if the pool has no prices."""
    pid: int = 0
    """Process id of its worker; 0 if unknown or on another machine."""
    device: str = "cpu"
    """Torch device of its ranks."""


@dataclass(frozen=True, kw_only=True)
class CostReport:
    """Cost of a pool's machines since the pool was started."""

    spent_usd: float = 0.0
    on_demand_usd: float = 0.0
    """Cost of the same machine hours at on-demand prices."""
    node_hours: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Leftovers:
    """Processes and files that remain after ``Pool.down``; empty, and thus falsy, on success."""

    processes: tuple[str, ...] = ()
    """One description per process or machine, starting with its id."""
    files: tuple[str, ...] = ()
    """Paths or URLs."""

    @classmethod
    def of_all(cls, leftovers: Iterable[Leftovers]) -> Leftovers:
        """Combine the leftovers of several clusters."""
        known = tuple(leftovers)
        return cls(
            processes=tuple(process for item in known for process in item.processes),
            files=tuple(file for item in known for file in item.files),
        )

    def __bool__(self) -> bool:
        return bool(self.processes or self.files)

    def __str__(self) -> str:
        return ", ".join((*self.processes, *self.files)) or "nothing"


class Pool(Protocol):
    """A source of workers.

    Each kind of pool has one module, one line in the registry, and one contract test suite.
    """

    is_head_elsewhere: bool
    """True if the scheduler runs on another machine, so that jobs must be stored in a bucket."""

    def check_machine(self) -> None:
        """Check that this machine can use the pool, without sending any request.

        Raises:
            PoolError: If a library or a command is missing.
        """
        ...

    def up(self) -> SchedulerAddress:
        """Find or start the cluster; return once its scheduler responds."""
        ...

    def want(self, n: int, *, reason: str) -> None:
        """Request ``n`` workers even if no job needs them. Returns before they have started."""
        ...

    def nodes(self) -> list[Node]:
        """Return the current nodes, oldest first."""
        ...

    def release(self, node_id: str, *, drain_s: float) -> None:
        """Drain a node and stop it within ``drain_s`` seconds; it is replaced if jobs need it."""
        ...

    def shared_place(self) -> str:
        """Return the URL of a checkpoint location that all workers can reach.

        Empty if the workers can see this machine's folders.
        """
        ...

    def price(self, max_workers: int) -> str:
        """Describe the worst-case price of ``max_workers`` workers, without starting any."""
        ...

    def cost(self) -> CostReport:
        """Return the cost that the nodes have incurred so far."""
        ...

    def down(self, *, timeout_s: float) -> Leftovers:
        """Shut down the cluster and its jobs. Idempotent; may be called from any process."""
        ...
