"""Look up pools by name. A plug-in adds a new kind of pool, see ``etrain_jupyter.plugin``."""

from __future__ import annotations

from pathlib import Path

from etrain_jupyter.config.source_map import did_you_mean
from etrain_jupyter.errors import PoolError
from etrain_jupyter.plugin import PoolKind, kind_of, load, pool_kinds
from etrain_jupyter.pools.base import Pool
from etrain_jupyter.pools.catalog import PoolEntry, advice_on, read_catalog
from etrain_jupyter.pools.local.pool import LocalPool
from etrain_jupyter.process.cluster_dir import ClusterDir

ADDRESS = PoolKind(make="etrain_jupyter.pools.address.pool:AddressPool.from_entry")


def pool_names() -> list[str]:
    """Return the pool names that a cell in this folder can use.

    Raises:
        ConfigError: If ``pools.yaml`` is invalid.
    """
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


def make_pool(entry: PoolEntry) -> Pool:
    """Create the pool for an entry in ``pools.yaml``, without starting anything.

    Raises:
        ConfigError: If the entry is invalid, with its position in the file.
    """
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


def _as_sentence(hint: str) -> str:
    return hint[:1].upper() + hint[1:].rstrip("?.") + ("?" if hint.endswith("?") else ".")
