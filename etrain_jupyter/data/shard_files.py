"""Write the files of a set: blocks of rows as Arrow IPC, with the place and digest of each."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from etrain_jupyter.data.formats.arrow_messages import walk_messages

BLOCKS_PER_FILE = 16
FILL = 15 / 16
"""Share of the block size that an average block fills: rows of different sizes make some blocks
larger, and a window of blocks must fit into its memory."""
_PART_BYTES = 512 << 10
"""Target size of a record batch in memory, the unit of decoding."""


def name_of(number: int) -> str:
    """Return the name of a file of a set."""
    return f"part-{number:05}.arrow"


def cut_blocks(table: pa.Table, block_bytes: int) -> list[pa.Table]:
    """Cut rows into blocks."""
    return cut(table, int(max(1, block_bytes * FILL)))


def cut(table: pa.Table, num_bytes: int) -> list[pa.Table]:
    """Cut rows into parts of about equal size, at most ``num_bytes`` on average."""
    num_parts = max(1, min(len(table), -(-table.nbytes // num_bytes)))
    bounds = [len(table) * number // num_parts for number in range(num_parts + 1)]
    return [table.slice(first, end - first) for first, end in itertools.pairwise(bounds)]


def write_blocks(path: Path, blocks: Sequence[pa.Table], schema: pa.Schema) -> list[list[Any]]:
    """Write a file; return first byte, bytes, rows, bytes in memory and SHA-256 of each block."""
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema, options=options) as f:
        for block in blocks:
            # Copied, so that a block does not carry the rows around its slice.
            for part in cut(block.combine_chunks(), _PART_BYTES):
                [batch] = part.to_batches()
                f.write_batch(batch)
    return _entries_of(path, blocks)


def _entries_of(path: Path, blocks: Sequence[pa.Table]) -> list[list[Any]]:
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
