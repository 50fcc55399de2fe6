"""Blocks in memory: within the limit, read ahead, and not read again within a window."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from etrain_jupyter.data import Shards, shard_files, write_shards
from etrain_jupyter.data import reader as reader_module
from etrain_jupyter.data.reader import ShardReader, _Loaded
from etrain_jupyter.errors import ShardError
from etrain_jupyter.rules.samples.batch_plan import share_samples
from etrain_jupyter.rules.samples.block_order import BlockOrder

NUM_ROWS, BATCH = 6400, 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("set") / "shards"
    x = np.arange(NUM_ROWS * 4, dtype=np.float32).reshape(NUM_ROWS, 4)
    write_shards({"id": np.arange(NUM_ROWS), "x": x}, folder, block_bytes=2800, progress=False)
    return folder


def num_bytes_of(loaded: _Loaded) -> int:
    return loaded.decoded.table.nbytes if loaded.decoded is not None else len(loaded.data)


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
        most = max(most, sum(map(num_bytes_of, reader._loaded.values())))
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


# --- lazy decoding ---


@pytest.fixture
def in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shards:
    """Provide a set of blocks of about 16 record batches; row i has the text ``row i``."""
    monkeypatch.setattr(shard_files, "_PART_BYTES", 600)
    rows = ({"id": n, "x": [n, n + 1], "text": f"row {n}"} for n in range(3000))
    return write_shards(rows, tmp_path / "parts", shuffle=False, block_bytes=9800, progress=False)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Provide the number of bytes of each call of the decoder."""
    sizes: list[int] = []
    decode = reader_module.decode_arrow

    def count(data: bytes, schema: pa.Schema) -> pa.Table:
        sizes.append(len(data))
        return decode(data, schema)

    monkeypatch.setattr(reader_module, "decode_arrow", count)
    return sizes


def test_first_rows_of_a_block_decode_only_their_record_batches(
    in_parts: Shards, decoded: list[int]
) -> None:
    block = in_parts.index.blocks[0]
    reader = in_parts.open()

    reader.prefetch(np.array([5, 200, 6]))
    first = reader.take(np.array([5, 200, 6]))
    partly = decoded[0]
    second = reader.take(np.array([100, 3]))

    assert block.rows > 200
    assert first["id"].tolist() == [5, 200, 6]
    assert first["x"].tolist() == [[5, 6], [200, 201], [6, 7]]
    assert first["text"] == ["row 5", "row 200", "row 6"]
    assert partly < block.size / 4
    assert second["text"] == ["row 100", "row 3"]
    assert decoded[1:] == [block.size], "the whole block, once"
    reader.close()


def test_blocks_in_parts_give_every_row_once_in_any_order(
    in_parts: Shards, decoded: list[int]
) -> None:
    reader = in_parts.open(num_kept=4)
    numbers = np.random.default_rng(0).permutation(3000)

    found = []
    for first in range(0, 3000, 30):
        batch = reader.take(numbers[first : first + 30])
        assert batch["text"] == [f"row {n}" for n in batch["id"]]
        found += batch["id"].tolist()

    assert found == numbers.tolist()
    sizes = {block.size for block in in_parts.index.blocks}
    assert len(sizes & set(decoded)) == len(sizes), "whole blocks"
    assert min(decoded) < min(sizes) / 4, "and single record batches"
    assert len(reader._loaded) <= 4
    reader.close()


def test_block_of_which_many_rows_are_used_is_decoded_once(
    in_parts: Shards, decoded: list[int]
) -> None:
    reader = in_parts.open(num_kept=4)
    rows = in_parts.index.blocks[0].rows

    for first in range(0, rows, 50):
        reader.take(np.arange(first, min(first + 50, rows)))

    assert decoded == [in_parts.index.blocks[0].size]
    reader.close()


def test_block_of_parts_that_is_not_the_one_of_the_index_is_an_error(in_parts: Shards) -> None:
    blocks = in_parts.index.blocks
    other = (blocks[0]._replace(rows=blocks[0].rows + 1), *blocks[1:])
    in_parts._index = dataclasses.replace(in_parts.index, blocks=other)
    reader = in_parts.open()

    with pytest.raises(ShardError, match=r"has \d+ rows instead of \d+"):
        reader.take(np.array([5]))
    reader.close()
