"""The embedded pool: processes on this machine, detached from the kernel that started them."""

from __future__ import annotations

from pathlib import Path

from etrain_jupyter.pools.base import CostReport
from etrain_jupyter.pools.detached import DetachedPool
from etrain_jupyter.process.address import SchedulerAddress
from etrain_jupyter.process.cluster_dir import (
    LocalSettings,
    cluster_dirs,
    local_prefix,
    remove_stale,
)
from etrain_jupyter.wire.requests import ClusterFacts


class LocalPool(DetachedPool):
    """Workers on this machine: one a GPU, else CPU slots.

    Args:
        cluster_id: Bind the object to that cluster, instead of the one of this Python environment.
        settings: How a cluster that has to be started shall behave; by default what the environment
            says.
    """

    def __init__(
        self, *, cluster_id: str | None = None, settings: LocalSettings | None = None
    ) -> None:
        super().__init__(name="local", prefix=local_prefix(), cluster_id=cluster_id)
        self._settings = settings

    def settings(self) -> LocalSettings:
        """Return how a cluster that has to be started shall behave."""
        return self._settings or LocalSettings.from_environment()

    def prepare_start(self, root: Path) -> None:
        """Remove what dead clusters left: their workers have ended with their keepers."""
        remove_stale(root)

    def shared_place(self) -> str:
        """Return nothing: its workers see this machine's folders."""
        return ""

    def price(self, max_workers: int) -> str:
        """Return that there is none."""
        return "nothing, this is your own machine"

    def cost(self) -> CostReport:
        """Return zeros: your own machine is free."""
        return CostReport()


def find_clusters() -> list[SchedulerAddress]:
    """Return this user's living clusters on this machine, the newest first."""
    found = []
    for cluster in cluster_dirs():
        record = cluster.record()
        if record is not None and record.is_alive:
            found.append(cluster.address(record))
    return found


def find_remains() -> list[str]:
    """Return the ids of this user's clusters on this machine, living, starting, ending or dead."""
    records = [(cluster.cluster_id, cluster.record()) for cluster in cluster_dirs()]
    return [cluster_id for cluster_id, record in records if record is None or record.is_here]


def load_in_words(facts: ClusterFacts) -> str:
    """Return how many workers and jobs a cluster has, and how long it has been without any.

    >>> load_in_words(ClusterFacts(cluster_id="c", pid=1, workers=1, jobs=0, idle_s=7.4))
    '1 worker, no job, idle for 7 s'
    """
    num_workers, num_jobs = facts.workers, facts.jobs
    workers = f"{num_workers} worker" + ("" if num_workers == 1 else "s")
    if not num_jobs:
        return f"{workers}, no job, idle for {facts.idle_s:.0f} s"
    return f"{workers}, {num_jobs} job" + ("" if num_jobs == 1 else "s")
