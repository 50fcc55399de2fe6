"""Number of workers and idle time of a cluster, readable without contacting its scheduler.

Contacting it requires Dask, whose modules have circular imports: importing Dask in a background
thread of the kernel fails if a cell first imports it at the same moment.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from etrain_jupyter.process.cluster_dir import ClusterDir
from etrain_jupyter.process.files import write_private

LOAD_FILE = "load.json"


@dataclass(frozen=True, kw_only=True)
class Load:
    """Content of ``load.json``."""

    workers: int
    """Number of worker processes, including those still starting."""
    idle_since: float | None
    """When the last job ended, in seconds since the epoch; None while a job runs."""


def write_load(cluster: ClusterDir, load: Load) -> None:
    """Record the load of a cluster.

    Raises:
        OSError: If the cluster's folder was deleted.
    """
    write_private(cluster.path / LOAD_FILE, json.dumps(dataclasses.asdict(load)))


def read_load(cluster: ClusterDir) -> Load | None:
    """Return the recorded load of a cluster, or None if it is not known yet."""
    try:
        return Load(**json.loads((cluster.path / LOAD_FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None
