"""``write_shards``: write a data set in shards."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from etrain_jupyter.data.index import BLOCK_BYTES
from etrain_jupyter.data.places import absolute_path
from etrain_jupyter.data.shards import Shards
from etrain_jupyter.errors import ShardError


def write_shards(
    source: Any,
    to: str | os.PathLike[str],
    *,
    columns: Sequence[str] | None = None,
    shuffle: bool = True,
    seed: int = 0,
    block_bytes: int = BLOCK_BYTES,
    exist_ok: bool = False,
    spill_dir: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Shards:
    """Write a data set as Arrow IPC files that jobs can read block by block.

    Rows are shuffled once while they are written, over the whole set, so that every block is a
    random sample of it. The shuffle needs local disk space for the uncompressed rows, and about 1
    GB of memory.

    The set is complete once its manifest exists, which is written last. After an interruption, call
    the function again with the same arguments: it continues after the last rows that it had stored.
    A source without an index, such as a generator, is then read again from its beginning and must
    yield the same rows.

    Args:
        source: An iterable of dicts or tuples, an ``IterableDataset``, a map-style data set, a
            Hugging Face data set, a pandas, Polars or Arrow table, a dict or tuple of arrays,
            ``Shards``, or the path of files that ``Shards`` can read, or a list of such paths.
        to: An empty folder, or ``s3://bucket/prefix``.
        columns: Columns to write, or names for the elements of tuples; None for all.
        shuffle: Shuffle the rows. Without it, blocks keep the order of the source.
        seed: Seed of the shuffle.
        block_bytes: Size of a block in memory.
        exist_ok: Return the set at ``to`` if it is complete, without reading ``source``.
        spill_dir: Folder for the rows while they are shuffled; by default in the target folder, or
            in the temporary folder for ``s3://``.
        progress: Print the progress.

    Returns:
        The set.

    Raises:
        ShardError: If the source has no rows or rows of different types, if ``to`` is not empty, or
            if the files cannot be written.
    """
    if block_bytes < 1:
        raise ShardError(f"block_bytes={block_bytes} is less than 1.")
    place = absolute_path(to)
    _writer()(
        source,
        place,
        columns=columns,
        seed=seed if shuffle else None,
        block_bytes=block_bytes,
        exist_ok=exist_ok,
        spill_dir=os.fspath(spill_dir) if spill_dir is not None else None,
        progress=progress,
    )
    return Shards(place)


def _writer() -> Any:
    # Imported on first use: pyarrow is an optional dependency.
    try:
        from etrain_jupyter.data.shard_writer import write_set
    except ModuleNotFoundError as exc:
        if exc.name != "pyarrow":
            raise
        raise ShardError(
            "write_shards needs pyarrow, which is not installed. Install it: "
            'pip install "etrain-jupyter[data]"'
        ) from exc
    return write_set
