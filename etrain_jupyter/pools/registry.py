"""Look up pools by name. A new kind of pool needs one file and one line in ``KINDS``."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from etrain_jupyter.config.source_map import did_you_mean
from etrain_jupyter.errors import PoolError
from etrain_jupyter.pools.base import Pool
from etrain_jupyter.pools.catalog import PoolEntry, advice_on, read_catalog
from etrain_jupyter.pools.local.pool import LocalPool

KINDS: Mapping[str, str] = {
    "local": "etrain_jupyter.pools.local.pool:LocalPool",
    "address": "etrain_jupyter.pools.external.pool:AddressPool",
    "aws-spot": "etrain_jupyter.pools.ec2.client.kinds:AwsSpotKinds",
    "slurm": "etrain_jupyter.pools.slurm.pool:SlurmPool",
}
"""The class of each kind, imported on first use."""


class PoolClass(Protocol):
    """Class of a pool that ``pools.yaml`` can configure."""

    def from_entry(self, entry: PoolEntry) -> Pool:
        """Create the pool from its entry, without starting anything.

        Raises:
            ConfigError: If a key is invalid, with its position in the file.
        """
        ...


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
        return _class_of("address").from_entry(_entry_of_address(name))
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
    known = [kind for kind in KINDS if kind != "local"]
    if entry.kind not in known:
        hint = did_you_mean(entry.kind, known) or f"write kind: {' or kind: '.join(known)}"
        raise entry.error(f"pool '{entry.name}' has the unknown kind '{entry.kind}'", hint=hint)
    return _class_of(entry.kind).from_entry(entry)


def _class_of(kind: str) -> PoolClass:
    module, _, name = KINDS[kind].partition(":")
    # Import the class only now: a kind may need boto3 or other packages that are not installed.
    found: PoolClass = getattr(importlib.import_module(module), name)
    return found


def _entry_of_address(address: str) -> PoolEntry:
    return PoolEntry(name=address, kind="address", values={"address": address}, file=Path())


def _as_sentence(hint: str) -> str:
    return hint[:1].upper() + hint[1:].rstrip("?.") + ("?" if hint.endswith("?") else ".")
