"""What can be known to be wrong before anything is launched, and where the head listens."""

from __future__ import annotations

import ipaddress
import socket

from botocore.exceptions import BotoCoreError, ClientError

from etrain_jupyter.errors import CheckpointError, PoolError
from etrain_jupyter.pools.aws_spot.aws_words import pool_error
from etrain_jupyter.pools.aws_spot.bootstrap import find_image
from etrain_jupyter.pools.aws_spot.ec2 import Clients
from etrain_jupyter.pools.aws_spot.network import NOTHING, find_subnets
from etrain_jupyter.pools.aws_spot.spec import AwsSpotSpec


def check_account(clients: Clients, spec: AwsSpotSpec) -> None:
    """See to it that credentials, network, image and bucket are there.

    Raises:
        PoolError: For the first that is not, in words.
    """
    try:
        find_subnets(clients.ec2, spec)
        find_image(clients, spec)
    except (ClientError, BotoCoreError) as exc:
        raise pool_error(f"EC2 in {spec.region} cannot be used", exc, NOTHING) from exc
    try:
        # A list: what looks for one object is answered the same whether or not there is a bucket.
        clients.bucket.keys("clusters/none", "looking at the bucket")
    except CheckpointError as exc:
        raise PoolError(
            f"the bucket {spec.bucket} cannot be used: {exc}. {NOTHING} Name another one in "
            "pools.yaml, or make it; `%etrain pools policy` prints what the user needs there."
        ) from exc


def find_head_host(clients: Clients, spec: AwsSpotSpec) -> str:
    """Return the address of this machine at which nodes reach it.

    It is that of the interface by which this machine would send something to the nodes' subnet.

    Raises:
        PoolError: If there is none.
    """
    if spec.head_host:
        return spec.head_host
    try:
        _, subnets = find_subnets(clients.ec2, spec)
        described = clients.ec2.describe_subnets(SubnetIds=sorted(subnets.values())[:1])["Subnets"]
        network = ipaddress.ip_network(described[0]["CidrBlock"])
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((str(network[4]), 9))  # sends nothing
            return str(probe.getsockname()[0])
    except (ClientError, BotoCoreError, OSError) as exc:
        raise PoolError(
            f"no address of this machine was found at which nodes in {spec.region} could reach it "
            f"({exc}). {NOTHING} Write head_host: ADDRESS for this pool in pools.yaml, or "
            "head: on-demand for a scheduler on a machine of its own."
        ) from exc
