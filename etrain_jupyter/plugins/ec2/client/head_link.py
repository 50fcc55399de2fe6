"""Connection to a cluster's head that runs on its own machine."""

from __future__ import annotations

import json

from etrain_jupyter.errors import PoolError
from etrain_jupyter.plugins.ec2.client.tunnel import close_tunnel
from etrain_jupyter.pools.rpc import ask, describe_caller
from etrain_jupyter.process.address import SchedulerAddress
from etrain_jupyter.process.cluster_dir import ClusterDir
from etrain_jupyter.process.files import write_private
from etrain_jupyter.wire.requests import SAVE_S, ShutDownCluster, TouchCluster

HEAD_FILE = "head.json"
"""File in the cluster's folder: the head's address and instance, and its address from here."""
ANSWER_S = 5.0


def write_head(cluster: ClusterDir, head: dict[str, str], *, reached_at: str) -> SchedulerAddress:
    """Record how to reach a head from here; return its address."""
    write_private(cluster.path / HEAD_FILE, json.dumps({**head, "reached_at": reached_at}))
    return _address(cluster, reached_at)


def head_address_of(cluster: ClusterDir) -> SchedulerAddress | None:
    """Return the address at which a cluster's head is reached from here; None if unknown."""
    try:
        head = json.loads((cluster.path / HEAD_FILE).read_text())
    except (OSError, ValueError):
        return None
    return _address(cluster, head["reached_at"])


def is_answering(address: SchedulerAddress) -> bool:
    """Return whether a head responds within ``ANSWER_S`` seconds."""
    try:
        ask(address, TouchCluster(), timeout_s=ANSWER_S)
        return True
    # The certificates are missing while another process removes the cluster's folder.
    except (PoolError, FileNotFoundError):
        return False


def end_head(cluster: ClusterDir) -> None:
    """Ask a head on its own machine to shut down, if there is one, and close the port forward."""
    # A head that does not respond is found by its tags and terminated later, see
    # `AwsSpotPool.down`.
    if (address := head_address_of(cluster)) is not None and is_answering(address):
        ask(address, ShutDownCluster(by=describe_caller()), timeout_s=SAVE_S + ANSWER_S)
    close_tunnel(cluster)


def _address(cluster: ClusterDir, reached_at: str) -> SchedulerAddress:
    return SchedulerAddress(
        address=reached_at, cluster_id=cluster.cluster_id, tls_dir=str(cluster.tls)
    )
