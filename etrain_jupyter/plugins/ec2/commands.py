"""The sub-commands ``reap`` and ``pools policy``."""

from __future__ import annotations

from etrain_jupyter.notebook.commands.subcommands import Surface
from etrain_jupyter.plugins.ec2 import clusters

WORDS = {
    "action": ("check", "init", "policy", "remove"),
    "head": ("notebook", "on-demand"),
}
"""Accepted words by the name of the argument, for completion."""


def reap(
    surface: Surface, cluster: str | None = None, *, all: bool = False, region: str | None = None
) -> str:
    """Remove leftover resources of dead clusters on EC2, found by their tags.

    Args:
        cluster: Id of a cluster; by default all clusters that have expired.
        all: Also clusters that have not expired; their users lose the machines.

    Example:
        reap --all
    """
    return clusters.reap(cluster, all_clusters=all, region=region)


def policy(surface: Surface, pool: str | None = None) -> str:
    """Print the IAM policies that a pool needs.

    Args:
        pool: Name of the pool; by default the only one of kind aws-spot.

    Example:
        pools policy spot
    """
    return clusters.policies(pool)
