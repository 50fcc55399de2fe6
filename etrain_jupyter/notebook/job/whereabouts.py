"""Find out whether and where the cluster of a job can be asked, from this user's own files.

A job's record says which cluster got it. It may be anybody's record: only the id is taken from it,
and what is known of that id decides. Nothing here connects to anything.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

from etrain_jupyter.untrusted import plain_line

if TYPE_CHECKING:
    from etrain_jupyter.process.address import SchedulerAddress


@dataclass(frozen=True, kw_only=True)
class Whereabouts:
    """What is known of a job's cluster; without address and end only the log can be followed."""

    address: SchedulerAddress | None = None
    """Where to ask it; from this user's own files."""
    is_alive: bool = False
    """Whether its scheduler is known to be alive: a process of this machine."""
    has_ended: bool = False
    """Whether it is known to have ended, or the job was never submitted to a cluster."""
    why: str = ""
    """Why it cannot be asked from here, and what to do about that."""


def find_cluster(cluster: Mapping[str, str], host: str) -> Whereabouts:
    """Return what this user's own files know of a job's cluster.

    Args:
        cluster: What ``job.json`` says of it.
        host: The machine on which the job was submitted, as ``job.json`` says; empty in old ones.
    """
    from etrain_jupyter.pools.own_clusters import (
        address_of,
        find_cluster_dir,
        find_scheduler,
        is_out_of_reach,
        state_roots,
    )

    cluster_id, said = cluster.get("cluster_id", ""), cluster.get("address", "")
    state_dir = cluster.get("state_dir", "")
    if not said and not state_dir:
        return Whereabouts(has_ended=True)
    own = find_cluster_dir(cluster_id)
    if own is not None and is_out_of_reach(own):
        return Whereabouts(why=_why_not_asked(cluster, host))
    if own is not None:
        address, process = address_of(own), own.record()
        is_alive = process is not None and process.is_here and process.is_alive
        return Whereabouts(address=address, is_alive=is_alive, has_ended=address is None)
    if not state_dir:
        known = find_scheduler(cluster_id, said)
        return Whereabouts(address=known, why="" if known else _why_not_asked(cluster, host))
    # A cluster of this user and machine has a folder for as long as it lives.
    is_here = host in ("", platform.node()) and PurePath(state_dir).parent in state_roots()
    return Whereabouts(has_ended=is_here, why="" if is_here else _why_not_asked(cluster, host))


def _why_not_asked(cluster: Mapping[str, str], host: str) -> str:
    name = plain_line(cluster.get("cluster_id") or "unknown", 60)
    if cluster.get("state_dir"):
        where = plain_line(host or "another machine", 60)
        return (
            f"its cluster {name} cannot be asked from here: only its log is followed. "
            f"What only the cluster can do is done on {where}, by the user who submitted the job."
        )
    address = plain_line(cluster["address"], 80)
    return (
        f"its scheduler at {address} is none that you know, so it is not asked: only its log is "
        "followed. If it is yours, name it in your own pools.yaml (~/.config/etrain), for example "
        f"'lab: {{kind: address, address: {address}}}'."
    )
