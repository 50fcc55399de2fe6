"""Readers of ``shards``: run one rank of one reader in a process, and print its figures as JSON.

``python -m benchmarks.shard_readers READER FOLDER RANK WORLD_SIZE SECONDS START``
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from etrain_jupyter.data import Shards, write_shards
from etrain_jupyter.rules.samples.batch_plan import share_samples
from etrain_jupyter.rules.samples.block_order import BlockOrder

BATCH = 256
"""Samples per step, over all ranks."""

Row = dict[str, Any]
Batches = Generator[tuple[int, int], None, None]
"""Yields the samples of each batch, and the bytes read so far; 0 if the reader does not count."""


# --- writers: rows, and the folder of one format ---


def write_ours(rows: Callable[[], Iterator[Row]], folder: Path) -> None:
    """Write the set of ``write_shards``."""
    write_shards(rows(), folder, progress=False)


def write_hugging_face(rows: Callable[[], Iterator[Row]], folder: Path) -> None:
    """Write a saved Hugging Face data set."""
    import datasets

    cache = str(folder.with_suffix(".cache"))
    datasets.Dataset.from_generator(rows, cache_dir=cache).save_to_disk(str(folder))


def write_mds(rows: Callable[[], Iterator[Row]], folder: Path) -> None:
    """Write the shards of mosaicml-streaming."""
    import streaming

    columns = {"data": "bytes", "label": "int"}
    with streaming.MDSWriter(out=str(folder), columns=columns, size_limit=8 << 20) as writer:
        for row in rows():
            writer.write({"data": bytes_of(row), "label": row["label"]})


def write_webdataset(rows: Callable[[], Iterator[Row]], folder: Path) -> None:
    """Write the tar files of webdataset."""
    import webdataset

    folder.mkdir(parents=True)
    with webdataset.ShardWriter(str(folder / "%05d.tar"), maxsize=64 << 20, verbose=0) as writer:
        for number, row in enumerate(rows()):
            writer.write({"__key__": f"{number:09}", "data": bytes_of(row), "cls": row["label"]})


def bytes_of(row: Row) -> bytes:
    """Return the data of a row as bytes."""
    data = row["data"]
    return data if isinstance(data, bytes) else np.asarray(data, np.int32).tobytes()


# --- readers: the samples of one rank ---


def read_ours(folder: Path, rank: int, world_size: int, start: float) -> Batches:
    """Read with ``Shards``, as a rank does."""
    from etrain_jupyter.trainer.shard_source import ShardSource

    shards = Shards(folder)
    source = ShardSource(shards, None, 0, is_sequential=False, warn=print)
    order = BlockOrder(shards.layout, seed=0, epoch=0)

    def shares() -> Iterator[tuple[Any, int]]:
        for first in range(round(len(shards) * start), len(shards), BATCH):
            counts = share_samples(min(BATCH, len(shards) - first), world_size)
            begin = sum(counts[:rank])
            yield order.arrange(first, counts)[begin : begin + counts[rank]], 0

    try:
        for samples, _ in source.batches(shares()):
            yield len(samples), source._reader.num_bytes_read
    finally:
        source.close()


def read_hugging_face(folder: Path, rank: int, world_size: int, start: float) -> Batches:
    """Read with ``datasets`` and a DataLoader over a full shuffle."""
    import datasets
    import torch
    from torch.utils.data import DataLoader

    data = datasets.load_from_disk(str(folder)).with_format("torch")
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0)).tolist()
    own = order[round(len(order) * start) :][rank::world_size]
    for batch in DataLoader(data, batch_size=BATCH // world_size, sampler=own, collate_fn=list):
        yield len(batch), 0


def read_mds(folder: Path, rank: int, world_size: int, start: float) -> Batches:
    """Read with mosaicml-streaming."""
    # Each rank is a world of its own, because the ranks have no process group here.
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    import streaming

    size = BATCH // world_size
    local = folder.with_name(f"{folder.name}-{rank}")
    if not local.exists():
        local.symlink_to(folder, target_is_directory=True)
    data = streaming.StreamingDataset(local=str(local), shuffle=True, batch_size=size)
    if start:
        state = data.state_dict(round(len(data) * start), from_beginning=True)
        data.load_state_dict(state)
    count = 0
    for _ in data:
        count += 1
        if count == size:
            yield count, 0
            count = 0


def read_webdataset(folder: Path, rank: int, world_size: int, start: float) -> Batches:
    """Read with webdataset; it cannot seek, so a resume reads what it skips."""
    import webdataset

    urls = [str(path) for path in sorted(folder.glob("*.tar"))][rank::world_size]
    data = webdataset.WebDataset(urls, shardshuffle=100, seed=0).shuffle(1000)
    total = sum(1 for _ in webdataset.WebDataset(urls, shardshuffle=False)) if start else 0
    skipped = round(total * start)
    count = 0
    for number, _ in enumerate(data):
        if number < skipped:
            continue
        count += 1
        if count == BATCH // world_size:
            yield count, 0
            count = 0


WRITERS = {
    "ours": write_ours,
    "Hugging Face": write_hugging_face,
    "mosaicml-streaming": write_mds,
    "webdataset": write_webdataset,
}
READERS = {
    "ours": read_ours,
    "Hugging Face": read_hugging_face,
    "mosaicml-streaming": read_mds,
    "webdataset": read_webdataset,
}
NEEDS = {
    "ours": "pyarrow",
    "Hugging Face": "datasets",
    "mosaicml-streaming": "streaming",
    "webdataset": "webdataset",
}


def measure(name: str, folder: Path, rank: int, world_size: int, seconds: float) -> Row:
    """Read for some time and return the figures of this rank."""
    began_at, cpu = time.perf_counter(), time.process_time()
    memory, counted = anonymous_bytes(), read_bytes()
    samples = batches = num_bytes = peak = 0
    first_batch_s = 0.0
    for count, total in READERS[name](folder, rank, world_size, 0.0):
        samples, batches, num_bytes = samples + count, batches + 1, total
        now = time.perf_counter() - began_at
        first_batch_s = first_batch_s or now
        if batches % 10 == 1:
            peak = max(peak, anonymous_bytes() - memory)
        if now > seconds:
            break
    elapsed_s = time.perf_counter() - began_at
    return {
        "samples": samples,
        "samples_per_s": samples / elapsed_s,
        "cpu_s": time.process_time() - cpu,
        "first_batch_s": first_batch_s,
        "peak_mb": peak / 1e6,
        "max_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        # A reader of mapped files reads without system calls, which this does not count.
        "bytes_read": num_bytes or read_bytes() - counted,
    }


def resume_s(name: str, folder: Path, rank: int, world_size: int) -> float:
    """Return the seconds until the first batch of a resume at 90 % of an epoch."""
    began_at = time.perf_counter()
    batches = READERS[name](folder, rank, world_size, 0.9)
    next(batches)
    elapsed_s = time.perf_counter() - began_at
    # Otherwise, its threads and memory would affect the next measurement.
    batches.close()
    return elapsed_s


def anonymous_bytes() -> int:
    """Return the anonymous memory of this process, which excludes mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def read_bytes() -> int:
    """Return the bytes that this process has read by system calls."""
    return int(Path("/proc/self/io").read_text().split()[1])


if __name__ == "__main__":
    reader, path = sys.argv[1], Path(sys.argv[2])
    own_rank, ranks, limit_s = int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5])
    # In this order: the resume also warms up imports, which are not part of either figure.
    resumed_s = resume_s(reader, path, own_rank, ranks)
    again_s = resume_s(reader, path, own_rank, ranks)
    found = measure(reader, path, own_rank, ranks, limit_s)
    print(json.dumps({**found, "resume_s": min(resumed_s, again_s)}), flush=True)
    os._exit(0)  # do not wait for the threads of a reader that was left in mid-epoch
