"""Read ``pools.yaml``, which defines the user's pools.

::

    lab:
      kind: address
      address: tls://10.0.3.7:8786

The file is read from the notebook's folder and from the user's configuration folder; if both define
a name, the notebook's folder wins. This folder may be a clone of an untrusted repository, so the
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
from etrain_jupyter.errors import CellError, ConfigError
from etrain_jupyter.plugin import pool_kinds
from etrain_jupyter.untrusted import read_regular

FILE = "pools.yaml"
FILE_VARIABLE = "ETRAIN_POOLS"
"""Environment variable with the path of a file that is read instead of all other files."""
MAX_BYTES = 1_000_000

S = TypeVar("S", bound=Section)


class PoolsFileError(CellError):
    """An error in ``pools.yaml``, with its position.

    Attributes:
        file: The file that contains the error.
    """

    def __init__(self, fault: CellError, file: Path) -> None:
        super().__init__(
            str(fault),
            line=fault.line,
            column=fault.column,
            text=fault.text,
            length=fault.length,
            path=fault.path,
            hint=fault.hint,
        )
        self.file = file

    def render(self) -> list[str]:
        """Return the message with the file name, the marked line, and the hint."""
        # The base class renders errors in cells: line number, but no file name. Add the file name
        # to the prefix, which only the first line has.
        first, *others = super().render()
        return [first.replace("etrain: line", f"etrain: {self.file}, line", 1), *others]


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
        """Validate the keys as the options of one kind of pool.

        Raises:
            ConfigError: If a key is invalid. The error points at the first invalid key.
        """
        try:
            return parse_section(self.values, section, self.source)
        except CellError as exc:
            raise PoolsFileError(exc, self.file) from None

    def error(self, message: str, *, hint: str = "") -> ConfigError:
        """Return an error that points at the whole entry."""
        return _at_place(self.source, (), message, hint, self.file)


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
    """Return the pools from all files, by name.

    Raises:
        ConfigError: If a file is invalid. The exception contains the position of the error.
    """
    found: dict[str, PoolEntry] = {}
    for file in files():
        for entry in _read(file):
            # Files come in order of precedence: the first definition of a name wins.
            found.setdefault(entry.name, entry)
    return found


def read_own_catalog() -> dict[str, PoolEntry]:
    """Return the pools of the user's own file, by name.

    Raises:
        ConfigError: If the file is invalid. The exception contains the position of the error.
    """
    return {entry.name: entry for entry in _read(own_file())}


def _read(file: Path) -> list[PoolEntry]:
    try:
        # Accept a symbolic link: users may keep the file elsewhere.
        text = read_regular(file, most_bytes=MAX_BYTES, follow=True).decode("utf-8")
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(
            f"{file} cannot be read ({exc}). Nothing was started",
            hint=f"fix the file, or set {FILE_VARIABLE} to another file",
        ) from exc
    try:
        data, source = load_file(text)
    except CellError as exc:
        raise PoolsFileError(exc, file) from None
    if data is None:
        return []
    if not isinstance(data, Mapping):
        hint = "write for example 'gpus: {kind: address, address: tls://10.0.0.5:8786}'"
        message = f"the file must map pool names to pools, but it is {in_words(data)}"
        raise _at_place(source, (), message, hint, file)
    return [_entry(str(name), value, source.below((name,)), file) for name, value in data.items()]


def _entry(name: str, value: Any, source: SourceMap, file: Path) -> PoolEntry:
    if not isinstance(value, Mapping):
        message = f"pool '{name}' must be a group of keys, but it is {in_words(value)}"
        raise _at_place(source, (), message, f"write '{name}: {{kind: address, ...}}'", file)
    # In a cell, these names always mean the local pool or an address, so a file must not define
    # them.
    if "://" in name or name == "local":
        message = f"a pool cannot be called '{name}': this name is reserved"
        raise _at_place(source, (), message, "choose another name", file)
    # Only the kind is checked here. The pool's class validates the other keys when the pool is
    # used, so an error in one entry does not disable the other pools.
    if "kind" not in value:
        message = f"pool '{name}' has no kind"
        hint = f"add kind: {', '.join(pool_kinds())} or address"
        raise _at_place(source, (), message, hint, file)
    values = {key: inner for key, inner in value.items() if key != "kind"}
    return PoolEntry(name=name, kind=str(value["kind"]), values=values, file=file, source=source)


def _at_place(
    source: SourceMap, path: tuple[str, ...], message: str, hint: str, file: Path
) -> ConfigError:
    error = source.error(path, message, hint=hint, at_key=True)
    return PoolsFileError(error, file) if isinstance(error, CellError) else error


def advice_on(name: str, known: list[str]) -> str:
    """Return a hint for an unknown pool name: the closest known name, or where to define a pool."""
    where = " or ".join(str(file) for file in files())
    return did_you_mean(name, known) or f"define it in {where}, or write pool: local"
