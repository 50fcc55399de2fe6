"""List jobs and clusters that this kernel does not follow, for JupyterLab's side panel.

The listing only reads files, in a thread, while cells may run. It starts no process, sends nothing
to a scheduler, does not reset the idle timeout of a cluster, and imports neither torch nor Dask.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection
from typing import Any

from etrain_jupyter.log.events import TERMINAL_STATUSES
from etrain_jupyter.notebook.dashboard.side_panel import OtherJobs
from etrain_jupyter.notebook.job.run_store import RunStore
from etrain_jupyter.process.cluster_dir import ClusterDir, cluster_dirs, read_load

MAX_CHECKED_JOBS = 50
"""Maximum number of jobs to check, newest first. Each check reads a file, and older jobs are rarely
still running."""


def find_other_jobs(store: RunStore, followed: Collection[str], *, is_asked: bool) -> OtherJobs:
    """Return the running jobs that are not ``followed``, and the live clusters.

    A run store in a bucket is listed only if the user has asked, because that costs money.
    """
    # A panel refreshes on its own, but requests to a bucket are billed.
    is_bucket = str(store) != str(store.root)
    others = None if is_bucket and not is_asked else tuple(find_others(store, followed))
    return OtherJobs(others=others, pools=tuple(find_pools()))


def find_others(store: RunStore, followed: Collection[str]) -> list[dict[str, Any]]:
    """Return the jobs of the store that have not ended, newest first."""
    found = []
    for record in itertools.islice(store.records(), MAX_CHECKED_JOBS):
        # The panel lists the followed jobs itself, from their dashboards.
        if record.job_id in followed:
            continue
        # Read only the end of the log and the cluster's files; do not send a request to the
        # scheduler.
        known = store.summarize(record)
        if not known.is_gone and known.status not in TERMINAL_STATUSES:
            found.append(
                {
                    "job_id": record.job_id,
                    "name": record.name,
                    "status": known.status,
                    "step": known.step,
                    "total_steps": known.total_steps,
                    "world_size": known.world_size,
                }
            )
    return found


def find_pools() -> list[dict[str, Any]]:
    """Return this user's live clusters on this machine, with their load."""
    found = (_load_of(cluster) for cluster in cluster_dirs())
    return [load for load in found if load is not None]


def _load_of(cluster: ClusterDir) -> dict[str, Any] | None:
    # The scheduler writes its load to a file, so reading it does not reset its idle timeout.
    record, load = cluster.record(), read_load(cluster)
    if record is None or not record.is_alive or load is None:
        return None  # the cluster is starting or ending; %etrain doctor explains its state
    now = time.time()
    idle_s = 0.0 if load.idle_since is None else max(0.0, now - load.idle_since)
    settings = cluster.settings()
    left_s = settings.idle_s - idle_s
    return {
        "pool": settings.pool,
        "cluster_id": cluster.cluster_id,
        "workers": load.workers,
        "idle_s": idle_s,
        # JSON has no infinity, which here means that only `%etrain down` ends the cluster.
        "ends_in_s": left_s if left_s < float("inf") else None,
        "time": now,
    }
