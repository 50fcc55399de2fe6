"""Writer behind ``write_shards``.

::

    source -> gather: shuffle files on the local disk (see ``spill``)
           -> write: blocks of about 8 MiB, 16 of them per file, zstd -> manifest

Progress is kept in a state file next to the shuffle files: after every 64 MiB of the source, and
after every file. A write that was killed continues from there.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from etrain_jupyter.data.disk_cache import default_folder, make_private
from etrain_jupyter.data.formats.arrow_messages import walk_messages
from etrain_jupyter.data.formats.own import MANIFEST, PROGRESS, manifest_of
from etrain_jupyter.data.index import Block, ShardFile, ShardIndex
from etrain_jupyter.data.places import NoPlaceError, Place, open_place
from etrain_jupyter.data.progress import Progress
from etrain_jupyter.data.sources import Source, source_of
from etrain_jupyter.data.spill import Spill
from etrain_jupyter.errors import ShardError

BLOCKS_PER_FILE = 16
_FILL = 15 / 16
"""Share of the block size that an average block fills: rows of different sizes make some blocks
larger, and a window of blocks must fit into its memory."""
_PART_BYTES = 512 << 10
"""Target size of a record batch in memory, the unit of decoding."""
_STATE = "state.json"


@dataclass(kw_only=True)
class _State:
    """Progress of a write."""

    arguments: dict[str, Any]
    """Arguments that must not change when the write continues."""
    schema: str = ""
    """Arrow schema, base64; empty before the first rows."""
    sizes: list[int] = field(default_factory=list)
    """Valid size of each shuffle file."""
    num_gathered: int = 0
    """Rows in the shuffle files."""
    is_gathered: bool = False
    group: int = 0
    """The group of rows of which the next block is written."""
    block: int = 0
    """Number of the next block within that group."""
    files: list[list[Any]] = field(default_factory=list)
    """Name and size of each written file, and its blocks."""

    def arrow_schema(self) -> pa.Schema:
        return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(self.schema)))

    @property
    def num_written(self) -> int:
        return sum(block[2] for _, _, blocks in self.files for block in blocks)


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
) -> None:
    """Write a set, see ``write_shards``; ``seed`` is None to keep the order of the source."""
    place = open_place(to)
    if _is_complete(place, exist_ok=exist_ok):
        return
    folder = _folder_for(to, place, spill_dir)
    with _locked(folder, to):
        rows = source_of(source, columns)
        arguments = {
            "columns": list(columns) if columns is not None else None,
            "seed": seed,
            "block_bytes": block_bytes,
            "num_rows": rows.num_rows,
        }
        writer = _SetWriter(place, to, folder, rows, arguments, progress=progress)
        writer.run()
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


def _folder_for(to: str, place: Place, spill_dir: str | None) -> Path:
    key = hashlib.sha256(to.encode()).hexdigest()[:16]
    if spill_dir is not None:
        folder = Path(spill_dir).expanduser() / f"write-{key}"
    elif place.is_remote:
        make_private(default_folder())
        folder = default_folder() / f"write-{key}"
    else:
        folder = Path(to) / ".writing"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def _locked(folder: Path, to: str) -> Iterator[None]:
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise ShardError(
                f"another process is writing to {to}. Nothing was written. Wait for it, or choose "
                "another folder."
            ) from exc
        yield


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
        self._state = self._load_state(arguments)

    def run(self) -> None:
        """Write everything that is missing.

        Raises:
            ShardError: If the source has no rows, or something cannot be written.
        """
        try:
            self._place.create(PROGRESS, json.dumps(self._state.arguments).encode())
            if self._seed is None:
                self._write_in_order()
            else:
                spill = self._gather(self._seed)
                self._write_groups(spill)
        except OSError as exc:
            raise ShardError(
                f"the shards cannot be written to {self._to}: {exc}. The rows so far are kept. "
                "Make room and run write_shards again with the same arguments, or give spill_dir= "
                "another disk."
            ) from exc
        if not self._state.files:
            raise ShardError("the source has no rows. Nothing was written.")
        index = self._index()
        about = {"shuffle_seed": self._seed}
        if not self._place.create(MANIFEST, manifest_of(index, about)):
            raise ShardError(f"another process has completed the set in {self._to} meanwhile.")
        self._place.delete(PROGRESS)

    # --- first pass ---

    def _gather(self, seed: int) -> Spill:
        state = self._state
        spill = Spill(self._folder, seed, state.sizes or None, state.num_gathered)
        if state.is_gathered:
            return spill
        progress = Progress("shuffling", self._source.num_rows, self._out)
        progress.add(state.num_gathered, 0)
        for table in self._source.tables(state.num_gathered):
            table = self._checked(table)
            progress.add(len(table), table.nbytes)
            if spill.add(table):
                self._keep_gathered(spill)
        spill.flush()
        state.is_gathered = True
        self._keep_gathered(spill)
        progress.finish()
        return spill

    def _keep_gathered(self, spill: Spill) -> None:
        self._state.sizes, self._state.num_gathered = spill.sizes, spill.num_rows
        self._save_state()

    def _checked(self, table: pa.Table) -> pa.Table:
        # All rows have the schema of the first ones; metadata, such as that of pandas, is dropped.
        state = self._state
        table = table.replace_schema_metadata(None)
        if any(pa.types.is_dictionary(kind) for kind in table.schema.types):
            table = table.cast(_without_dictionaries(table.schema))
        if not state.schema:
            state.schema = base64.b64encode(table.schema.serialize()).decode()
        schema = state.arrow_schema()
        if table.schema.equals(schema):
            return table
        try:
            return table.select(schema.names).cast(schema)
        except (pa.ArrowException, ValueError, KeyError) as exc:
            raise ShardError(
                f"a part of the source has other columns or types than its first rows: "
                f"{str(exc).partition(chr(10))[0]}. First: {_described(schema)}. Then: "
                f"{_described(table.schema)}. Give all rows the same columns and types."
            ) from exc

    # --- second pass ---

    def _write_groups(self, spill: Spill) -> None:
        state = self._state
        if not spill.num_rows:
            return
        progress = Progress("writing", spill.num_rows, self._out)
        progress.add(state.num_written, 0)
        first_group, first_block = state.group, state.block
        pending: list[pa.Table] = []
        for group, load in enumerate(spill.groups(state.arrow_schema())):
            if group < first_group:
                continue
            blocks = self._cut(load())
            for number, block in enumerate(blocks):
                if group == first_group and number < first_block:
                    continue
                pending.append(block)
                if len(pending) == BLOCKS_PER_FILE:
                    state.group, state.block = group, number + 1
                    self._write_file(pending, progress)
                    pending = []
        if pending:
            state.group, state.block = group, len(blocks)
            self._write_file(pending, progress)
        progress.finish()

    def _write_in_order(self) -> None:
        progress = Progress("writing", self._source.num_rows, self._out)
        progress.add(self._state.num_written, 0)
        wanted = BLOCKS_PER_FILE * self._block_bytes * _FILL
        pending: list[pa.Table] = []
        for table in self._source.tables(self._state.num_written):
            pending.append(self._checked(table))
            if sum(table.nbytes for table in pending) >= wanted:
                self._write_file(self._cut(pa.concat_tables(pending)), progress)
                pending = []
        if any(map(len, pending)):
            self._write_file(self._cut(pa.concat_tables(pending)), progress)
        progress.finish()

    def _cut(self, table: pa.Table) -> list[pa.Table]:
        return _cut(table, int(max(1, self._block_bytes * _FILL)))

    def _write_file(self, blocks: Sequence[pa.Table], progress: Progress) -> None:
        name = f"part-{len(self._state.files):05}.arrow"
        path = self._folder / "file"
        schema = self._state.arrow_schema()
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with (
            pa.OSFile(str(path), "wb") as sink,
            pa.ipc.new_file(sink, schema, options=options) as f,
        ):
            for block in blocks:
                # Copied, so that a block does not carry the rows around its slice.
                for part in _cut(block.combine_chunks(), _PART_BYTES):
                    [batch] = part.to_batches()
                    f.write_batch(batch)
        entries = _entries_of(path, blocks)
        self._place.write(name, path)
        self._state.files.append([name, path.stat().st_size, entries])
        self._save_state()
        progress.add(sum(map(len, blocks)), sum(block.nbytes for block in blocks))

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

    def _load_state(self, arguments: dict[str, Any]) -> _State:
        path = self._folder / _STATE
        if not path.exists():
            return _State(arguments=arguments)
        state = _State(**json.loads(path.read_bytes()))
        if not state.num_gathered and not state.files:
            return _State(arguments=arguments)
        changed = [name for name in arguments if arguments[name] != state.arguments[name]]
        if changed:
            name = changed[0]
            raise ShardError(
                f"{self._to} has an unfinished write with {name}={state.arguments[name]!r}, not "
                f"{arguments[name]!r}. Nothing was written. Use the same arguments to complete it, "
                f"or delete {self._to} and {self._folder}."
            )
        return state

    def _save_state(self) -> None:
        path = self._folder / _STATE
        partial = path.with_suffix(".partial")
        with partial.open("w") as file:
            json.dump(vars(self._state), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)


def _cut(table: pa.Table, num_bytes: int) -> list[pa.Table]:
    """Cut rows into parts of about equal size, at most ``num_bytes`` on average."""
    num_parts = max(1, min(len(table), -(-table.nbytes // num_bytes)))
    bounds = [len(table) * number // num_parts for number in range(num_parts + 1)]
    return [table.slice(first, end - first) for first, end in itertools.pairwise(bounds)]


def _entries_of(path: Path, blocks: Sequence[pa.Table]) -> list[list[Any]]:
    """Return first byte, bytes, rows, bytes in memory and SHA-256 of each block."""
    with path.open("rb") as file:
        descriptor = file.fileno()

        def read(first: int, size: int) -> bytes:
            return os.pread(descriptor, size, first)

        messages = walk_messages(read, path.stat().st_size)
        batches = (message for message in messages if message.kind == "batch")
        entries = []
        for block in blocks:
            first = end = rows = 0
            while rows < len(block):
                batch = next(batches)
                first = first or batch.first
                end, rows = batch.first + batch.size, rows + batch.rows
            digest = hashlib.sha256(read(first, end - first)).hexdigest()
            entries.append([first, end - first, rows, block.nbytes, digest])
        return entries


def _without_dictionaries(schema: pa.Schema) -> pa.Schema:
    return pa.schema(
        [
            pa.field(f.name, f.type.value_type if pa.types.is_dictionary(f.type) else f.type)
            for f in schema
        ]
    )


def _described(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)
