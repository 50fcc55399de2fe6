"""How busy a cluster is, as its scheduler writes it down: whoever only looks need not ask it.

To ask takes Dask, and its first import in a thread of a kernel's fails where a cell imports it at
the same moment: its modules import each other in a circle.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from etrain_jupyter.process.cluster_dir import ClusterDir, write_private

LOAD_FILE = "load.json"


@dataclass(frozen=True, kw_only=True)
class Load:
    """What ``load.json`` says."""

    workers: int
    """Worker processes, those that start included."""
    idle_since: float | None
    """When its last job ended, in seconds since the epoch; None while it has one."""


def write_load(cluster: ClusterDir, load: Load) -> None:
    """Write down how busy a cluster is.

    Raises:
        OSError: If its folder is gone.
    """
    write_private(cluster.path / LOAD_FILE, json.dumps(dataclasses.asdict(load)))


def read_load(cluster: ClusterDir) -> Load | None:
    """Return how busy a cluster is; None if that is not known (yet)."""
    try:
        return Load(**json.loads((cluster.path / LOAD_FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None
