"""Optimizer state in files: the same for any number of ranks that write and read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from etrain_jupyter.errors import CheckpointError
from etrain_jupyter.rules.sharding.optimizer_shards import shards_of
from etrain_jupyter.trainer.sharding.held_state import Layout
from etrain_jupyter.trainer.sharding.shard_files import (
    ShardFiles,
    header_of_state,
    join_parts,
    map_tensors,
)
from etrain_jupyter.trainer.sharding.sharded_optimizer import ShardedOptimizer
from etrain_jupyter.trainer.state.capture import OPTIMIZER, put_state, take_state
from etrain_jupyter.trainer.state.parts import shard_name
from etrain_jupyter.trainer.state.staging import stage
from tests.unit.trainer.sharding.test_sharded_optimizer import (
    Model,
    divide,
    make_step,
    optimizer_of,
    set_gradients,
    sharded,
)

OPTIONS: dict[str, Any] = {"name": "NAdam", "weight_decay": 0.1, "no_decay": "auto"}


def trained(world_size: int) -> list[ShardedOptimizer]:
    ranks = divide([sharded(Model(), OPTIONS)], world_size)
    for step in range(2):
        make_step(ranks, step)
    return ranks


def write(ranks: list[ShardedOptimizer], folder: Path) -> list[Path]:
    files = []
    for one in ranks:
        name = shard_name(one.rank, one.world_size)
        staged = stage({name: one.own_part()}, {})
        files.append(folder / name)
        files[-1].write_bytes(staged[name].data)
    return files


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_job_that_is_not_divided_loads_the_parts_of_all_ranks(tmp_path, world_size):
    ranks = trained(world_size)
    tensors = {k: v for file in write(ranks, tmp_path) for k, v in load_file(file).items()}
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


@pytest.mark.parametrize(("written", "read"), [(1, 3), (3, 1), (3, 2), (2, 5)])
def test_divided_job_reads_ranges_of_files_that_any_number_of_ranks_wrote(tmp_path, written, read):
    ranks = trained(written)
    layout = ranks[0].layout
    source = ShardFiles(write(ranks, tmp_path), layout)
    forms = {i: form for i in range(len(layout.names)) if (form := source.form(i))}
    expected = divide(ranks, read)
    for rank in range(read):
        for span, held in zip(
            shards_of(rank, read, layout.starts), expected[rank].held, strict=True
        ):
            for part in layout.slices(span):
                state = held.state_of(part)
                assert bool(state) == (part.param in forms)
                for name, _ in forms[part.param].vectors if part.param in forms else ():
                    assert torch.equal(source.read(name, part), state[name])
                for name, value in forms[part.param].scalars.items() if state else ():
                    assert torch.equal(value, state[name])


def test_missing_part_is_reported(tmp_path):
    ranks = trained(3)
    files = write(ranks, tmp_path)
    with pytest.raises(CheckpointError, match="does not have all of the"):
        ShardFiles(files[1:], ranks[0].layout)


def test_state_of_another_model_is_refused(tmp_path):
    ranks = trained(1)
    files = write(ranks, tmp_path)
    other = Layout([("weight", torch.nn.Parameter(torch.zeros(9)))])
    with pytest.raises(CheckpointError):
        ShardFiles(files, other)


def test_malformed_file_is_refused(tmp_path):
    (tmp_path / "bad").write_bytes(b"\x05\0\0\0\0\0\0\0{oops")
    with pytest.raises(CheckpointError, match="bad cannot be read"):
        map_tensors(tmp_path / "bad")


def test_file_without_tensors_is_read(tmp_path):
    staged = stage({"empty": {}}, {})
    (tmp_path / "empty").write_bytes(staged["empty"].data)
    assert map_tensors(tmp_path / "empty") == {}
