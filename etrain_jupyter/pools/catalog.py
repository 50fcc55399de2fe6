"""Read ``pools.yaml``, which defines the user's pools.

::

    lab:
      kind: address
      address: tls://10.0.3.7:8786

The file is read from the notebook's folder and from the user's configuration folder; if both define
a name, the notebook's folder wins. That folder may be a clone of an untrusted repository, so the
file contains plain values only and nothing in it is executed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from etrain_jupyter.config.cell import parse_section
from etrain_jupyter.config.fields import Section
from etrain_jupyter.config.source_map import NOWHERE, SourceMap, did_you_mean, in_words
from etrain_jupyter.config.yaml_nodes import load_file
from etrain_jupyter.errors import ConfigError
from etrain_jupyter.plugin import pool_kinds
from etrain_jupyter.untrusted import read_regular

FILE = "pools.yaml"
FILE_VARIABLE = "ETRAIN_POOLS"
"""Environment variable with the path of a file that is read instead of all other files."""
MAX_BYTES = 1_000_000

S = TypeVar("S", bound=Section)


@dataclass(frozen=True, kw_only=True)
class PoolEntry:
    """One pool in ``pools.yaml``."""

    name: str
    kind: str
    values: Mapping[str, Any]
    """Keys and values except ``kind``, not yet validated."""
    file: Path
    source: SourceMap = NOWHERE
    """Positions of the keys and values in the file."""

    def read_as(self, section: type[S]) -> S:
        """Validate the keys as the options of a kind of pool; raise the first error."""
        return parse_section(self.values, section, self.source)

    def error(self, message: str, *, hint: str = "") -> ConfigError:
        """Return an error that points at the whole entry."""
        return self.source.error((), message, hint=hint, at_key=True)


def files() -> list[Path]:
    """Return the files that may define pools, in order of precedence."""
    # If the variable is set, the file in the working folder is not read.
    if os.environ.get(FILE_VARIABLE):
        return [own_file()]
    return [Path.cwd() / FILE, own_file()]


def own_file() -> Path:
    """Return the user's own file. Unlike a file in the working folder, it can be trusted."""
    if own := os.environ.get(FILE_VARIABLE):
        return Path(own).expanduser().absolute()
    config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(config) / "etrain" / FILE


def read_catalog() -> dict[str, PoolEntry]:
    """Return the pools from all files, by name; raise the error of the first invalid file."""
    found: dict[str, PoolEntry] = {}
    for file in files():
        for entry in _read(file):
            # Files come in order of precedence: the first definition of a name wins.
            found.setdefault(entry.name, entry)
    return found


def read_own_catalog() -> dict[str, PoolEntry]:
    """Return the pools of the user's own file, by name; raise its first error."""
    return {entry.name: entry for entry in _read(own_file())}


def _read(file: Path) -> list[PoolEntry]:
    try:
        # Accept a symbolic link, because users may keep the file elsewhere.
        text = read_regular(file, most_bytes=MAX_BYTES, follow=True).decode("utf-8")
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(
            f"{file} cannot be read ({exc}). Nothing was started",
            hint=f"fix the file, or set {FILE_VARIABLE} to another file",
        ) from exc
    data, source = load_file(text, str(file))
    if data is None:
        return []
    if not isinstance(data, Mapping):
        hint = "write for example 'gpus: {kind: address, address: tls://10.0.0.5:8786}'"
        message = f"the file must map pool names to pools, but it is {in_words(data)}"
        raise source.error((), message, hint=hint, at_key=True)
    return [_entry(str(name), value, source.below((name,)), file) for name, value in data.items()]


def _entry(name: str, value: Any, source: SourceMap, file: Path) -> PoolEntry:
    problem = hint = ""
    if not isinstance(value, Mapping):
        problem = f"pool '{name}' must be a group of keys, but it is {in_words(value)}"
        hint = f"write '{name}: {{kind: address, ...}}'"
    # In a cell, these names always mean the local pool or an address, so a file must not define
    # them.
    elif "://" in name or name == "local":
        problem = f"a pool cannot be called '{name}': this name is reserved"
        hint = "choose another name"
    # Only the kind is checked here. The pool's class validates the other keys when the pool is
    # used, so an error in one entry does not disable the other pools.
    elif "kind" not in value:
        problem = f"pool '{name}' has no kind"
        hint = f"add kind: {', '.join(pool_kinds())} or address"
    if problem:
        raise source.error((), problem, hint=hint, at_key=True)
    values = {key: inner for key, inner in value.items() if key != "kind"}
    return PoolEntry(name=name, kind=str(value["kind"]), values=values, file=file, source=source)


def advice_on(name: str, known: list[str]) -> str:
    """Return a hint for an unknown pool name: the closest known name, or where to define a pool."""
    where = " or ".join(str(file) for file in files())
    return did_you_mean(name, known) or f"define it in {where}, or write pool: local"
