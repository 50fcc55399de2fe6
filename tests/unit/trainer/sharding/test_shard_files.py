"""Optimizer state in files: the same for any number of ranks that write and read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from etrain_jupyter.errors import CheckpointError
from etrain_jupyter.storage.checkpoints import LocalStore, Part
from etrain_jupyter.storage.checkpoints.blocks import PartBlocks
from etrain_jupyter.trainer.sharding.held_state import Layout, NewShard
from etrain_jupyter.trainer.sharding.shard_files import (
    ShardFiles,
    header_of_state,
    join_parts,
    read_table,
)
from etrain_jupyter.trainer.sharding.sharded_optimizer import ShardedOptimizer
from etrain_jupyter.trainer.state.capture import OPTIMIZER, put_state, take_state
from etrain_jupyter.trainer.state.parts import shard_name
from etrain_jupyter.trainer.state.staging import stage
from tests.unit.trainer.sharding.test_sharded_optimizer import (
    Model,
    copy_of,
    divide,
    make_step,
    optimizer_of,
    set_gradients,
    sharded,
)

BLOCK_BYTES = 200
"""Not a multiple of an element's size, so that elements are cut, too."""
OPTIONS: dict[str, Any] = {"name": "NAdam", "weight_decay": 0.1, "no_decay": "auto"}


def trained(world_size: int) -> list[ShardedOptimizer]:
    ranks = divide([sharded(Model(), OPTIONS)], world_size)
    for step in range(2):
        make_step(ranks, step)
    return ranks


class CountingStore(LocalStore):
    """A folder that records which blocks are read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, block_bytes=BLOCK_BYTES)
        self.read: list[tuple[str, int]] = []

    def read_block(self, part: Part, number: int) -> bytes:
        self.read.append((part.key, number))
        return super().read_block(part, number)


def write(ranks: list[ShardedOptimizer], store: LocalStore) -> list[Part]:
    folder, parts = store.begin(1), []
    for one in ranks:
        name = shard_name(one.rank, one.world_size)
        staged = stage({name: one.own_part()}, {})
        parts.append(store.put_part(folder, name, staged[name].data))
    return parts


def open_files(store: LocalStore, parts: list[Part], layout: Layout) -> ShardFiles:
    files = [PartBlocks(store, part) for part in parts]
    return ShardFiles([(file, read_table(file)) for file in files], layout)


def shards_read(source: ShardFiles, layout: Layout, rank: int, size: int) -> list[NewShard]:
    shards = [NewShard(layout, span, source.forms) for span in layout.shards(rank, size)]
    source.fill(shards)
    return shards


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_job_that_is_not_divided_loads_the_parts_of_all_ranks(tmp_path, world_size):
    ranks = trained(world_size)
    store = LocalStore(tmp_path)
    files = [store.get_part(part) for part in write(ranks, store)]
    tensors = {k: v for file in files for k, v in load_file(file).items()}
    model = Model()
    optimizer = optimizer_of(model, **OPTIONS)
    for step in range(2):
        set_gradients(model, step)
        optimizer.step()
    _, expected = take_state(model, optimizer)

    other = optimizer_of(twin := Model(), **OPTIONS)
    parameters = [p for group in other.param_groups for p in group["params"]]
    joined = join_parts(tensors, [p.shape for p in parameters])
    header, own = take_state(model, other)
    header["optimizer"]["state"] = header_of_state(joined, OPTIMIZER)
    put_state(twin, other, header, own | {OPTIMIZER + k: v for k, v in joined.items()})

    _, found = take_state(twin, other)
    names = {name for name in expected if name.startswith(OPTIMIZER)}
    assert names == {name for name in found if name.startswith(OPTIMIZER)}
    assert all(torch.equal(found[name], expected[name]) for name in names)


@pytest.mark.parametrize(("written", "read"), [(1, 3), (3, 1), (3, 2), (2, 5), (4, 4)])
def test_each_rank_reads_its_ranges_of_files_that_any_number_of_ranks_wrote(
    tmp_path, written, read
):
    ranks = trained(written)
    layout, store = ranks[0].layout, CountingStore(tmp_path)
    source = open_files(store, write(ranks, store), layout)
    assert source.forms.keys() == {i for i, name in enumerate(layout.names) if name != "unused"}
    expected = divide(ranks, read)
    for rank in range(read):
        shards = shards_read(source, layout, rank, read)
        own = copy_of(expected[rank])
        own.replace(shards)
        for held, known in zip(own.held, expected[rank].held, strict=True):
            for part, other in zip(held.parts, known.parts, strict=True):
                state, theirs = held.state_of(part), known.state_of(other)
                assert state.keys() == theirs.keys()
                assert all(torch.equal(state[key], theirs[key]) for key in state)


def test_rank_reads_each_of_its_blocks_once_and_no_others(tmp_path):
    ranks = trained(4)
    layout, store = ranks[0].layout, CountingStore(tmp_path)
    parts = write(ranks, store)
    source = open_files(store, parts, layout)
    total = sum(part.num_blocks for part in parts)
    for rank in range(4):
        store.read.clear()
        shards_read(source, layout, rank, 4)
        assert len(store.read) == len(set(store.read))
        # Of the other half of the files, at most blocks that a border cuts.
        others = [
            key for key, _ in store.read if key not in {parts[n % 4].key for n in (rank, rank + 1)}
        ]
        assert others == []
        assert len(store.read) <= total / 2 + 4


def test_header_and_scalars_are_next_to_each_other(tmp_path):
    ranks = trained(1)
    store = CountingStore(tmp_path)
    [part] = write(ranks, store)
    file = PartBlocks(store, part)
    table = read_table(file)
    scalars = [entry for entry in table.values() if len(entry) == 4]
    first = min(entry[1] for entry in table.values())
    assert len(scalars) == 8  # step and mu_product of four parameters
    stop = max(entry[2] for entry in scalars)
    assert stop <= first + 10 * 4  # and the vectors of a parameter that is a scalar
    assert {number for _, number in store.read} == set(range(-(-stop // BLOCK_BYTES)))


def test_missing_part_is_reported(tmp_path):
    ranks, store = trained(3), LocalStore(tmp_path)
    with pytest.raises(CheckpointError, match="does not have all of the"):
        open_files(store, write(ranks, store)[1:], ranks[0].layout)


def test_state_of_another_model_is_refused(tmp_path):
    ranks, store = trained(1), LocalStore(tmp_path)
    other = Layout([("weight", torch.nn.Parameter(torch.zeros(9)))])
    with pytest.raises(CheckpointError):
        open_files(store, write(ranks, store), other)


def test_damaged_block_is_reported_by_the_rank_that_needs_it(tmp_path):
    ranks = trained(4)
    layout, store = ranks[0].layout, CountingStore(tmp_path)
    parts = write(ranks, store)
    source = open_files(store, parts, layout)
    path = tmp_path / parts[3].key
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    shards_read(source, layout, 0, 4)
    with pytest.raises(CheckpointError, match=r"00004-of-00004.safetensors was altered in bytes"):
        shards_read(source, layout, 3, 4)


def header(text: str) -> bytes:
    return len(text).to_bytes(8, "little") + text.encode()


@pytest.mark.parametrize(
    "data",
    [
        b"\x05\0\0\0\0\0\0\0{oops",
        b"\x05",
        b"\xff" * 8 + b"{}",
        header("[]"),
        header('{"0.exp_avg": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'),
        header('{"0.exp_avg": {"dtype": "F32", "shape": [1], "data_offsets": [-9, -5]}}'),
        header('{"0.exp_avg": {"dtype": "F32", "shape": [1], "data_offsets": [0, 3]}}') + b"123",
        header('{"0.exp_avg": {"dtype": "X", "shape": [1], "data_offsets": [0, 4]}}') + b"1234",
        header('{"0.step": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}'),
    ],
)
def test_malformed_file_is_refused(tmp_path, data):
    store = LocalStore(tmp_path)
    part = store.put_part(store.begin(1), "optimizer.safetensors", data)
    with pytest.raises(CheckpointError, match=r"optimizer.safetensors is not a valid safetensors"):
        read_table(PartBlocks(store, part))


def test_file_without_tensors_is_read(tmp_path):
    store = LocalStore(tmp_path)
    part = store.put_part(store.begin(1), "empty", stage({"empty": {}}, {})["empty"].data)
    assert read_table(PartBlocks(store, part)) == {}
