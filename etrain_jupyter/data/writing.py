"""``write_shards``: write a data set in shards."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

from etrain_jupyter.data.index import BLOCK_BYTES
from etrain_jupyter.data.places import absolute_path
from etrain_jupyter.data.shards import Shards, needing_pyarrow
from etrain_jupyter.data.workers import OpenWorkers, open_local_workers
from etrain_jupyter.errors import ShardError
from etrain_jupyter.plugin import load
from etrain_jupyter.process.processes import num_usable_cores


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
    workers: int | None = None,
    pool: str | None = None,
) -> Shards:
    """Write a data set as Arrow IPC files that jobs can read block by block.

    Rows are shuffled once while they are written, over the whole set, so that every block is a
    random sample of it. The shuffle needs local disk space for the uncompressed rows, and about 1
    GB of memory in each process.

    The set is complete once its manifest exists, which is written last. After an interruption, call
    the function again with the same arguments: it continues after the last rows that it had stored,
    unless one of them differs from the source. A source without an index, such as a generator, is
    then read again from its beginning and must yield the same rows.

    With ``workers`` or ``pool``, several processes read, compress and write. The files are equal to
    those of a single process. Files and data sets with an index are read in parallel; rows in
    memory, and sources without an index, are read in this process.

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
        workers: Number of processes on this machine, only with ``shuffle``; by default, this
            process writes. A script must call this function under ``if __name__ == "__main__":``.
        pool: ``local`` for ``workers`` processes on this machine, by default one for each
            processor; or a Dask scheduler, by its address or as a pool of kind ``address`` in
            ``pools.yaml``. Its workers must share the folders ``to`` and ``spill_dir`` with this
            machine.

    Returns:
        The set.

    Raises:
        ShardError: If the source has no rows or rows of different types, if ``to`` is not empty, or
            if the files cannot be written. A row or file that cannot be read is named.
        PoolError: If the pool cannot be reached, or runs no tasks.
        ConfigError: If ``pools.yaml`` is invalid.
    """
    _check_options(shuffle=shuffle, block_bytes=block_bytes, workers=workers, pool=pool)
    place = absolute_path(to)
    with needing_pyarrow("write_shards"):
        from etrain_jupyter.data.shard_writer import write_set
    write_set(
        source,
        place,
        columns=columns,
        seed=seed if shuffle else None,
        block_bytes=block_bytes,
        exist_ok=exist_ok,
        spill_dir=os.fspath(spill_dir) if spill_dir is not None else None,
        progress=progress,
        open_workers=_opener_of(workers, pool),
    )
    return Shards(place)


def _check_options(
    *, shuffle: bool, block_bytes: int, workers: int | None, pool: str | None
) -> None:
    if block_bytes < 1:
        raise ShardError(f"block_bytes={block_bytes} is less than 1.")
    if workers is not None and workers < 1:
        raise ShardError(f"workers={workers} is less than 1.")
    if not shuffle and (workers is not None or pool is not None):
        raise ShardError(
            "workers and pool need shuffle=True: the files of a set in the order of its source are "
            "written one after the other. Nothing was written. Leave out workers and pool."
        )


def _opener_of(workers: int | None, pool: str | None) -> OpenWorkers | None:
    if pool is None and workers is None:
        return None
    if pool is None or pool == "local":
        return partial(open_local_workers, workers or num_usable_cores())
    if workers is not None:
        raise ShardError(
            f"workers={workers} is a number of processes on this machine, and pool={pool!r} uses "
            "its own workers. Nothing was written. Leave one of them out."
        )
    # The pools are above this package, which therefore loads them by name.
    return partial(load("etrain_jupyter.pools.registry:open_task_workers"), pool)
