"""The ``local`` pool: worker processes on this machine, detached from the kernel."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from etrain_jupyter.pools.base import CostReport
from etrain_jupyter.pools.detached import DetachedPool
from etrain_jupyter.process.cluster_dir import ClusterDir, cluster_dirs, remove_stale
from etrain_jupyter.process.cluster_settings import ClusterSettings
from etrain_jupyter.process.state_root import environment_digests, local_prefix


class LocalPool(DetachedPool):
    """Workers on this machine: one per GPU, or CPU slots if there is no GPU.

    Kernels share a cluster if they have the same Python environment and equal values of the
    variables in ``environment_digests``.

    Args:
        cluster_id: Bind this object to one cluster. By default it uses the running cluster of this
            Python environment.
        settings: Settings for a new cluster; by default from environment variables.
    """

    def __init__(
        self, *, cluster_id: str | None = None, settings: ClusterSettings | None = None
    ) -> None:
        super().__init__(name="local", prefix=local_prefix(), cluster_id=cluster_id)
        self._settings = settings

    def settings(self) -> ClusterSettings:
        """Return the settings for a new cluster."""
        settings = self._settings or ClusterSettings.from_environment()
        return dataclasses.replace(settings, environment=environment_digests())

    def prepare_start(self, root: Path) -> None:
        """Remove the folders of dead clusters, whose workers exited with their keepers.

        Prints why the other clusters cannot be used.
        """
        remove_stale(root)
        ours = environment_digests()
        for cluster in filter(self._is_ours, cluster_dirs(root)):
            pairs = _environment_of(cluster).items() ^ ours.items()
            # A cluster with equal values is shutting down.
            if differing := sorted({name for name, _ in pairs}):
                print(
                    f"etrain: starting another local cluster, because {cluster.cluster_id} was "
                    f"started with other values of {', '.join(differing)}."
                )

    def _is_usable(self, cluster: ClusterDir) -> bool:
        # A kernel that is bound to a cluster by its id already has a job there.
        is_bound = self._cluster_id is not None
        return self._is_ours(cluster) and (
            is_bound or _environment_of(cluster) == environment_digests()
        )

    def shared_place(self) -> str:
        """Return an empty string: the workers see this machine's folders."""
        return ""

    def price(self, max_workers: int) -> str:
        """Return a message saying that the user's own machine costs nothing."""
        return "nothing, this is your own machine"

    def cost(self) -> CostReport:
        """Return zeros: the user's own machine is free."""
        return CostReport()


def _environment_of(cluster: ClusterDir) -> dict[str, str]:
    """Return the digests of a cluster's environment; empty while another process removes it."""
    try:
        return cluster.settings().environment
    except OSError:
        return {}
