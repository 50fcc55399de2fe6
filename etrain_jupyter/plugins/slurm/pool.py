"""Pool ``slurm``, as seen from a kernel or a terminal."""

from __future__ import annotations

import importlib.util
from typing import Any

from etrain_jupyter.errors import PoolError
from etrain_jupyter.plugins.slurm import commands
from etrain_jupyter.plugins.slurm.head.nodes import site_of
from etrain_jupyter.plugins.slurm.head.script import MISSING
from etrain_jupyter.plugins.slurm.spec import SlurmSpec
from etrain_jupyter.pools.base import Leftovers
from etrain_jupyter.pools.detached import end_cluster_here
from etrain_jupyter.pools.spec_pool import SpecPool
from etrain_jupyter.process.cluster_dir import ClusterDir, cluster_dirs
from etrain_jupyter.process.cluster_settings import ClusterSettings

HEAD_DOWN_S = 20.0
"""Timeout for a head to shut down, in seconds."""


class SlurmPool(SpecPool[SlurmSpec]):
    """Workers in SLURM jobs, with the scheduler on this machine."""

    kind_prefix = "slurm"
    spec_type = SlurmSpec
    nodes_path = "etrain_jupyter.plugins.slurm.head.nodes:SlurmNodes"
    identity_keys = ("queue", "account", "folder")

    def settings(self) -> ClusterSettings:
        """Return the settings for the head of a new cluster.

        Raises:
            PoolError: If dask-jobqueue or SLURM's commands are missing, or nodes cannot reach this
                machine.
        """
        self.check_machine()
        lifetime = self.spec.lifetime
        return self._settings_for(
            self.spec, idle_s=lifetime.idle, linger_s=lifetime.linger, host=self._head_host()
        )

    def check_machine(self) -> None:
        """Check that this machine can submit jobs, without a request to SLURM.

        Raises:
            PoolError: If dask-jobqueue or one of SLURM's commands is missing.
        """
        # Do not import it here, because that would replace the kernel's handler of SIGINT.
        if importlib.util.find_spec("dask_jobqueue") is None:
            raise PoolError(MISSING.format(why=f"pool {self.name!r} needs it"))
        commands.check_commands()

    def _may_have_machines(self, cluster: ClusterDir) -> bool:
        jobs = commands.list_jobs(commands.job_name_of(cluster.cluster_id, ""))
        return not all(job.is_ending for job in jobs)

    def shared_place(self) -> str:
        """Return an empty string, because the nodes share this machine's folders."""
        return ""

    def price(self, max_workers: int) -> str:
        """Return the worst-case cost of ``max_workers`` workers as text."""
        if self.spec.price is None:
            return "an unknown amount: its entry in pools.yaml has no price"
        count = min(max_workers, self.spec.workers.max)
        return f"at most ${self.spec.price * count:.4g} per hour for {count} SLURM jobs"

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
