"""What there is besides the jobs that this kernel follows, for JupyterLab's side panel.

Looking reads files: it starts nothing, asks no scheduler, keeps no cluster from ending when it is
idle, and loads neither torch nor Dask. It is done on a thread, beside the cells.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection
from typing import Any

from etrain_jupyter.log.events import TERMINAL_STATUSES
from etrain_jupyter.notebook.dashboard.side_panel import OtherJobs
from etrain_jupyter.notebook.job.run_store import RunStore
from etrain_jupyter.process.cluster_dir import ClusterDir, cluster_dirs
from etrain_jupyter.process.machine_load import read_load

MAX_LOOKED_AT = 50
"""The newest jobs of the run store; that an older one still runs is rare, and each is a read."""


def look_around(store: RunStore, followed: Collection[str], *, is_asked: bool) -> OtherJobs:
    """Return the jobs that run and that nobody follows here, and the clusters that are up.

    Args:
        store: Where jobs are looked for; in a bucket only if a person asks, since it costs money.
        followed: Ids of jobs that need not be looked at.
        is_asked: Whether a person asks.
    """
    is_bucket = str(store) != str(store.root)
    others = None if is_bucket and not is_asked else tuple(find_others(store, followed))
    return OtherJobs(others=others, pools=tuple(find_pools()))


def find_others(store: RunStore, followed: Collection[str]) -> list[dict[str, Any]]:
    """Return the jobs of the store that have not ended, the newest first."""
    found = []
    for record in itertools.islice(store.records(), MAX_LOOKED_AT):
        if record.job_id in followed:
            continue
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
    """Return this user's living clusters on this machine, and how busy they are."""
    found = (_load_of(cluster) for cluster in cluster_dirs())
    return [load for load in found if load is not None]


def _load_of(cluster: ClusterDir) -> dict[str, Any] | None:
    record, load = cluster.record(), read_load(cluster)
    if record is None or not record.is_alive or load is None:
        return None  # it is starting or ending; %etrain doctor tells what is wrong with it
    now = time.time()
    idle_s = 0.0 if load.idle_since is None else max(0.0, now - load.idle_since)
    settings = cluster.settings()
    left_s = settings.idle_s - idle_s
    return {
        "pool": settings.pool,
        "cluster_id": cluster.cluster_id,
        "workers": load.workers,
        "idle_s": idle_s,
        # JSON has no infinity, and so long does a cluster live that only `%etrain down` ends.
        "ends_in_s": left_s if left_s < float("inf") else None,
        "time": now,
    }
