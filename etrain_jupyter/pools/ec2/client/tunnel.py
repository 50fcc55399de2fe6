"""The way from a machine outside the VPC to a head inside it: a port forward by Session Manager.

Nothing on EC2 has to be open to the internet for it, and it ends where the security group does not
look: on the head itself. It needs the AWS command line with its Session Manager plugin here, and
the SSM agent and policy there. It is a process of its own, detached from the kernel.
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
from etrain_jupyter.pools.ec2.spec import AwsSpotSpec
from etrain_jupyter.process.cluster_dir import ClusterDir
from etrain_jupyter.process.files import write_private
from etrain_jupyter.process.processes import MARKER, stamp_of, wait_until

FILE = "tunnel.json"
DOCUMENT = "AWS-StartPortForwardingSession"
OPEN_S = 30.0


def open_tunnel(cluster: ClusterDir, spec: AwsSpotSpec, instance_id: str, port: int) -> str:
    """Return the address at which a head is reached from here; open the way if it is closed.

    It is the same one each time, so that jobs find it again.

    Args:
        cluster: The folder that this machine has of the cluster.
        spec: The pool's.
        instance_id: The head's machine.
        port: Where its scheduler listens.

    Raises:
        PoolError: If it does not open.
    """
    known = _read(cluster)
    local = int(known.get("port", 0)) or _free_port()
    address = f"tls://127.0.0.1:{local}"
    if known and stamp_of(int(known["pid"])) == known["stamp"]:
        return address
    words = [
        find_command(),
        "ssm",
        "start-session",
        "--region",
        spec.region,
        "--target",
        instance_id,
    ]
    words += ["--document-name", DOCUMENT]
    words += ["--parameters", f"portNumber={port},localPortNumber={local}"]
    words += ["--profile", spec.profile] if spec.profile else []
    with cluster.log("tunnel").open("ab") as log:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | {MARKER: cluster.cluster_id},
            start_new_session=True,
        )
    told = {"pid": process.pid, "stamp": stamp_of(process.pid) or "", "port": local}
    write_private(cluster.path / FILE, json.dumps(told))
    is_open = wait_until(
        lambda: process.poll() is not None or _listens(local), timeout_s=OPEN_S
    ) and _listens(local)
    if not is_open:
        close_tunnel(cluster)
        raise PoolError(
            f"the port forward to {instance_id} did not open within {OPEN_S:g} s. The head goes "
            "on, and ends by itself without a job. Its machine needs the SSM agent and the policy "
            "AmazonSSMManagedInstanceCore, you need ssm:StartSession. What `aws` said:\n"
            f"{cluster.log_tail('tunnel')}"
        )
    # It outlives this process; nobody here waits for it.
    process.returncode = 0
    return address


def find_command() -> str:
    """Return the AWS command line.

    Raises:
        PoolError: If it is not there.
    """
    command = shutil.which("aws")
    if command is None:
        raise PoolError(
            "head_tunnel: ssm needs the AWS command line, and there is no `aws` on the PATH. "
            "Nothing was launched. Install it with its Session Manager plugin, or reach the VPC by "
            "another way and remove the key."
        )
    return command


def close_tunnel(cluster: ClusterDir) -> None:
    """End the port forward, if there is one."""
    known = _read(cluster)
    if known and stamp_of(int(known["pid"])) == known["stamp"]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(int(known["pid"]), signal.SIGTERM)


def _read(cluster: ClusterDir) -> dict[str, str | int]:
    try:
        known: dict[str, str | int] = json.loads((cluster.path / FILE).read_text())
    except (OSError, ValueError):
        return {}
    return known


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0
