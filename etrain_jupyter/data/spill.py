"""Shuffle rows that do not fit into memory, in two passes over the local disk.

The first pass appends each row to one of 256 files, chosen by a hash of its number. The second pass
loads one file, or several small ones, and permutes its rows. The result is a full shuffle of the
whole set: a bounded buffer, as used for streams, would leave rows that are sorted in the source
almost sorted, which the windows of an epoch cannot repair. It costs one more write and read of the
data. A file that is too large is divided again in the same way.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from etrain_jupyter.rules.samples.ledger import hash_of, key_of

NUM_BUCKETS = 256
GROUP_BYTES = 128 << 20
"""Maximum size of the rows that are permuted in memory."""
FLUSH_BYTES = 64 << 20
"""Size of the rows that are collected before they are appended to the files."""


class Spill:
    """The files of one pass.

    Args:
        folder: Their folder.
        seed: Seed of the shuffle.
        sizes: Sizes of the files up to which they are valid; the rest is from a write that was
            interrupted, and is removed. None for new files.
        num_rows: Number of rows in them.
    """

    def __init__(
        self, folder: Path, seed: int, sizes: Sequence[int] | None = None, num_rows: int = 0
    ) -> None:
        self._folder = folder
        self._seed = seed
        self.sizes = list(sizes) if sizes is not None else [0] * NUM_BUCKETS
        self.num_rows = num_rows
        self._pending: list[pa.Table] = []
        folder.mkdir(parents=True, exist_ok=True)
        for bucket, size in enumerate(self.sizes):
            path = self._path(bucket)
            if not size:
                path.unlink(missing_ok=True)
            elif path.stat().st_size > size:
                os.truncate(path, size)

    def add(self, table: pa.Table) -> bool:
        """Add rows; return True if all of them have been written to the files."""
        self._pending.append(table)
        if sum(pending.nbytes for pending in self._pending) < FLUSH_BYTES:
            return False
        self.flush()
        return True

    def flush(self) -> None:
        """Write all rows to the files, and sync them."""
        if not self._pending:
            return
        table = pa.concat_tables(self._pending).combine_chunks()
        self._pending = []
        numbers = np.arange(self.num_rows, self.num_rows + len(table), dtype=np.uint64)
        buckets = hash_of(numbers, key_of(self._seed, 0)) % np.uint64(NUM_BUCKETS)
        order = np.argsort(buckets, kind="stable")
        ends = np.searchsorted(buckets[order], np.arange(NUM_BUCKETS, dtype=np.uint64), "right")
        first = 0
        for bucket, end in enumerate(ends.tolist()):
            if end > first:
                self._append(bucket, table.take(pa.array(order[first:end])))
            first = end
        self.num_rows += len(table)

    def groups(self, schema: pa.Schema) -> Iterator[Callable[[], pa.Table]]:
        """Yield functions that each return some of the shuffled rows; all of them, each row once.

        The groups and their rows depend only on the rows and the seed.
        """
        group: list[int] = []
        for bucket, size in enumerate(self.sizes):
            if size > GROUP_BYTES:
                yield from self._divided(bucket, schema)
                continue
            if sum(self.sizes[b] for b in group) + size > GROUP_BYTES:
                yield self._loader(group, schema)
                group = []
            group.append(bucket)
        if group:
            yield self._loader(group, schema)

    def _divided(self, bucket: int, schema: pa.Schema) -> Iterator[Callable[[], pa.Table]]:
        folder = self._folder / f"divided-{bucket}"
        shutil.rmtree(folder, ignore_errors=True)
        spill = Spill(folder, key_of(self._seed, bucket))
        for table in self._batches(bucket, schema):
            spill.add(table)
        spill.flush()
        yield from spill.groups(schema)
        shutil.rmtree(folder)

    def _loader(self, buckets: Sequence[int], schema: pa.Schema) -> Callable[[], pa.Table]:
        chosen = [bucket for bucket in buckets if self.sizes[bucket]]

        def load() -> pa.Table:
            tables = [table for bucket in chosen for table in self._batches(bucket, schema)]
            table = pa.Table.from_batches(
                [batch for table in tables for batch in table.to_batches()], schema
            ).combine_chunks()
            numbers = np.arange(len(table), dtype=np.uint64)
            key = key_of(self._seed, chosen[0] + 1 if chosen else 0)
            return table.take(pa.array(np.argsort(hash_of(numbers, key), kind="stable")))

        return load

    def _batches(self, bucket: int, schema: pa.Schema) -> Iterable[pa.Table]:
        if not self.sizes[bucket]:
            return
        # Mapped, so that a file of any size needs no memory of its own.
        with pa.memory_map(str(self._path(bucket))) as source:
            while source.tell() < self.sizes[bucket]:
                message = pa.ipc.read_message(source)
                yield pa.Table.from_batches([pa.ipc.read_record_batch(message, schema)])

    def _append(self, bucket: int, table: pa.Table) -> None:
        with self._path(bucket).open("ab") as file:
            for batch in table.combine_chunks().to_batches():
                file.write(batch.serialize())
            file.flush()
            self.sizes[bucket] = file.tell()

    def _path(self, bucket: int) -> Path:
        return self._folder / f"bucket-{bucket:03}"
