"""Progress of a write: its folder, its lock and its state file, and a line of text for the user."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa

from etrain_jupyter.data.disk_cache import default_folder
from etrain_jupyter.data.parts import part_name, save_json
from etrain_jupyter.data.places import Place
from etrain_jupyter.errors import ShardError
from etrain_jupyter.untrusted import make_private

_STATE = "state.json"
_EVERY_S = 0.2
_WIDTH = 30


@dataclass(kw_only=True)
class WriteState:
    """Progress of a write."""

    arguments: dict[str, Any]
    """Arguments that must not change when the write continues."""
    schema: str = ""
    """Arrow schema, base64; empty before the first rows."""
    sizes: list[int] = field(default_factory=list)
    """Valid size of each shuffle file."""
    weights: list[list[int]] = field(default_factory=list)
    """Number of rows and their size, of each bucket; empty before the first rows."""
    known_row: list[Any] = field(default_factory=list)
    """Number and digest of a row of the source, usually the last one that is stored."""
    num_gathered: int = 0
    """Rows in the shuffle files."""
    is_gathered: bool = False
    ranges: list[list[int]] = field(default_factory=list)
    """First row and end of each part that workers gather; empty if one process gathers all."""
    num_blocks: list[int] = field(default_factory=list)
    """Number of blocks of each group, once workers have counted them."""
    group: int = 0
    """The group of rows from which the next block is written."""
    block: int = 0
    """Number of the next block within that group."""
    files: list[list[Any]] = field(default_factory=list)
    """Name and size of each written file, and its blocks."""

    def arrow_schema(self) -> pa.Schema:
        """Return the schema of the rows."""
        return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(self.schema)))

    @property
    def num_written(self) -> int:
        """Number of rows in the files that are written."""
        return sum(block[2] for _, _, blocks in self.files for block in blocks)


def folder_for(to: str, place: Place, spill_dir: str | None) -> Path:
    """Create and return the folder of an unfinished write; its rows may be private.

    Raises:
        ShardError: If another user may have prepared it, in a folder that users share.
    """
    key = hashlib.sha256(to.encode()).hexdigest()[:16]
    if spill_dir is not None:
        folder = Path(spill_dir).expanduser().absolute() / f"write-{key}"
    elif place.is_remote:
        folder = default_folder() / f"write-{key}"
    else:
        folder = Path(to) / ".writing"
    try:
        if folder.parent == default_folder():
            make_private(folder.parent)
        make_private(folder)
    except OSError as exc:
        raise ShardError(
            f"{folder} cannot hold the rows of an unfinished write: {exc.strerror}. Nothing was "
            "written. Choose another spill_dir, or delete that folder."
        ) from exc
    return folder


@contextlib.contextmanager
def locked(folder: Path, to: str) -> Iterator[None]:
    """Lock the folder of a write for the time of a context.

    Raises:
        ShardError: If another process has locked it, or the lock is a link.
    """
    path = folder / "lock"
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as exc:
        raise ShardError(
            f"{path} cannot be opened: {exc.strerror}. Nothing was written. Delete {folder}, or "
            "choose another spill_dir."
        ) from exc
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise ShardError(
                f"another process is writing to {to}. Nothing was written. Wait for it, or choose "
                "another folder."
            ) from exc
        yield
    finally:
        os.close(file)


def load_state(folder: Path, to: str, arguments: dict[str, Any]) -> WriteState:
    """Return the progress of an unfinished write; a new one if it has stored no rows.

    Raises:
        ShardError: If the unfinished write has other arguments.
    """
    path = folder / _STATE
    state = WriteState(**json.loads(path.read_bytes())) if path.exists() else None
    has_rows = state is not None and (
        state.num_gathered
        or state.files
        or any((folder / f"{part_name(part)}.json").exists() for part in range(len(state.ranges)))
    )
    if state is None or not has_rows:
        for old in folder.iterdir():
            if old.name != "lock" and old.is_file():
                old.unlink()
        return WriteState(arguments=arguments)
    changed = [name for name in arguments if arguments[name] != state.arguments[name]]
    if changed:
        name = changed[0]
        raise ShardError(
            f"{to} has an unfinished write with {name}={state.arguments[name]!r}, not "
            f"{arguments[name]!r}. Nothing was written. Use the same arguments to complete it, "
            f"or delete {to} and {folder}."
        )
    return state


def save_state(folder: Path, state: WriteState) -> None:
    """Replace the state file."""
    save_json(folder / _STATE, vars(state))


class Progress:
    """Prints ``shuffling  [=====>     ]  12,000 of 60,000 rows  24 MB``, on one line.

    The total is None if it is unknown, and ``out`` is None to print nothing.
    """

    def __init__(self, title: str, total: int | None, out: TextIO | None) -> None:
        self._title = title
        self._total = total
        self._out = out
        self._num_rows = 0
        self._num_bytes = 0
        self._printed_at = 0.0

    def add(self, num_rows: int, num_bytes: int) -> None:
        """Count rows."""
        self._num_rows += num_rows
        self._num_bytes += num_bytes
        if self._out is not None and time.monotonic() - self._printed_at >= _EVERY_S:
            self._print("\r")

    def finish(self) -> None:
        """Print the final state."""
        if self._out is not None:
            self._print("\n")

    def _print(self, end: str) -> None:
        assert self._out is not None
        self._printed_at = time.monotonic()
        rows = f"{self._num_rows:,} rows"
        bar = ""
        if self._total:
            done = min(_WIDTH, _WIDTH * self._num_rows // self._total)
            bar = f"[{'=' * done}{' ' * (_WIDTH - done)}]  "
            rows = f"{self._num_rows:,} of {self._total:,} rows"
        text = f"{self._title}  {bar}{rows}  {self._num_bytes / 1e6:,.0f} MB"
        self._out.write(f"\r{text}{end if end == chr(10) else ''}")
        self._out.flush()
