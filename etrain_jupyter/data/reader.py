"""Read rows of a data set by their numbers: whole blocks, of which some are kept in memory.

::

    take(samples)  -> block in memory?  -> rows
                      no: thread pool   -> disk cache -> place (range, retries, digest) -> decode
    prefetch(samples): the same, ahead of time, as far as memory allows

A block of several record batches is decoded lazily. The first batch of a job needs a few rows of
every block of its window, so ``take`` decodes only the record batches of these rows, and the
threads decode the whole blocks afterwards::

    take 1     ─ fetch all blocks ─ decode some record batches of each ─ rows
    take 2                                                                  ─ wait for block 1 ─ ...
    threads                                                            ─ decode block 1, 2, 3, ...
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from etrain_jupyter.data.columns import Column, View, join_parts, view_of
from etrain_jupyter.data.disk_cache import DiskCache
from etrain_jupyter.data.formats.arrow import batches_of, decode_arrow, first_batch_digest
from etrain_jupyter.data.formats.arrow_messages import InvalidMessageError, Message
from etrain_jupyter.data.formats.json_lines import decode_json_lines
from etrain_jupyter.data.formats.parquet import decode_parquet, read_footer
from etrain_jupyter.data.index import Block, ShardIndex
from etrain_jupyter.data.places import FolderPlace, Place, altered_error
from etrain_jupyter.errors import ShardError
from etrain_jupyter.rules.samples.block_order import BlockLayout, Int64s

_STALE_ROUNDS = 4
"""Read-ahead may replace a block that has not been used for two batches and for this many samples
per block of a window. The order uses all blocks of a window evenly, so such a block belongs to an
old window."""
_MAX_FOOTERS = 64
_PARTS_PER_ROW = 2
"""A block is decoded lazily if it has at least this many record batches per row of its first use.
With fewer, most of it would be decoded twice."""


_Columns = dict[str, Column | pa.ChunkedArray]
"""Rows of each column."""


@dataclass
class _Rows:
    """Decoded rows of a block."""

    table: pa.Table
    views: dict[str, View | None]
    """Columns whose rows can be gathered without Arrow."""

    @classmethod
    def of(cls, table: pa.Table) -> _Rows:
        return cls(table, {name: view_of(table.column(name)) for name in table.column_names})

    def gather(self, rows: Int64s) -> _Columns:
        found: _Columns = {}
        for name, view in self.views.items():
            column = self.table.column(name)
            found[name] = column.take(pa.array(rows)) if view is None else view[rows]
        return found


@dataclass
class _Loaded:
    """A block in memory: its decoded rows, or its bytes until they are decoded."""

    decoded: _Rows | None = None
    data: bytes = b""
    parts: Sequence[Message] = ()
    """Its record batches, if it is not decoded yet."""
    decoding: Future[_Rows] | None = None
    used_at: int = 0
    """Number of samples that were read before its last use."""


class ShardReader:
    """Reads any rows of a set; used from one thread at a time.

    Args:
        index: The set.
        place: Its files.
        cache: Unused for a folder.
        layout: The layout of its blocks.
        columns: None for all.
        num_kept: Maximum number of decoded blocks in memory; each thread may hold one block in
            addition. This is a count, not a size: the order uses all blocks of a window in turn, so
            with fewer blocks, every block would be read for every batch.
        num_threads: Number of threads that read and decode blocks.

    Raises:
        ShardError: If the set lacks a column.
    """

    def __init__(
        self,
        index: ShardIndex,
        place: Place,
        cache: DiskCache,
        layout: BlockLayout,
        *,
        columns: Sequence[str] | None,
        num_kept: int,
        num_threads: int,
    ) -> None:
        self._index = index
        self._place = place
        self._cache = cache
        self._layout = layout
        self._columns = columns
        self._num_kept = num_kept
        self._num_threads = num_threads
        self._schema = pa.ipc.read_schema(pa.py_buffer(index.schema))
        missing = [name for name in columns or () if name not in self._schema.names]
        if missing:
            raise ShardError(
                f"{place} has no column {missing[0]!r}. Its columns are "
                f"{', '.join(map(repr, self._schema.names))}."
            )
        self._loaded: OrderedDict[int, _Loaded] = OrderedDict()
        """Blocks in memory, the least recently used one first."""
        self._loading: dict[int, Future[_Loaded]] = {}
        self._fetching: dict[int, Future[bytes]] = {}
        """Blocks that are being read into the disk cache only."""
        self._num_taken = 0
        self._batches_began_at = deque([0, 0], maxlen=2)
        """``_num_taken`` at the beginning of the last two batches."""
        self._threads: ThreadPoolExecutor | None = None
        self._footer_lock = threading.Lock()
        self._footer = lru_cache(_MAX_FOOTERS)(self._read_footer)
        self._checked: set[int] = set()
        """Files in a folder that are known to be the files that were indexed."""
        self.num_bytes_read = 0
        """Bytes of all blocks that were read from the place."""

    @property
    def schema(self) -> pa.Schema:
        """The columns that are read."""
        if self._columns is None:
            return self._schema
        return pa.schema([self._schema.field(name) for name in self._columns])

    def take(self, samples: Int64s) -> dict[str, Column]:
        """Return rows by their numbers, in that order; see ``columns.columns_of``.

        Raises:
            ShardError: If a block cannot be read, is altered or invalid.
        """
        self._batches_began_at.append(self._num_taken)
        blocks = self._layout.blocks_of(samples)
        _, firsts, number_of = np.unique(blocks, return_index=True, return_inverse=True)
        # In the order of their first use: blocks of an old window come before those of the next
        # one, which replace them.
        by_use = np.argsort(firsts)
        rank = np.empty_like(by_use)
        rank[by_use] = np.arange(len(by_use))
        order = np.argsort(rank[number_of], kind="stable")
        needed = blocks[firsts[by_use]].tolist()
        counts = np.bincount(rank[number_of], minlength=len(needed)).tolist()
        gathered: list[_Columns | Future[_Columns]] = []
        first = 0
        for number, (block, count) in enumerate(zip(needed, counts, strict=True)):
            for ahead in range(number, min(number + self._num_threads, len(needed))):
                self._start(needed[ahead], counts[ahead])
            loaded = self._get(block)
            rows = samples[order[first : first + count]] - self._layout.starts[block]
            gathered.append(self._gather(block, loaded, rows))
            first += count
            self._num_taken += count
        parts = [one.result() if isinstance(one, Future) else one for one in gathered]
        self._decode_in_background()
        # A rank's share of a step is sorted by block, so its rows are usually in order.
        inverse = None
        if not np.array_equal(order, places := np.arange(len(order))):
            inverse = np.empty_like(order)
            inverse[order] = places
        return {
            name: join_parts(name, [part[name] for part in parts], inverse) if parts else []
            for name in self.schema.names
        }

    def read_block(self, block: int) -> pa.Table:
        """Return all rows of a block, without keeping it."""
        return self._decode(block, self._fetch(block))

    def prefetch(self, samples: Int64s) -> None:
        """Start to read the blocks of samples that are needed soon, as far as memory allows."""
        blocks, counts = np.unique(self._layout.blocks_of(samples), return_counts=True)
        for block, count in zip(blocks.tolist(), counts.tolist(), strict=True):
            if block in self._loaded or block in self._loading:
                continue
            if self._is_room():
                self._start(block, count)
            elif self._place.is_remote and block not in self._fetching:
                self._fetching[block] = self._pool().submit(self._fetch, block)

    def close(self) -> None:
        """Stop the threads; blocks in memory are dropped."""
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
            self._threads = None
        self._loaded.clear()
        self._loading.clear()
        self._fetching.clear()

    # --- decoding ---

    def _gather(self, block: int, loaded: _Loaded, rows: Int64s) -> _Columns | Future[_Columns]:
        if loaded.decoded is None and loaded.decoding is not None:
            loaded.decoded = loaded.decoding.result()
            loaded.data, loaded.parts = b"", ()
        if loaded.decoded is not None:
            return loaded.decoded.gather(rows)
        return self._pool().submit(self._gather_from_parts, block, loaded.data, loaded.parts, rows)

    def _gather_from_parts(
        self, block: int, data: bytes, parts: Sequence[Message], rows: Int64s
    ) -> _Columns:
        # Decodes only the record batches of these rows.
        starts = np.cumsum([0, *(part.rows for part in parts)])
        numbers, part_of = np.unique(
            np.searchsorted(starts, rows, side="right") - 1, return_inverse=True
        )
        chosen = [parts[number] for number in numbers.tolist()]
        some = b"".join(data[part.first : part.first + part.size] for part in chosen)
        table = self._decode(block, some, num_rows=sum(part.rows for part in chosen))
        firsts = np.cumsum([0, *(part.rows for part in chosen)])
        return _Rows.of(table).gather(rows - starts[numbers[part_of]] + firsts[part_of])

    def _decode_in_background(self) -> None:
        # Decode only now: before, the threads would compete with the first batch for the
        # processors.
        ahead = [
            (block, future.result())
            for block, future in self._loading.items()
            if future.done() and not future.cancelled() and future.exception() is None
        ]
        for block, loaded in [*self._loaded.items(), *ahead]:
            if loaded.decoded is None and loaded.decoding is None:
                loaded.decoding = self._pool().submit(self._decode_rows, block, loaded.data)

    def _decode_rows(self, block: int, data: bytes) -> _Rows:
        return _Rows.of(self._decode(block, data))

    # --- memory ---

    def _start(self, block: int, num_rows: int) -> None:
        if block not in self._loaded and block not in self._loading:
            self._fetching.pop(block, None)
            self._loading[block] = self._pool().submit(self._load, block, num_rows)

    def _get(self, block: int) -> _Loaded:
        if block not in self._loaded:
            self._loaded[block] = self._loading.pop(block).result()
            while len(self._loaded) > self._num_kept:
                self._loaded.popitem(last=False)
        loaded = self._loaded[block]
        loaded.used_at = self._num_taken
        self._loaded.move_to_end(block)
        return loaded

    def _is_room(self) -> bool:
        # Blocks that are being read count, too. Blocks that were not used for a while may be
        # dropped.
        stale_at = min(
            self._num_taken - _STALE_ROUNDS * self._layout.window, self._batches_began_at[0]
        )
        while len(self._loaded) + len(self._loading) >= self._num_kept:
            if not self._loaded or next(iter(self._loaded.values())).used_at >= stale_at:
                return False
            self._loaded.popitem(last=False)
        return True

    def _pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(
                self._num_threads, thread_name_prefix="etrain-shards"
            )
        return self._threads

    # --- in the threads ---

    def _load(self, block: int, num_rows: int) -> _Loaded:
        data = self._fetch(block)
        if self._index.format in ("etrain", "arrow"):
            try:
                parts = batches_of(data)
            except InvalidMessageError:
                parts = []  # decoding it gives the error
            is_whole = sum(part.rows for part in parts) == self._index.blocks[block].rows
            if is_whole and len(parts) >= _PARTS_PER_ROW * num_rows:
                return _Loaded(data=data, parts=parts)
        return _Loaded(decoded=self._decode_rows(block, data))

    def _fetch(self, number: int) -> bytes:
        block = self._index.blocks[number]
        if not self._place.is_remote:
            return self._read(block)
        file = self._index.files[block.file]
        version = block.sha256 or file.version
        key = f"{self._place}/{file.name}@{version}:{block.first}+{block.size}"
        return self._cache.get(key, block.size, partial(self._read, block))

    def _read(self, block: Block) -> bytes:
        file = self._index.files[block.file]
        self._check_file(block.file)
        self.num_bytes_read += block.size

        def has_digest(data: bytes) -> bool:
            return not block.sha256 or hashlib.sha256(data).hexdigest() == block.sha256

        return self._place.read(
            file.name, block.first, block.size, version=file.version, check=has_digest
        )

    def _check_file(self, number: int) -> None:
        """Raise if a file in a folder is not the one that was indexed; once per file."""
        # Blocks with digests are verified by these, and objects in a bucket by their ETag. An equal
        # time proves that the file was not written to. If the time differs, the file may be a copy
        # on this machine, which has the same content.
        file = self._index.files[number]
        if not file.fingerprint or number in self._checked:
            return
        if not isinstance(self._place, FolderPlace):
            return
        facts = self._place.facts(file.name)
        if facts.size != file.size:
            how = f"it has {facts.size} bytes instead of {file.size}"
            raise altered_error(self._place, file.name, how)
        if facts.version != file.version:
            if self._index.format == "parquet":
                part, digest = "footer", self._footer(number)[1]
            else:
                part, digest = "first record batch", first_batch_digest(self._place, file)
            if digest != file.fingerprint:
                how = f"it was modified after it was indexed, and its {part} has another SHA-256"
                raise altered_error(self._place, file.name, how)
        self._checked.add(number)

    def _decode(self, number: int, data: bytes, num_rows: int | None = None) -> pa.Table:
        """Return the rows of a block, or those of some of its record batches."""
        block = self._index.blocks[number]
        expected = block.rows if num_rows is None else num_rows
        try:
            table = self._table_of(block, data)
            # Otherwise, offsets out of range would read other memory of this process.
            table.validate(full=True)
        except (pa.ArrowException, OSError, LookupError, ValueError, StopIteration) as exc:
            raise ShardError(
                f"{self._describe(block)} cannot be decoded: {str(exc).partition(chr(10))[0]}. "
                f"Nothing was skipped. {self._remedy()}"
            ) from exc
        if table.num_rows != expected:
            raise ShardError(
                f"{self._describe(block)} has {table.num_rows} rows instead of {expected}: the "
                "file was replaced after it was indexed. Its data were not used. Restore it and "
                "resume the job (%etrain resume JOB)."
            )
        # One chunk per column, so that rows are gathered without a search.
        return table.combine_chunks()

    def _table_of(self, block: Block, data: bytes) -> pa.Table:
        columns = self._columns
        if self._index.format == "json":
            return decode_json_lines(data, self.schema, ignores_others=columns is not None)
        if self._index.format == "parquet":
            return decode_parquet(
                data,
                first=block.first,
                size=self._index.files[block.file].size,
                footer=self._footer(block.file)[0],
                columns=columns,
            )
        table = decode_arrow(data, self._schema)
        return table if columns is None else table.select(list(columns))

    def _read_footer(self, file: int) -> tuple[pq.FileMetaData, str]:
        with self._footer_lock:
            return read_footer(self._place, self._index.files[file])

    def _describe(self, block: Block) -> str:
        name = self._index.files[block.file].name
        return f"the block at byte {block.first} of {name} in {self._place}"

    def _remedy(self) -> str:
        if self._index.format == "json":
            return (
                "Its lines must have the keys and types of the first block. Name the keys to read "
                "with Shards(..., columns=[...]), or convert the set with write_shards."
            )
        return "Restore the file, then resume the job (%etrain resume JOB)."
