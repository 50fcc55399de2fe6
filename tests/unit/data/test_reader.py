"""Blocks in memory: within the limit, read ahead, and not read again within a window."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from etrain_jupyter.data import Shards, write_shards
from etrain_jupyter.data.reader import ShardReader
from etrain_jupyter.rules.samples.batch_plan import share_samples
from etrain_jupyter.rules.samples.block_order import BlockOrder

NUM_ROWS, BATCH = 6400, 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("set") / "shards"
    x = np.arange(NUM_ROWS * 4, dtype=np.float32).reshape(NUM_ROWS, 4)
    write_shards({"id": np.arange(NUM_ROWS), "x": x}, folder, block_bytes=2800, progress=False)
    return folder


def read_epoch(shards: Shards, reader: ShardReader, *, world_size: int = 1, rank: int = 0) -> int:
    """Read a rank's part of an epoch with read-ahead; return the most bytes in memory."""
    order, most = BlockOrder(shards.layout, seed=0, epoch=0), 0
    steps = []
    for first in range(0, NUM_ROWS, BATCH):
        counts = share_samples(min(BATCH, NUM_ROWS - first), world_size)
        begin = sum(counts[:rank])
        steps.append(order.arrange(first, counts)[begin : begin + counts[rank]])
    for now, ahead in zip(steps, [*steps[2:], steps[-1], steps[-1]], strict=True):
        reader.prefetch(ahead)
        reader.take(now)
        most = max(most, sum(loaded.table.nbytes for loaded in reader._loaded.values()))
    return most


def test_memory_is_bounded_by_the_window(folder: Path) -> None:
    shards = Shards(folder, window_bytes=8 * 2800)
    reader = shards.open()

    most = read_epoch(shards, reader)

    assert len(shards.index.blocks) > 60
    assert shards.layout.window == 8
    assert 5 * 2800 < most <= 8 * 2800
    reader.close()


@pytest.mark.parametrize("world_size", [1, 4])
def test_ranks_together_read_little_more_than_the_set(folder: Path, world_size: int) -> None:
    shards = Shards(folder, window=16, window_bytes=16 * 2800)
    total = sum(block.size for block in shards.index.blocks)
    num_bytes = 0
    for rank in range(world_size):
        reader = shards.open()
        read_epoch(shards, reader, world_size=world_size, rank=rank)
        num_bytes += reader.num_bytes_read
        reader.close()

    # 1 + (1.3 to 2.8) * (W - 1) / K, as measured; K = 16.
    assert total <= num_bytes <= total * (1 + 2.8 * (world_size - 1) / 16)


def test_read_ahead_does_not_exceed_the_memory(folder: Path) -> None:
    shards = Shards(folder, window=4, window_bytes=4 * 2800)
    reader = shards.open()

    reader.prefetch(np.arange(NUM_ROWS))

    assert len(reader._loading) <= 4
    ends = np.array([NUM_ROWS - 1, 0])
    expected = [Shards(folder)[number]["id"] for number in ends.tolist()]
    assert reader.take(ends)["id"].tolist() == expected
    reader.close()


def test_no_samples_give_empty_columns(folder: Path) -> None:
    reader = Shards(folder).open()

    assert reader.take(np.empty(0, np.int64)) == {"id": [], "x": []}
    reader.close()
