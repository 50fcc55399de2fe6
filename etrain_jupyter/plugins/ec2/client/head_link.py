"""Connection to a cluster's head on its own machine, directly or through Session Manager.

A port forward of Session Manager ends on the head itself, so it is not subject to the security
group, and no port has to be open to the internet. It requires the AWS CLI with the Session Manager
plugin on this machine, and the SSM agent and policy on the head. It is a separate process, detached
from the kernel.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess

from etrain_jupyter.errors import PoolError
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec
from etrain_jupyter.pools.rpc import ask, describe_caller
from etrain_jupyter.process.address import SchedulerAddress
from etrain_jupyter.process.cluster_dir import ClusterDir
from etrain_jupyter.process.files import write_private
from etrain_jupyter.process.processes import MARKER, stamp_of, wait_until
from etrain_jupyter.wire.requests import SAVE_S, ShutDownCluster, TouchCluster

HEAD_FILE = "head.json"
"""File in the cluster's folder: the head's instance, its address, and its address from here."""
ANSWER_S = 5.0
TUNNEL_FILE = "tunnel.json"
DOCUMENT = "AWS-StartPortForwardingSession"
OPEN_S = 30.0


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
    # A head that does not respond is found by its tags and terminated later; see
    # `AwsSpotPool.down`.
    if (address := head_address_of(cluster)) is not None and is_answering(address):
        ask(address, ShutDownCluster(by=describe_caller()), timeout_s=SAVE_S + ANSWER_S)
    close_tunnel(cluster)


def _address(cluster: ClusterDir, reached_at: str) -> SchedulerAddress:
    return SchedulerAddress(
        address=reached_at, cluster_id=cluster.cluster_id, tls_dir=str(cluster.tls)
    )


def open_tunnel(cluster: ClusterDir, spec: AwsSpotSpec, instance_id: str, port: int) -> str:
    """Return the local address of a head; open the port forward if it is closed.

    Raises:
        PoolError: If the port forward does not open.
    """
    known = _read(cluster)
    # Kernels and job records contain the local address, so a reopened forward uses the same port.
    local = int(known.get("port", 0)) or _free_port()
    address = f"tls://127.0.0.1:{local}"
    # Check more than the pid, which may have been reused; see `stamp_of`.
    if known and stamp_of(int(known["pid"])) == known["stamp"]:
        return address
    session_command = [
        find_command(),
        "ssm",
        "start-session",
        "--region",
        spec.region,
        "--target",
        instance_id,
    ]
    session_command += ["--document-name", DOCUMENT]
    session_command += ["--parameters", f"portNumber={port},localPortNumber={local}"]
    session_command += ["--profile", spec.profile] if spec.profile else []
    with cluster.log("tunnel").open("ab") as log:
        process = subprocess.Popen(
            session_command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # The marker lets `end_cluster_here` find the process if the record is lost.
            env=os.environ | {MARKER: cluster.cluster_id},
            start_new_session=True,
        )
    record = {"pid": process.pid, "stamp": stamp_of(process.pid) or "", "port": local}
    write_private(cluster.path / TUNNEL_FILE, json.dumps(record))
    is_open = wait_until(
        # The plugin opens the port late and reports errors only as text: poll both.
        lambda: process.poll() is not None or _listens(local),
        timeout_s=OPEN_S,
    ) and _listens(local)
    if not is_open:
        close_tunnel(cluster)
        raise PoolError(
            f"the port forward to {instance_id} did not open within {OPEN_S:g} s. The head keeps "
            "running, and shuts down when it has had no job for lifetime.idle. Its machine needs "
            "the SSM agent and the policy AmazonSSMManagedInstanceCore; your user needs "
            "ssm:StartSession. Output of `aws`:\n"
            f"{cluster.log_tail('tunnel')}"
        )
    # The process outlives this one: keep Popen from waiting for it.
    process.returncode = 0
    return address


def find_command() -> str:
    """Return the path of the AWS command line.

    Raises:
        PoolError: If it is not installed.
    """
    command = shutil.which("aws")
    if command is None:
        raise PoolError(
            "head_tunnel: ssm needs the AWS command line, and there is no `aws` on the PATH. "
            "Nothing was launched. Install it with its Session Manager plugin, or connect to the "
            "VPC in another way and remove the key."
        )
    return command


def close_tunnel(cluster: ClusterDir) -> None:
    """Close the port forward, if there is one."""
    known = _read(cluster)
    if known and stamp_of(int(known["pid"])) == known["stamp"]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            # Signal the group: `aws` starts the plugin as a child, which would keep the connection
            # open.
            os.killpg(int(known["pid"]), signal.SIGTERM)


def _read(cluster: ClusterDir) -> dict[str, str | int]:
    try:
        known: dict[str, str | int] = json.loads((cluster.path / TUNNEL_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return known


def _free_port() -> int:
    # Another process may take the port before `aws` opens it; then the forward fails to open.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0
