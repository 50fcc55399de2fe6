"""Shuffle rows that do not fit into memory, in two passes over the local disk.

The first pass appends each row to one of 256 buckets, chosen by a hash of its number. The second
pass loads one bucket, or several small ones, and permutes its rows. The result is a full shuffle of
the whole set: a bounded buffer, as used for streams, would leave rows that are sorted in the source
almost sorted, which the windows of an epoch cannot repair. The shuffle costs one more write and
read of the data. A bucket that is too large is divided again in the same way.

::

    Spill         first pass over a source without an index: one file per bucket, which grow
    write_part    first pass over a range of rows: one file, and the place of each bucket in it
    plan_groups   buckets -> groups that fit into memory, and buckets that are too large
    load_group    second pass

The result depends only on the rows and the seed: not on the ranges, and not on when rows arrived.
The size of a bucket is therefore that of its rows (see ``num_bytes_of``), not that of its file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etrain_jupyter.data.columns import has_offsets, is_list
from etrain_jupyter.rules.samples.ledger import hash_of, key_of

NUM_BUCKETS = 256
GROUP_BYTES = 128 << 20
"""Maximum size of the rows that are permuted in memory."""
FLUSH_BYTES = 64 << 20
"""Size of the rows that are collected before they are appended to the files."""
_OFFSET_BYTES = 4
_UNKNOWN_BYTES = 16
"""Size of a value of a type without a known size, such as a union."""


class Piece(NamedTuple):
    """Record batches in a file."""

    path: str
    first: int
    """Offset of the first byte."""
    end: int


@dataclass(frozen=True, kw_only=True)
class RowBucket:
    """The rows whose numbers have the same hash, in the order of the source."""

    num_rows: int
    num_bytes: int
    """Size of the rows; see ``num_bytes_of``."""
    pieces: tuple[Piece, ...]

    @classmethod
    def joined(cls, parts: Iterable[Self]) -> Self:
        """Return one bucket with the rows of the same bucket of consecutive parts."""
        found = list(parts)
        return cls(
            num_rows=sum(part.num_rows for part in found),
            num_bytes=sum(part.num_bytes for part in found),
            pieces=tuple(piece for part in found for piece in part.pieces),
        )


@dataclass(frozen=True, kw_only=True)
class Group:
    """Rows that are permuted together in memory."""

    pieces: tuple[Piece, ...]
    key: int
    """Key of the permutation."""


@dataclass(frozen=True, kw_only=True)
class LargeBucket:
    """A bucket that does not fit into memory. To plan its groups, write it with ``write_part``."""

    name: str
    """Unique in the set, for its file."""
    pieces: tuple[Piece, ...]
    seed: int
    """Seed of its division and its groups."""


class Spill:
    """First pass over a source that is read once, from its beginning.

    Args:
        folder: Folder of the files.
        seed: Seed of the shuffle.
        sizes: Sizes of the files up to which they are valid; the rest is from a write that was
            interrupted, and is removed. None for new files.
        weights: Number of rows and their size, of each bucket; None for new files.
        num_rows: Number of rows in the files.
    """

    def __init__(
        self,
        folder: Path,
        seed: int,
        sizes: Sequence[int] | None = None,
        weights: Sequence[Sequence[int]] | None = None,
        num_rows: int = 0,
    ) -> None:
        self._folder = folder
        self._seed = seed
        self.sizes = list(sizes) if sizes is not None else [0] * NUM_BUCKETS
        self.weights = [list(pair) for pair in weights or [(0, 0)] * NUM_BUCKETS]
        self.num_rows = num_rows
        self._pending = _Pending()
        folder.mkdir(parents=True, exist_ok=True)
        for bucket, size in enumerate(self.sizes):
            path = self._path(bucket)
            if not size:
                path.unlink(missing_ok=True)
            elif path.stat().st_size > size:
                os.truncate(path, size)

    def add(self, table: pa.Table) -> bool:
        """Add rows; return True if all of them have been written to the files."""
        if not self._pending.add(table):
            return False
        self.flush()
        return True

    def flush(self) -> None:
        """Write all rows to the files."""
        for bucket, table in _divide(self._pending.take(), self.num_rows, self._seed):
            with self._path(bucket).open("ab") as file:
                _write_batches(file, table)
                file.flush()
                self.sizes[bucket] = file.tell()
            self.weights[bucket][0] += len(table)
            self.weights[bucket][1] += num_bytes_of(table)
            self.num_rows += len(table)

    def buckets(self) -> list[RowBucket]:
        """Return the buckets of all rows that have been written."""
        return [
            RowBucket(
                num_rows=num_rows,
                num_bytes=num_bytes,
                pieces=(Piece(str(self._path(number)), 0, size),) if size else (),
            )
            for number, (size, (num_rows, num_bytes)) in enumerate(
                zip(self.sizes, self.weights, strict=True)
            )
        ]

    def _path(self, bucket: int) -> Path:
        return self._folder / f"bucket-{bucket:03}"


def write_part(path: Path, tables: Iterable[pa.Table], *, seed: int, first: int) -> list[RowBucket]:
    """Write consecutive rows of a source, from row ``first`` on, divided into buckets.

    The file appears once it is complete.
    """
    pieces: list[list[Piece]] = [[] for _ in range(NUM_BUCKETS)]
    weights = np.zeros((NUM_BUCKETS, 2), np.int64)
    pending = _Pending()
    # Two processes may write the same part, if one of them was believed to have exited.
    partial = path.with_name(f"{path.name}.{os.urandom(4).hex()}.partial")
    with partial.open("wb") as file:

        def flush() -> int:
            num_rows = 0
            for bucket, table in _divide(pending.take(), first, seed):
                begin = file.tell()
                _write_batches(file, table)
                pieces[bucket].append(Piece(str(path), begin, file.tell()))
                weights[bucket] += len(table), num_bytes_of(table)
                num_rows += len(table)
            return num_rows

        for table in tables:
            if pending.add(table):
                first += flush()
        flush()
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    return [
        RowBucket(num_rows=num_rows, num_bytes=num_bytes, pieces=tuple(found))
        for (num_rows, num_bytes), found in zip(weights.tolist(), pieces, strict=True)
    ]


def plan_groups(
    buckets: Sequence[RowBucket], seed: int, name: str = "large"
) -> Iterator[Group | LargeBucket]:
    """Yield groups of buckets that fit into memory, and the buckets that do not; each row once.

    ``buckets`` are all buckets of a set or of a large bucket, and ``seed`` is its seed. The names
    of large buckets begin with ``name``.
    """
    group: list[int] = []
    for number, bucket in enumerate(buckets):
        if not bucket.num_rows:
            continue
        # A single row cannot be divided.
        if bucket.num_bytes > GROUP_BYTES and bucket.num_rows > 1:
            yield LargeBucket(
                name=f"{name}-{number}", pieces=bucket.pieces, seed=key_of(seed, number)
            )
            continue
        if group and sum(buckets[b].num_bytes for b in group) + bucket.num_bytes > GROUP_BYTES:
            yield _group_of(buckets, group, seed)
            group = []
        group.append(number)
    if group:
        yield _group_of(buckets, group, seed)


def divided_groups(
    buckets: Sequence[RowBucket], seed: int, folder: Path, schema: pa.Schema, name: str = "large"
) -> Iterator[Group]:
    """Yield all groups; a large bucket is divided when its turn comes.

    A group must be loaded before the next one is requested. The file of a large bucket in
    ``folder`` is removed after its last group.
    """
    for found in plan_groups(buckets, seed, name):
        if isinstance(found, Group):
            yield found
            continue
        path = folder / found.name
        inner = write_part(path, read_pieces(found.pieces, schema), seed=found.seed, first=0)
        yield from divided_groups(inner, found.seed, folder, schema, found.name)
        path.unlink()


def load_group(group: Group, schema: pa.Schema) -> pa.Table:
    """Return the rows of a group, shuffled."""
    batches = [batch for table in read_pieces(group.pieces, schema) for batch in table.to_batches()]
    table = pa.Table.from_batches(batches, schema).combine_chunks()
    numbers = np.arange(len(table), dtype=np.uint64)
    return table.take(pa.array(np.argsort(hash_of(numbers, group.key), kind="stable")))


def read_pieces(pieces: Iterable[Piece], schema: pa.Schema) -> Iterator[pa.Table]:
    """Yield the rows of pieces from mapped files, so that a file of any size needs no memory."""
    for path, first, end in pieces:
        with pa.memory_map(path) as source:
            source.seek(first)
            while source.tell() < end:
                message = pa.ipc.read_message(source)
                yield pa.Table.from_batches([pa.ipc.read_record_batch(message, schema)])


class _Pending:
    """Rows that are collected in memory."""

    def __init__(self) -> None:
        self._tables: list[pa.Table] = []
        self._num_bytes = 0

    def add(self, table: pa.Table) -> bool:
        """Add rows; return True if they should be written."""
        self._tables.append(table)
        self._num_bytes += table.nbytes
        return self._num_bytes >= FLUSH_BYTES

    def take(self) -> list[pa.Table]:
        """Remove and return all rows."""
        tables, self._tables, self._num_bytes = self._tables, [], 0
        return tables


def _divide(tables: Sequence[pa.Table], first: int, seed: int) -> Iterator[tuple[int, pa.Table]]:
    """Yield the rows of each bucket that has any; ``first`` is the number of the first row."""
    if not tables:
        return
    table = pa.concat_tables(tables).combine_chunks()
    numbers = np.arange(first, first + len(table), dtype=np.uint64)
    buckets = hash_of(numbers, key_of(seed, 0)) % np.uint64(NUM_BUCKETS)
    order = np.argsort(buckets, kind="stable")
    ends = np.searchsorted(buckets[order], np.arange(NUM_BUCKETS, dtype=np.uint64), "right")
    begin = 0
    for bucket, end in enumerate(ends.tolist()):
        if end > begin:
            yield bucket, table.take(pa.array(order[begin:end]))
        begin = end


def _write_batches(file: BinaryIO, table: pa.Table) -> None:
    for batch in table.combine_chunks().to_batches():
        file.write(batch.serialize())


def _group_of(buckets: Sequence[RowBucket], numbers: Sequence[int], seed: int) -> Group:
    pieces = RowBucket.joined(buckets[number] for number in numbers).pieces
    return Group(pieces=pieces, key=key_of(seed, numbers[0] + 1))


def num_bytes_of(table: pa.Table) -> int:
    """Return the size of the rows of a table, which is the sum of the sizes of its rows.

    It is close to the memory that they use, and depends only on the values, not on the chunks.
    ``Table.nbytes`` does not add up: it rounds validity bitmaps and counts one more offset per
    array, so the same rows have another size if they are divided differently.
    """
    return sum(_size_of(chunk) for column in table.columns for chunk in column.chunks)


def _size_of(array: pa.Array) -> int:
    if isinstance(array, pa.ExtensionArray):
        return _size_of(array.storage)
    kind = array.type
    if pa.types.is_boolean(kind):
        return len(array)
    if pa.types.is_null(kind):
        return 0
    if has_offsets(kind):
        total: int | None = pc.sum(pc.binary_length(array)).as_py()
        return _OFFSET_BYTES * len(array) + (total or 0)
    if is_list(kind):
        return _OFFSET_BYTES * len(array) + _size_of(array.flatten())
    if pa.types.is_struct(kind):
        return sum(map(_size_of, array.flatten()))
    if pa.types.is_map(kind):
        # Unlike those of a list, the entries of a slice must be cut out.
        first, end = array.offsets[0].as_py(), array.offsets[len(array)].as_py()
        inner = (part.slice(first, end - first) for part in (array.keys, array.items))
        return _OFFSET_BYTES * len(array) + sum(map(_size_of, inner))
    try:
        return int(kind.bit_width) // 8 * len(array)
    except ValueError:
        return _UNKNOWN_BYTES * len(array)
