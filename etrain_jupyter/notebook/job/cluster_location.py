"""Determine whether and where a job's cluster is reachable, from this user's own files only.

A job's record names its cluster, but another user may have written the record. Therefore only the
cluster id is taken from the record and looked up in this user's files. This module opens no
connection.
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
class ClusterLocation:
    """The location of a job's cluster, if known; otherwise only the log can be followed."""

    address: SchedulerAddress | None = None
    """The cluster's address, from this user's own files."""
    is_alive: bool = False
    """True if the scheduler is known to be alive, as a process on this machine."""
    has_ended: bool = False
    """True if the cluster is known to have ended, or if the job was never submitted to one."""
    why: str = ""
    """Why the cluster is unreachable from here, and how to change that."""


def find_cluster(cluster: Mapping[str, str], host: str) -> ClusterLocation:
    """Look up a job's cluster in this user's own files."""
    from etrain_jupyter.pools.own_clusters import (
        address_of,
        find_cluster_dir,
        find_scheduler,
        is_out_of_reach,
        state_roots,
    )

    cluster_id, address_in_record = cluster.get("cluster_id", ""), cluster.get("address", "")
    state_dir = cluster.get("state_dir", "")
    # The cases, in this order:
    #   the record names no cluster                -> ended: it was never submitted
    #   a cluster folder of this user, unreachable -> only the log
    #   a cluster folder of this user              -> its address; ended if it has none
    #   a scheduler that this user has named       -> its address
    #   a state directory of this user and host    -> ended, since its folder is gone
    #   otherwise, another user or host            -> only the log
    if not address_in_record and not state_dir:
        return ClusterLocation(has_ended=True)
    own = find_cluster_dir(cluster_id)
    if own is not None and is_out_of_reach(own):
        return ClusterLocation(why=_why_unreachable(cluster, host))
    if own is not None:
        address, process = address_of(own), own.record()
        is_alive = process is not None and process.is_here and process.is_alive
        return ClusterLocation(address=address, is_alive=is_alive, has_ended=address is None)
    if not state_dir:
        known = find_scheduler(cluster_id, address_in_record)
        return ClusterLocation(address=known, why="" if known else _why_unreachable(cluster, host))
    # This user's live clusters on this machine always have a folder; if it is missing, the cluster
    # has ended.
    is_here = host == platform.node() and PurePath(state_dir).parent in state_roots()
    return ClusterLocation(
        has_ended=is_here, why="" if is_here else _why_unreachable(cluster, host)
    )


def _why_unreachable(cluster: Mapping[str, str], host: str) -> str:
    name = plain_line(cluster.get("cluster_id") or "unknown", 60)
    if cluster.get("state_dir"):
        where = plain_line(host or "another machine", 60)
        return (
            f"its cluster {name} is unreachable from here: only its log is followed. Commands "
            f"for the job work on {where}, for the user who submitted it."
        )
    address = plain_line(cluster["address"], 80)
    return (
        f"its scheduler at {address} is unknown to you, so no connection is made: only its log "
        "is followed. If it is yours, add it to your pools.yaml (~/.config/etrain), for example "
        f"'lab: {{kind: address, address: {address}}}'."
    )
