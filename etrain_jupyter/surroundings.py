"""What there is besides the jobs that this kernel follows, for JupyterLab's side panel.

Looking starts nothing, keeps no cluster from ending when it is idle, and loads no torch.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from etrain_jupyter.dashboard.side_panel import Surroundings
from etrain_jupyter.errors import PoolError
from etrain_jupyter.events.types import TERMINAL_STATUSES
from etrain_jupyter.job.run_store import RunStore
from etrain_jupyter.pools.base import SchedulerAddress
from etrain_jupyter.pools.local import ask, find_clusters
from etrain_jupyter.pools.state_dir import ClusterDir

MAX_LOOKED_AT = 50
"""The newest jobs of the run store; that an older one still runs is rare, and each is a read."""
ANSWER_S = 3.0


def look_around(store: RunStore, followed: Collection[str], *, is_asked: bool) -> Surroundings:
    """Return the jobs that run and that nobody follows here, and the clusters that are up.

    Args:
        store: Where jobs are looked for; in a bucket only if a person asks, since it costs money.
        followed: Ids of jobs that need not be looked at.
        is_asked: Whether a person asks.
    """
    is_bucket = str(store) != str(store.root)
    others = None if is_bucket and not is_asked else tuple(find_others(store, followed))
    return Surroundings(others=others, pools=tuple(find_pools()))


def find_others(store: RunStore, followed: Collection[str]) -> list[dict[str, Any]]:
    """Return the jobs of the store that have not ended, the newest first."""
    found = []
    for record in itertools.islice(store.records(), MAX_LOOKED_AT):
        if record.job_id in followed:
            continue
        known = store.standing(record)
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
    """Return this user's living clusters on this machine; one that does not answer is left out."""
    found = (_load_of(address) for address in find_clusters())
    return [load for load in found if load is not None]


def _load_of(address: SchedulerAddress) -> dict[str, Any] | None:
    try:
        facts = ask(address, "etrain_describe", timeout_s=ANSWER_S)
        idle_s = float(facts["idle_s"])
        # JSON has no infinity, and that is what a cluster lives that only `%etrain down` ends.
        left_s = ClusterDir(Path(address.state_dir)).settings().idle_s - idle_s
    except (PoolError, OSError, ValueError, KeyError):
        return None  # it is starting or ending; %etrain doctor tells what is wrong with it
    return {
        "pool": "local",
        "cluster_id": address.cluster_id,
        "workers": facts["workers"],
        "jobs": facts["jobs"],
        "idle_s": idle_s,
        "ends_in_s": left_s if left_s < float("inf") else None,
        "time": time.time(),
    }
