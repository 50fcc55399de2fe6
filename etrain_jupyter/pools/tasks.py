"""Run functions on the workers of a pool, as Dask tasks."""

from __future__ import annotations

from contextlib import AbstractContextManager

from etrain_jupyter.data.workers import Workers
from etrain_jupyter.errors import PoolError
from etrain_jupyter.pools.address.pool import AddressPool
from etrain_jupyter.pools.registry import get_pool


def open_task_workers(name: str) -> AbstractContextManager[Workers]:
    """Connect to the workers of a pool for the time of a context.

    Args:
        name: A pool of kind ``address``, or the address of a Dask scheduler.

    Raises:
        PoolError: If the pool does not exist or cannot be reached, or its workers run no tasks.
        ConfigError: If its entry in ``pools.yaml`` is invalid.
    """
    pool = get_pool(name)
    if isinstance(pool, AddressPool):
        return pool.tasks()
    # Their workers accept plain values only, see ``process/peers.py``.
    raise PoolError(
        f"the workers of pool {name!r} run trainers and no other tasks. Nothing was done. Use "
        "workers=N for processes on this machine, or a pool of kind address."
    )
