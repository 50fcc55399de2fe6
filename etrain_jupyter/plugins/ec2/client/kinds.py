"""Choose between the two kinds of ``aws-spot`` pool: head on this machine, or on its own."""

from __future__ import annotations

from etrain_jupyter.plugins.ec2.client.pool import AwsSpotPool
from etrain_jupyter.plugins.ec2.client.remote_pool import AwsRemotePool
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec
from etrain_jupyter.pools.catalog import PoolEntry


def from_entry(entry: PoolEntry) -> AwsSpotPool:
    """Return the pool of an entry of ``pools.yaml``; no request is sent yet.

    Raises:
        ConfigError: If a key is invalid, with its position in the file.
    """
    spec = entry.read_as(AwsSpotSpec)
    kind = AwsSpotPool if spec.head == "notebook" else AwsRemotePool
    return kind(entry.name, spec)
