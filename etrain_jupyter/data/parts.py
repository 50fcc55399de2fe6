"""Tasks of a set that is written by several workers; each has one result, in the shared folder.

::

    <folder>/token               proves that a worker has the same folder
    <folder>/source              the source, pickled; its digest comes with each task
    <folder>/rows-00003          rows of one range, divided into buckets (see ``spill``)
    <folder>/rows-00003.json     the place of each bucket in it; exists once the file is complete
    <folder>/large-17, .json     a bucket that was too large, divided again
    <folder>/written-00012.json  name, size and blocks of a file that is in its place

A task may be repeated, even at the same time. It then replaces a file with an equal one, or finds
its result and does nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import platform
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from etrain_jupyter.data.formats.own import PROGRESS
from etrain_jupyter.data.places import open_place
from etrain_jupyter.data.schemas import conform
from etrain_jupyter.data.shard_files import cut_blocks, name_of, write_blocks
from etrain_jupyter.data.sources import Tables
from etrain_jupyter.data.spill import (
    Group,
    LargeBucket,
    Piece,
    RowBucket,
    load_group,
    read_pieces,
    write_part,
)
from etrain_jupyter.errors import ShardError

TOKEN = "token"
SOURCE = "source"

_opened = threading.local()
"""The source that this thread opened last; not shared, so it need not be thread-safe."""


@dataclass(frozen=True, kw_only=True)
class SharedWrite:
    """Everything that all tasks of a write need."""

    to: str
    folder: str
    token: str
    """Content of the file ``token``, random."""
    seed: int
    block_bytes: int
    schema: bytes
    """Arrow schema of the rows."""

    @cached_property
    def arrow_schema(self) -> pa.Schema:
        """The schema."""
        return pa.ipc.read_schema(pa.py_buffer(self.schema))

    def path(self, name: str) -> Path:
        """Return the path of a file in the shared folder."""
        return Path(self.folder) / name


@dataclass(frozen=True, kw_only=True)
class PlannedFile:
    """A file of the set."""

    number: int
    runs: tuple[tuple[Group, int, int], ...]
    """Groups, and the first block and the end of those that are in this file."""


def part_name(number: int) -> str:
    """Return the name of the file with a range of rows."""
    return f"rows-{number:05}"


# ------------------------------------------------------------------------------------------- tasks


def gather(write: SharedWrite, digest: str, number: int, first: int, end: int) -> list[RowBucket]:
    """Divide rows of the source, whose pickle has this SHA-256, into buckets, and return them.

    Raises:
        ShardError: If a row cannot be read or stored.
    """

    def rows() -> Iterator[pa.Table]:
        for table in _open_source(write, digest)(first, end, write.arrow_schema):
            yield conform(table, write.arrow_schema)

    return _divided(write, part_name(number), rows(), seed=write.seed, first=first)


def divide(write: SharedWrite, large: LargeBucket) -> list[RowBucket]:
    """Divide a bucket that does not fit into memory."""
    rows = read_pieces(large.pieces, write.arrow_schema)
    return _divided(write, large.name, rows, seed=large.seed, first=0)


def _divided(
    write: SharedWrite, name: str, rows: Iterator[pa.Table], *, seed: int, first: int
) -> list[RowBucket]:
    _check_folder(write)
    if (found := read_buckets(write, name)) is not None:
        return found
    buckets = write_part(write.path(name), rows, seed=seed, first=first)
    content = [[b.num_rows, b.num_bytes, [piece[1:] for piece in b.pieces]] for b in buckets]
    save_json(write.path(f"{name}.json"), content)
    return buckets


def count_blocks(write: SharedWrite, group: Group) -> tuple[int, int]:
    """Return the number of rows and of blocks of a group."""
    _check_folder(write)
    table = load_group(group, write.arrow_schema)
    return len(table), len(cut_blocks(table, write.block_bytes))


def write_files(write: SharedWrite, files: Sequence[PlannedFile]) -> None:
    """Write consecutive files of the set, except those that are written."""
    _check_folder(write)
    loaded: tuple[Group, list[pa.Table]] | None = None
    for file in files:
        if read_written(write, file.number) is not None:
            continue
        blocks: list[pa.Table] = []
        for group, first, end in file.runs:
            if loaded is None or loaded[0] != group:
                loaded = None  # before the next one needs the memory
                table = load_group(group, write.arrow_schema)
                loaded = group, cut_blocks(table, write.block_bytes)
            blocks += loaded[1][first:end]
        _write_file(write, file.number, blocks)


def _write_file(write: SharedWrite, number: int, blocks: Sequence[pa.Table]) -> None:
    name = name_of(number)
    path = write.path(f"{name}.{os.urandom(4).hex()}.partial")
    entries = write_blocks(path, blocks, write.arrow_schema)
    open_place(write.to).write(name, path)
    save_json(write.path(f"written-{number:05}.json"), [name, path.stat().st_size, entries])
    path.unlink()


# ----------------------------------------------------------------------------------------- results


def read_buckets(write: SharedWrite, name: str) -> list[RowBucket] | None:
    """Return the buckets in a file that ``write_part`` has written; None if it is not complete."""
    content = _load_json(write.path(f"{name}.json"))
    if content is None:
        return None
    path = str(write.path(name))
    return [
        RowBucket(
            num_rows=num_rows,
            num_bytes=num_bytes,
            pieces=tuple(Piece(path, first, end) for first, end in pieces),
        )
        for num_rows, num_bytes, pieces in content
    ]


def read_written(write: SharedWrite, number: int) -> list[Any] | None:
    """Return name, size and blocks of a file of the set; None if it is not written."""
    found: list[Any] | None = _load_json(write.path(f"written-{number:05}.json"))
    return found


def save_json(path: Path, content: Any) -> None:
    """Create or replace a file atomically."""
    partial = path.with_name(f"{path.name}.{os.urandom(4).hex()}.partial")
    with partial.open("w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _load_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None


# ------------------------------------------------------------------------------------------ checks


def _check_folder(write: SharedWrite) -> None:
    try:
        is_same = write.path(TOKEN).read_text() == write.token
    except OSError:
        is_same = False
    place = open_place(write.to)
    if is_same and (place.is_remote or (Path(write.to) / PROGRESS).exists()):
        return
    missing = write.to if is_same else write.folder
    raise ShardError(
        f"{missing} of the notebook's machine is not there on {platform.node()}, where a worker "
        "runs. Nothing more was written. Give a target and a spill_dir that all workers share "
        "under the same path, or use workers=N for processes on this machine."
    )


def _open_source(write: SharedWrite, digest: str) -> Tables:
    if getattr(_opened, "digest", None) != digest:
        data = write.path(SOURCE).read_bytes()
        # Others may be able to write to a shared folder, and a pickle can run code.
        if hashlib.sha256(data).hexdigest() != digest:
            raise ShardError(
                f"{write.path(SOURCE)} is not the file that this write created. It was not used. "
                "Run write_shards again with the same arguments."
            )
        try:
            _opened.tables = pickle.loads(data)
        except Exception as exc:  # code of the user's classes, in which anything can fail
            raise ShardError(
                f"the source cannot be opened on {platform.node()}: {type(exc).__name__}: {exc}. "
                "Its code and its files must be there. Install the missing packages, or use "
                "workers=N for processes on this machine."
            ) from exc
        _opened.digest = digest
    tables: Tables = _opened.tables
    return tables
