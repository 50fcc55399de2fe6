"""Pool ``slurm``, as seen from a kernel or a terminal."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from etrain_jupyter.errors import PoolError
from etrain_jupyter.plugins.slurm import commands
from etrain_jupyter.plugins.slurm.head.nodes import site_of
from etrain_jupyter.plugins.slurm.head.script import MISSING
from etrain_jupyter.plugins.slurm.spec import SlurmSpec
from etrain_jupyter.pools.base import CostReport, Leftovers
from etrain_jupyter.pools.catalog import PoolEntry
from etrain_jupyter.pools.detached import DetachedPool, end_cluster_here
from etrain_jupyter.pools.rpc import ask
from etrain_jupyter.process.cluster_dir import ClusterDir, cluster_dirs
from etrain_jupyter.process.cluster_settings import ClusterSettings
from etrain_jupyter.process.state_root import environment_key, state_root
from etrain_jupyter.wire.requests import ListCosts

NODES = "etrain_jupyter.plugins.slurm.head.nodes:SlurmNodes"
HEAD_DOWN_S = 20.0
"""Timeout for a head to shut down, in seconds."""


class SlurmPool(DetachedPool):
    """Workers in SLURM jobs, with the scheduler on this machine.

    Args:
        name: The pool's name in a cell.
        spec: The pool's entry in ``pools.yaml``.
        cluster_id: Bind the object to this cluster; by default, the pool's running cluster.
        change: Changes the head's settings; for tests.
    """

    def __init__(
        self,
        name: str,
        spec: SlurmSpec,
        *,
        cluster_id: str | None = None,
        change: Callable[[ClusterSettings], ClusterSettings] = lambda settings: settings,
    ) -> None:
        super().__init__(name=name, prefix=_prefix_of(name, spec), cluster_id=cluster_id)
        self.spec = spec
        self._change = change

    @classmethod
    def from_entry(cls, entry: PoolEntry) -> SlurmPool:
        """Return the pool of an entry of ``pools.yaml``; nothing is started yet.

        Raises:
            ConfigError: If a key is invalid, with its position in the file.
        """
        return cls(entry.name, entry.read_as(SlurmSpec))

    @classmethod
    def of_cluster(cls, cluster: ClusterDir) -> SlurmPool:
        """Return the pool of a cluster that has a folder on this machine."""
        settings = cluster.settings()
        # Use the spec from the start of the cluster, because pools.yaml may have changed since.
        spec = SlurmSpec.from_json(json.dumps(settings.spec))
        return cls(settings.pool, spec, cluster_id=cluster.cluster_id)

    def settings(self) -> ClusterSettings:
        """Return the settings for the head of a new cluster.

        Raises:
            PoolError: If dask-jobqueue or SLURM's commands are missing, or nodes cannot reach this
                machine.
        """
        self.check_machine()
        return self._change(
            ClusterSettings(
                idle_s=self.spec.lifetime.idle,
                linger_s=self.spec.lifetime.linger,
                pool=self.name,
                prefix=self._prefix,
                host=self._head_host(),
                nodes=NODES,
                spec=json.loads(self.spec.to_json()),
            )
        )

    def check_machine(self) -> None:
        """Check that this machine can submit jobs, without a request to SLURM.

        Raises:
            PoolError: If dask-jobqueue or one of SLURM's commands is missing.
        """
        # Do not import it here: that would replace the kernel's handler of SIGINT.
        if importlib.util.find_spec("dask_jobqueue") is None:
            raise PoolError(MISSING.format(why=f"pool {self.name!r} needs it"))
        commands.check_commands()

    def prepare_start(self, root: Path) -> ClusterDir | None:
        """Return the folder of a cluster whose head has died, to take it over with its jobs.

        A dead cluster without jobs in the queue is removed; users can resume its training jobs with
        ``%etrain resume``.
        """
        for cluster in cluster_dirs(root):
            record = cluster.record()
            if cluster.prefix != self._prefix or (record is not None and not record.is_here):
                continue  # belongs to another pool, or to another machine that shares the folder
            # Called under the start lock, after `_find` found no running head, so any record is
            # that of a dead head. Without a record, its start or shutdown is incomplete.
            prefix = commands.job_name_of(cluster.cluster_id, "")
            jobs = commands.list_jobs(prefix) if record is not None else []
            if not all(job.is_ending for job in jobs):
                return cluster
            self.of_cluster(cluster).down()
        return None

    def shared_place(self) -> str:
        """Return an empty string: the nodes share this machine's folders."""
        return ""

    def price(self, max_workers: int) -> str:
        """Return the worst-case cost of that many workers as text."""
        if self.spec.price is None:
            return "an unknown amount: its entry in pools.yaml has no price"
        count = min(max_workers, self.spec.workers.max)
        return f"at most ${self.spec.price * count:.4g} per hour for {count} SLURM jobs"

    def cost(self) -> CostReport:
        """Return what the jobs of the running cluster have cost so far; 0 without a price."""
        costs = ask(self._address(), ListCosts()).costs
        return CostReport(
            spent_usd=sum(one["spent_usd"] for one in costs),
            on_demand_usd=sum(one["on_demand_usd"] for one in costs),
            node_hours=sum(one["hours"] for one in costs),
        )

    def down(self, *, timeout_s: float = 60.0) -> Leftovers:
        """Shut the cluster down here, then cancel its SLURM jobs.

        Jobs are found by their names, so those of a cluster whose head was lost are cancelled too.

        Returns:
            Processes, jobs and files that remain; empty after success or if no cluster was running.

        Raises:
            PoolError: If SLURM does not respond.
        """
        ours = [cluster for cluster in cluster_dirs() if self._is_ours(cluster)]
        ends = [end_cluster_here(cluster, min(HEAD_DOWN_S, timeout_s)) for cluster in ours]
        prefix = (
            f"{self._prefix}-"
            if self._cluster_id is None
            else commands.job_name_of(self._cluster_id, "")
        )
        left = commands.cancel_all(prefix, timeout_s=timeout_s)
        ends.append(Leftovers(processes=tuple(f"SLURM job {job.job_id}" for job in left)))
        for cluster in ours:
            site = site_of(self.spec, cluster.cluster_id)
            site.remove()
            if site.path.exists():
                ends.append(Leftovers(files=(str(site.path),)))
        return Leftovers.of_all(ends)

    def _head_host(self) -> str:
        """Return the address on which the scheduler listens."""
        if self.spec.head_host:
            return self.spec.head_host
        from distributed import utils

        untyped: Any = utils
        name = self.spec.interface
        try:
            host = str(untyped.get_ip_interface(name) if name else untyped.get_ip())
        except (OSError, ValueError) as exc:
            raise PoolError(
                f"pool {self.name!r}: this machine has no address on interface "
                f"{self.spec.interface!r} ({exc}). Nothing was started. Correct interface in "
                "pools.yaml, or write head_host: ADDRESS."
            ) from exc
        if host.startswith("127."):
            raise PoolError(
                f"pool {self.name!r}: nodes cannot reach this machine at {host}. Nothing was "
                "started. Write interface: NAME or head_host: ADDRESS for this pool in pools.yaml."
            )
        return host


def _prefix_of(name: str, spec: SlurmSpec) -> str:
    """Return the prefix of a pool's cluster ids.

    Pools with the same name in two notebooks' folders are different pools, unless they share
    partition, account, folder, state directory and Python environment.
    """
    places = (spec.queue, spec.account, spec.folder, state_root(), environment_key())
    text = "\n".join(map(str, (name, *places)))
    return f"slurm-{hashlib.sha256(text.encode()).hexdigest()[:6]}"
