"""All pools at a glance, and their end: what ``%etrain pools`` and ``%etrain down`` do."""

from __future__ import annotations

from etrain_jupyter.errors import PoolError
from etrain_jupyter.pools import local
from etrain_jupyter.pools.local import LocalPool


def describe_pools() -> str:
    """Return the pools and their living clusters, for `%etrain pools`."""
    return f"local: processes on this machine\n{local.describe()}"


def down(cluster: str | None = None, *, timeout_s: float = 10.0) -> str:
    """End one local cluster, or all of this user's with what dead ones left; say what was done.

    Raises:
        PoolError: If there is no cluster of that id, or something is left.
    """
    ids = local.find_remains()
    if cluster is not None and cluster not in ids:
        raise PoolError(
            f"no cluster {cluster!r} is up. Nothing was ended. Up are: {', '.join(ids) or 'none'}."
        )
    ends = {
        one: LocalPool(cluster_id=one).down(timeout_s=timeout_s)
        for one in (ids if cluster is None else [cluster])
    }
    left = {one: end for one, end in ends.items() if end}
    if left:
        raise PoolError(
            f"after {timeout_s:g} s there is still something left of "
            + "; ".join(f"{one}: {end}" for one, end in left.items())
            + ". Everything else was ended. End the processes by hand, or restart the machine."
        )
    return "\n".join(f"{one} has ended" for one in ends) or "No cluster is up."
