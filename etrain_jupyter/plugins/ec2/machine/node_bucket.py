"""The cluster's objects in S3, as a node reads them with its machine's role."""

from __future__ import annotations

from functools import partial

from etrain_jupyter.config.store_url import split_s3_url
from etrain_jupyter.storage.objects.s3_bucket import Bucket
from etrain_jupyter.storage.objects.s3_requests import S3Limits, client_of_environment

LIMITS = S3Limits(
    connect_timeout_s=3.0,
    read_timeout_s=5.0,
    num_requests=3,
    num_attempts=2,
    patience_s=5.0,
    deadline_s=20.0,
)
"""Every call returns within half a minute, whatever the network does: a machine that cannot reach
S3 must be able to turn itself off."""


def open_node_bucket(url: str, *, region: str, owner: str = "") -> Bucket:
    """Return the objects below an ``s3://`` URL; no request is sent yet."""
    name, prefix = split_s3_url(url)
    # The credentials of the machine's role, which boto3 reads from the metadata service and renews.
    make_client = partial(client_of_environment, region=region)
    return Bucket(
        name, prefix, LIMITS, setting="bucket", make_client=make_client, owner=lambda: owner
    )
