"""Which pools there are, by name. A new kind of pool is one file and one line of ``POOLS``."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from etrain_jupyter.errors import PoolError
from etrain_jupyter.pools import local
from etrain_jupyter.pools.address import AddressPool
from etrain_jupyter.pools.base import Pool
from etrain_jupyter.pools.local import LocalPool

POOLS: dict[str, Callable[[], Pool]] = {"local": LocalPool}


def get_pool(name: str) -> Pool:
    """Return the pool of a name; nothing is started yet.

    Raises:
        PoolError: If there is none.
    """
    if name in POOLS:
        return POOLS[name]()
    if "://" in name:
        return AddressPool(name)
    close = difflib.get_close_matches(name, POOLS, n=1)
    advice = f"Did you mean {close[0]!r}?" if close else "Leave the key out for this machine."
    raise PoolError(
        f"there is no pool {name!r}; known are {', '.join(POOLS)}. Nothing was started. {advice}"
    )


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
