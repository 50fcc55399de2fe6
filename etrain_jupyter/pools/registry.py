"""Create pools, by name or for a job. Plug-ins can add kinds; see ``etrain_jupyter.plugin``."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from etrain_jupyter.config import ParsedJob
from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.config.source_map import did_you_mean
from etrain_jupyter.data.workers import Workers
from etrain_jupyter.errors import PoolError
from etrain_jupyter.plugin import PoolKind, kind_of, load, pool_kinds
from etrain_jupyter.pools.address.pool import AddressPool
from etrain_jupyter.pools.base import Pool
from etrain_jupyter.pools.catalog import PoolEntry, advice_on, read_catalog
from etrain_jupyter.pools.local import LocalPool
from etrain_jupyter.process.address import SchedulerAddress
from etrain_jupyter.process.cluster_dir import ClusterDir

ADDRESS = PoolKind(make="etrain_jupyter.pools.address.pool:AddressPool.from_entry")


def pool_names() -> list[str]:
    """Return the pool names that a cell in this folder can use."""
    return ["local", *read_catalog()]


def get_pool(name: str) -> Pool:
    """Return the pool with this name or scheduler address, without starting anything.

    Raises:
        ConfigError: If its entry in ``pools.yaml`` is invalid.
        PoolError: If there is no pool with this name.
    """
    if name == "local":
        return LocalPool()
    # An address needs no entry, but then it has no certificates either.
    if "://" in name:
        entry = PoolEntry(name=name, kind="address", values={"address": name}, file=Path())
        return make_pool(entry)
    catalog = read_catalog()
    if name not in catalog:
        known = ["local", *catalog]
        raise PoolError(
            f"there is no pool {name!r}. Known pools: {', '.join(known)}. Nothing was started. "
            f"{_as_sentence(advice_on(name, known))}"
        )
    return make_pool(catalog[name])


def find_pool(parsed: ParsedJob) -> Pool:
    """Return the pool that a cell names; nothing is started yet.

    Raises:
        ConfigError: If there is no such pool, or its entry in ``pools.yaml`` is invalid.
    """
    name, known = parsed.config.pool, pool_names()
    if name not in known and "://" not in name:
        message = f"there is no pool '{name}'. Known pools: {', '.join(known)}"
        raise parsed.source.error(("pool",), message, hint=advice_on(name, known))
    return get_pool(name)


def make_pool(entry: PoolEntry) -> Pool:
    """Create the pool for an entry in ``pools.yaml``, without starting anything."""
    # The local pool has no keys, so a file cannot define another one.
    kinds = {"address": ADDRESS, **pool_kinds()}
    known = list(kinds)
    if entry.kind not in known:
        hint = did_you_mean(entry.kind, known) or f"write kind: {' or kind: '.join(known)}"
        raise entry.error(f"pool '{entry.name}' has the unknown kind '{entry.kind}'", hint=hint)
    pool: Pool = load(kinds[entry.kind].make)(entry)
    return pool


def pool_of(cluster: ClusterDir) -> Pool:
    """Return the pool of a cluster in the user's state directory, with the cluster's own settings.

    Raises:
        PoolError: If the plug-in of its kind is not installed.
    """
    if cluster.cluster_id.startswith("local-"):
        return LocalPool(cluster_id=cluster.cluster_id)
    kind = kind_of(cluster.cluster_id)
    if kind is None:
        raise PoolError(
            f"cluster {cluster.cluster_id} belongs to a kind of pool that is not installed. "
            "Nothing was changed. Install the package with its plug-in, and try again."
        )
    pool: Pool = load(kind.of_cluster)(cluster)
    return pool


def pool_at(address: SchedulerAddress) -> AddressPool:
    """Return the pool of a Dask scheduler whose address and certificates are known."""
    return AddressPool.at(address)


def open_task_workers(name: str) -> AbstractContextManager[Workers]:
    """Connect to the workers of a pool for the duration of a context.

    Args:
        name: A pool of kind ``address``, or the address of a Dask scheduler.

    Raises:
        PoolError: If the pool does not exist or cannot be reached, or its workers cannot run tasks.
        ConfigError: If its entry in ``pools.yaml`` is invalid.
    """
    pool = get_pool(name)
    if isinstance(pool, AddressPool):
        return pool.tasks()
    # Workers of other pools accept plain values only; see ``process/peers.py``.
    raise PoolError(
        f"the workers of pool {name!r} run trainers and no other tasks. Nothing was done. Use "
        "workers=N for processes on this machine, or a pool of kind address."
    )


def with_shared_checkpoints(
    config: TrainConfig, pool: Pool, *, has_bucket: bool
) -> tuple[TrainConfig, tuple[str, ...]]:
    """Store checkpoints where all the pool's workers can reach them, if the cell names no place.

    A run store in a bucket is such a place, and checkpoints go there by default. Also returns a
    warning if the cell names a folder that the machines may not share.
    """
    place, to = pool.shared_place(), config.checkpoint.to
    if not place or has_bucket or (to is not None and "://" in to):
        return config, ()
    if to is None:
        checkpoint = config.checkpoint.model_copy(update={"to": place})
        return config.model_copy(update={"checkpoint": checkpoint}), ()
    warning = (
        f"checkpoint.to is the folder {to}: all machines of pool {config.pool} must share that "
        f"disk. Without the key, checkpoints go to {place}."
    )
    return config, (warning,)


def _as_sentence(hint: str) -> str:
    return hint[:1].upper() + hint[1:].rstrip("?.") + ("?" if hint.endswith("?") else ".")
