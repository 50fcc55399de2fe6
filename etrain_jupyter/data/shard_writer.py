"""Writer behind ``write_shards``.

::

    source -> gather: shuffle files on the local disk (see ``spill``)
           -> write: blocks of about 8 MiB, 16 of them per file, zstd -> manifest

Progress is kept in a state file next to the shuffle files: after every 64 MiB of the source, and
after every file. A write that was killed continues from there. With workers, both steps consist of
tasks whose results are files; see ``parallel_writer``.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from etrain_jupyter.data.formats.own import MANIFEST, PROGRESS, manifest_of
from etrain_jupyter.data.index import Block, ShardFile, ShardIndex
from etrain_jupyter.data.parallel_writer import ParallelWriter, plan_files, plan_ranges
from etrain_jupyter.data.parts import TOKEN, SharedWrite
from etrain_jupyter.data.places import NoPlaceError, Place, open_place
from etrain_jupyter.data.schemas import conform, plain
from etrain_jupyter.data.shard_files import (
    BLOCKS_PER_FILE,
    FILL,
    cut_blocks,
    name_of,
    write_blocks,
)
from etrain_jupyter.data.sources import Source, source_of
from etrain_jupyter.data.spill import Spill, divided_groups, load_group
from etrain_jupyter.data.workers import OpenWorkers, Workers, open_local_workers
from etrain_jupyter.data.write_state import (
    Progress,
    folder_for,
    load_state,
    locked,
    save_state,
)
from etrain_jupyter.errors import ShardError


def write_set(
    source: Any,
    to: str,
    *,
    columns: Sequence[str] | None,
    seed: int | None,
    block_bytes: int,
    exist_ok: bool,
    spill_dir: str | None,
    progress: bool,
    open_workers: OpenWorkers | None,
) -> None:
    """Write a set like ``write_shards``; ``seed`` is None to keep the order of the source."""
    place = open_place(to)
    if _is_complete(place, exist_ok=exist_ok):
        return
    folder = folder_for(to, place, spill_dir)
    with locked(folder, to):
        rows = source_of(source, columns)
        arguments = {
            "columns": list(columns) if columns is not None else None,
            "seed": seed,
            "block_bytes": block_bytes,
            "num_rows": rows.num_rows,
        }
        writer = _SetWriter(place, to, folder, rows, arguments, progress=progress)
        writer.run(open_workers)
        shutil.rmtree(folder)


def _is_complete(place: Place, *, exist_ok: bool) -> bool:
    try:
        listed = place.list()
    except NoPlaceError:
        return False
    if MANIFEST in listed:
        if exist_ok:
            return True
        raise ShardError(
            f"{place} already has a complete set. Nothing was written. Use it with "
            f"Shards({str(place)!r}), add exist_ok=True, or choose another folder."
        )
    others = [name for name in listed if not name.startswith(".writing/")]
    if others and PROGRESS not in listed:
        raise ShardError(
            f"{place} is not empty: it has {others[0]!r}. Nothing was written. Choose a new folder."
        )
    return False


class _SetWriter:
    def __init__(
        self,
        place: Place,
        to: str,
        folder: Path,
        source: Source,
        arguments: dict[str, Any],
        *,
        progress: bool,
    ) -> None:
        self._place = place
        self._to = to
        self._folder = folder
        self._source = source
        self._block_bytes = int(arguments["block_bytes"])
        self._seed: int | None = arguments["seed"]
        self._out = sys.stderr if progress else None
        self._state = load_state(folder, to, arguments)
        self._last_rows: tuple[int, pa.Table] | None = None
        """The rows that were read last, after the number of the first one."""

    def run(self, open_workers: OpenWorkers | None) -> None:
        """Write everything that is missing, with workers or in this process.

        Raises:
            ShardError: If the source has no rows, or something cannot be written.
        """
        # A write that workers have begun has parts that only tasks can read.
        if open_workers is None and (self._state.ranges or self._state.num_blocks):
            open_workers = partial(open_local_workers, 1)
        with open_workers() if open_workers is not None else contextlib.nullcontext() as workers:
            self._write(workers)
        if not self._state.files:
            raise ShardError("the source has no rows. Nothing was written.")
        index = self._index()
        about = {"shuffle_seed": self._seed}
        if not self._place.create(MANIFEST, manifest_of(index, about)):
            raise ShardError(f"another process has completed the set in {self._to} meanwhile.")
        self._place.delete(PROGRESS)

    def _write(self, workers: Workers | None) -> None:
        state, source = self._state, self._source
        # Other sources can only be read once, from the beginning, so ``_tables`` checks their row.
        if state.known_row and source.num_rows is not None:
            number = state.known_row[0]
            table = next(source.tables(number, number + 1, state.arrow_schema()))
            self._check_row(number, conform(table, state.arrow_schema()))
        try:
            self._place.create(PROGRESS, json.dumps(self._state.arguments).encode())
            if self._seed is None:
                self._write_in_order()
            elif workers is None:
                self._write_groups(self._gather(self._seed), self._seed)
            else:
                self._write_in_parallel(workers, self._seed)
        except OSError as exc:
            raise ShardError(
                f"the shards cannot be written to {self._to}: {exc}. The rows so far are kept. "
                "Make room and run write_shards again with the same arguments, or give spill_dir= "
                "another disk."
            ) from exc

    # --- first pass ---

    def _gather(self, seed: int) -> Spill:
        state = self._state
        sizes, weights = state.sizes or None, state.weights or None
        spill = Spill(self._folder, seed, sizes, weights, state.num_gathered)
        if state.is_gathered:
            return spill
        progress = Progress("shuffling", self._source.num_rows, self._out)
        progress.add(state.num_gathered, 0)
        for table in self._tables(state.num_gathered):
            progress.add(len(table), table.nbytes)
            if spill.add(table):
                self._keep_gathered(spill)
        spill.flush()
        state.is_gathered = True
        self._keep_gathered(spill)
        progress.finish()
        return spill

    def _keep_gathered(self, spill: Spill) -> None:
        state = self._state
        state.sizes, state.weights, state.num_gathered = spill.sizes, spill.weights, spill.num_rows
        self._save_state()

    def _tables(self, first: int) -> Iterator[pa.Table]:
        """Yield all rows from a number on, with the schema of the first ones."""
        schema = self._state.arrow_schema() if self._state.schema else None
        repeats_row = bool(first and self._state.known_row) and self._source.num_rows is None
        first -= repeats_row
        for source_table in self._source.tables(first, None, schema):
            table = conform(source_table, self._schema_of(source_table))
            if repeats_row:
                self._check_row(first, table)
                table, first, repeats_row = table.slice(1), first + 1, False
            self._last_rows = first, table
            first += len(table)
            yield table

    def _check_row(self, number: int, table: pa.Table) -> None:
        """Raise if the first row of a table is not the known one."""
        if _digest_of(table, 0) != self._state.known_row[1]:
            raise ShardError(
                f"row {number} of the source has changed since {self._to} was begun. Nothing more "
                "was written, because the set would mix rows of two sources. Restore the source "
                f"to complete the set, or delete {self._to} and {self._folder} to begin again."
            )

    def _schema_of(self, table: pa.Table) -> pa.Schema:
        """Return the schema of the set, given its first rows."""
        state = self._state
        if not state.schema:
            state.schema = base64.b64encode(plain(table).schema.serialize()).decode()
        return state.arrow_schema()

    # --- second pass ---

    def _write_groups(self, spill: Spill, seed: int) -> None:
        state = self._state
        if not spill.num_rows:
            return
        progress = Progress("writing", spill.num_rows, self._out)
        progress.add(state.num_written, 0)
        first_group, first_block = state.group, state.block
        pending: list[pa.Table] = []
        schema = state.arrow_schema()
        groups = divided_groups(spill.buckets(), seed, self._folder, schema)
        for number, group in enumerate(groups):
            if number < first_group:
                continue
            blocks = cut_blocks(load_group(group, schema), self._block_bytes)
            for block_number, block in enumerate(blocks):
                if number == first_group and block_number < first_block:
                    continue
                pending.append(block)
                if len(pending) == BLOCKS_PER_FILE:
                    state.group, state.block = number, block_number + 1
                    self._write_file(pending, progress)
                    pending = []
        if pending:
            state.group, state.block = number, len(blocks)
            self._write_file(pending, progress)
        progress.finish()

    def _write_in_order(self) -> None:
        progress = Progress("writing", self._source.num_rows, self._out)
        progress.add(self._state.num_written, 0)
        wanted = BLOCKS_PER_FILE * self._block_bytes * FILL
        pending: list[pa.Table] = []
        for table in self._tables(self._state.num_written):
            pending.append(table)
            if sum(table.nbytes for table in pending) >= wanted:
                self._write_file(cut_blocks(pa.concat_tables(pending), self._block_bytes), progress)
                pending = []
        if any(map(len, pending)):
            self._write_file(cut_blocks(pa.concat_tables(pending), self._block_bytes), progress)
        progress.finish()

    def _write_file(self, blocks: Sequence[pa.Table], progress: Progress) -> None:
        name = name_of(len(self._state.files))
        path = self._folder / "file"
        entries = write_blocks(path, blocks, self._state.arrow_schema())
        self._place.write(name, path)
        self._state.files.append([name, path.stat().st_size, entries])
        self._save_state()
        progress.add(sum(map(len, blocks)), sum(block.nbytes for block in blocks))

    # --- both passes with workers ---

    def _write_in_parallel(self, workers: Workers, seed: int) -> None:
        state = self._state
        is_split = self._plan_ranges(workers)
        # Without an index, the rows can only be read here, one after the other.
        buckets = [] if is_split else self._gather(seed).buckets()
        if not state.schema:
            return  # the source is empty
        write = SharedWrite(
            to=self._to,
            folder=str(self._folder),
            token=os.urandom(16).hex(),
            seed=seed,
            block_bytes=self._block_bytes,
            schema=base64.b64decode(state.schema),
        )
        write.path(TOKEN).write_text(write.token)
        writer = ParallelWriter(write=write, workers=workers, out=self._out)
        if is_split:
            buckets = writer.gather(self._source, [(first, end) for first, end in state.ranges])
        num_rows = sum(bucket.num_rows for bucket in buckets)
        groups = writer.plan_groups(buckets)
        if not state.num_blocks:
            state.num_blocks = writer.count_blocks(groups, num_rows)
            self._save_state()
        state.files = writer.write_files(
            plan_files(groups, state.num_blocks), state.files, num_rows
        )
        # Files that a worker had begun when it exited.
        for name in self._place.list():
            if name.startswith(".part-") and name.endswith(".partial"):
                self._place.delete(name)

    def _plan_ranges(self, workers: Workers) -> bool:
        """Return whether workers gather the rows; plan their ranges if it has not been done."""
        state, source = self._state, self._source
        if state.ranges:
            return True
        if not source.is_described or not source.num_rows or state.num_gathered:
            return False
        head = next(source.tables(0, None, None))
        self._last_rows = 0, conform(head, self._schema_of(head)).slice(0, 1)
        row_bytes = head.nbytes / max(1, len(head))
        state.ranges = [
            list(bounds) for bounds in plan_ranges(source.num_rows, row_bytes, workers.num_workers)
        ]
        self._save_state()
        return True

    # --- result ---

    def _index(self) -> ShardIndex:
        state = self._state
        return ShardIndex(
            format="etrain",
            schema=base64.b64decode(state.schema),
            files=tuple(ShardFile(name, size, "") for name, size, _ in state.files),
            blocks=tuple(
                Block(number, *entry)
                for number, (_, _, entries) in enumerate(state.files)
                for entry in entries
            ),
            sample=self._source.sample,
        )

    # --- state ---

    def _save_state(self) -> None:
        # While rows are read, the state is saved each time all rows read so far are stored.
        if self._last_rows is not None and len(self._last_rows[1]):
            first, table = self._last_rows
            self._state.known_row = [first + len(table) - 1, _digest_of(table, len(table) - 1)]
            self._last_rows = None
        save_state(self._folder, self._state)


def _digest_of(table: pa.Table, row: int) -> str:
    return hashlib.sha256(repr(table.slice(row, 1).to_pylist()).encode()).hexdigest()
