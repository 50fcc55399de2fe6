"""Which pools there are, by name. A new kind of pool is one file and one line of ``KINDS``."""

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
}
"""Each kind's class, which is imported when a pool of that kind is asked for."""


class PoolClass(Protocol):
    """What a kind of pool that has a file can make of its keys there."""

    def from_entry(self, entry: PoolEntry) -> Pool:
        """Return the pool; nothing is started yet.

        Raises:
            ConfigError: If the keys are not what they should be, with their place in the file.
        """
        ...


def pool_names() -> list[str]:
    """Return the names that a cell may give, in this folder.

    Raises:
        ConfigError: If ``pools.yaml`` is not what it should be.
    """
    return ["local", *read_catalog()]


def get_pool(name: str) -> Pool:
    """Return the pool of a name, or that of a scheduler's address; nothing is started yet.

    Raises:
        ConfigError: If its entry in ``pools.yaml`` is not what it should be.
        PoolError: If there is none.
    """
    if name == "local":
        return LocalPool()
    if "://" in name:
        return _class_of("address").from_entry(_entry_of_address(name))
    catalog = read_catalog()
    if name not in catalog:
        known = ["local", *catalog]
        raise PoolError(
            f"there is no pool {name!r}; known are {', '.join(known)}. Nothing was started. "
            f"{_as_sentence(advice_on(name, known))}"
        )
    return make_pool(catalog[name])


def make_pool(entry: PoolEntry) -> Pool:
    """Return the pool of an entry; nothing is started yet.

    Raises:
        ConfigError: If the entry is not what it should be, with the place in its file.
    """
    known = [kind for kind in KINDS if kind != "local"]
    if entry.kind not in known:
        hint = did_you_mean(entry.kind, known) or f"write kind: {' or kind: '.join(known)}"
        raise entry.error(f"pool '{entry.name}' is of no known kind: '{entry.kind}'", hint=hint)
    return _class_of(entry.kind).from_entry(entry)


def _class_of(kind: str) -> PoolClass:
    module, _, name = KINDS[kind].partition(":")
    found: PoolClass = getattr(importlib.import_module(module), name)
    return found


def _entry_of_address(address: str) -> PoolEntry:
    return PoolEntry(name=address, kind="address", values={"address": address}, file=Path())


def _as_sentence(words: str) -> str:
    return words[:1].upper() + words[1:].rstrip("?.") + ("?" if words.endswith("?") else ".")
