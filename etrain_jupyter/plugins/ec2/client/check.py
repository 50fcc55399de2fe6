"""Check a pool's configuration before launching, and find the head's address."""

from __future__ import annotations

import hashlib
import ipaddress
import socket
import tempfile
from pathlib import Path

from botocore.exceptions import BotoCoreError, ClientError

from etrain_jupyter.config.store_url import split_s3_url
from etrain_jupyter.errors import PoolError, StoreError
from etrain_jupyter.plugins.ec2.aws_messages import pool_error
from etrain_jupyter.plugins.ec2.bootstrap import find_image
from etrain_jupyter.plugins.ec2.ec2_api import Clients
from etrain_jupyter.plugins.ec2.network import NOTHING, find_subnets
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec

MOST_TO_READ = 512 << 20
"""Maximum size in bytes of an archive that is downloaded only for its digest."""


def check_account(clients: Clients, spec: AwsSpotSpec) -> None:
    """Check that credentials, network, image and bucket are usable.

    Raises:
        PoolError: If one of them is not usable. Only the first problem is reported.
    """
    try:
        # Errors found here reach the user within a second, before anything is launched. A head
        # would find them only after it has started.
        check_archive(clients, spec)
        find_subnets(clients.ec2, spec)
        find_image(clients, spec)
    except (ClientError, BotoCoreError) as exc:
        raise pool_error(f"EC2 in {spec.region} cannot be used", exc, NOTHING) from exc
    try:
        # List the bucket instead of reading an object, because a read would fail in the same way
        # whether the object or the bucket is missing.
        clients.bucket.keys("clusters/none", "the bucket cannot be listed")
    except StoreError as exc:
        raise PoolError(
            f"the bucket {spec.bucket} cannot be used: {exc}. {NOTHING} Set bucket in pools.yaml "
            "to another bucket, or create this one. `%etrain pools policy` prints the policy that "
            "the user needs."
        ) from exc


def check_archive(clients: Clients, spec: AwsSpotSpec) -> None:
    """Refuse an archive without a digest, because nodes unpack it at ``/`` as root.

    Raises:
        PoolError: If the digest is missing. The message contains the object's actual digest for
            comparison, if the object can be read.
    """
    image = spec.image
    if not image.archive or image.archive_sha256:
        return
    file = image.archive.rpartition("/")[2]
    here = f"`sha256sum {file}` prints"
    digest, why = _digest_of(clients, image.archive)
    if digest:
        advice = (
            f"The object in the bucket has the SHA-256 {digest} now. Compare it with what {here} "
            "where you made it; if they are the same, add to this pool in pools.yaml: "
            f"image: {{archive_sha256: '{digest}'}}"
        )
    else:
        advice = (
            f"The object was not read ({why}). Add to this pool in pools.yaml: image: "
            f"{{archive_sha256: '...'}}, with what {here}; `aws s3 cp {image.archive} - | "
            "sha256sum` prints that of the object"
        )
    raise PoolError(
        f"image.archive ({image.archive}) has no image.archive_sha256. {NOTHING} Nodes unpack the "
        f"archive at / as root, so its digest must be given. {advice}."
    )


def _digest_of(clients: Clients, archive: str) -> tuple[str, str]:
    """Return the digest of an object, or why it is unknown."""
    name, key = split_s3_url(archive)
    bucket, what = clients.bucket_at(name), "reading image.archive"
    try:
        known = bucket.head(key, what)
        if known is None:
            return "", "it does not exist"
        size = int(known["ContentLength"])
        # The digest is only for comparison; do not download gigabytes for it.
        if size > MOST_TO_READ:
            return "", f"it has {size >> 20} MiB"
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "archive"
            bucket.download(key, size, copy, what)
            with copy.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest(), ""
    except StoreError as exc:
        return "", str(exc)


def find_head_host(clients: Clients, spec: AwsSpotSpec) -> str:
    """Return the address at which nodes can reach this machine.

    It is the address of the interface with the route to the nodes' subnet.

    Raises:
        PoolError: If there is no such address.
    """
    if spec.head_host:
        return spec.head_host
    try:
        _, subnets = find_subnets(clients.ec2, spec)
        # Use any of the subnets, because all of them belong to one VPC and are reached by one
        # route.
        described = clients.ec2.describe_subnets(SubnetIds=sorted(subnets.values())[:1])["Subnets"]
        network = ipaddress.ip_network(described[0]["CidrBlock"])
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # Connecting a UDP socket only selects the local address. The first four addresses of a
            # subnet are reserved by AWS.
            probe.connect((str(network[4]), 9))  # sends nothing
            return str(probe.getsockname()[0])
    except (ClientError, BotoCoreError, OSError) as exc:
        raise PoolError(
            f"this machine has no address at which nodes in {spec.region} could reach it "
            f"({exc}). {NOTHING} Write head_host: ADDRESS for this pool in pools.yaml, or "
            "head: on-demand for a scheduler on its own machine."
        ) from exc
