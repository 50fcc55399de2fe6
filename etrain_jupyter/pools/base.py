"""What every pool offers: the ``Pool`` protocol and the words that it speaks in."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class SchedulerAddress:
    """Where a cluster's scheduler listens, and what it takes to be let in."""

    address: str
    """For example ``tls://127.0.0.1:40231``."""
    cluster_id: str
    """Unique over all clusters of a user."""
    state_dir: str = ""
    """Folder with what is known of the cluster on this machine; empty if somebody else made it."""
    tls_dir: str = ""
    """Folder with the certificates that we made; empty for a scheduler without."""
    tls_ca: str = ""
    """Of a scheduler that somebody else made: file with the authority that signed its certificate.
    It and the two below are read where they lie and copied nowhere."""
    tls_cert: str = ""
    """File with the certificate that we show there."""
    tls_key: str = ""
    """File with its key."""
    tls_min_version: str = ""
    """Oldest TLS that is spoken there, ``1.2`` or ``1.3``; empty for Dask's default."""

    def security(self, role: str = "client") -> Any:
        """Return the ``distributed.Security`` of a role: ``scheduler``, ``worker`` or ``client``.

        Raises:
            FileNotFoundError: If the certificates are gone, as they are once the cluster has ended.
        """
        from etrain_jupyter.pools.tls import read_foreign_security, read_security

        if self.tls_ca:
            files = (self.tls_ca, self.tls_cert, self.tls_key)
            return read_foreign_security(*files, min_version=self.tls_min_version)
        return read_security(self.tls_dir, role)

    def connection_args(self, role: str = "client") -> dict[str, Any]:
        """Return the keyword arguments for ``distributed.core.rpc(address, connection_args=...)``.

        Raises:
            FileNotFoundError: If the certificates are gone, as they are once the cluster has ended.
        """
        if not self.tls_dir and not self.tls_ca:
            return {}
        from etrain_jupyter.pools.peers import pinned_to_scheduler

        args: dict[str, Any] = self.security(role).get_connection_args(role)
        return pinned_to_scheduler(args) if self.tls_dir else args

    def to_dict(self) -> dict[str, str]:
        """Return the JSON form, which a run's ``job.json`` keeps under ``cluster``."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, str]) -> SchedulerAddress:
        """Rebuild from the JSON form; unknown keys are left out."""
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{key: value for key, value in data.items() if key in known})


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
