"""Updates of shards equal the update of the whole, bit for bit, for every optimizer."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from torch import nn

from etrain_jupyter.config.vocabulary import ELEMENTWISE, NAMED_LR
from etrain_jupyter.trainer.references import WorkloadError
from etrain_jupyter.trainer.sharding.held_state import Form
from etrain_jupyter.trainer.sharding.sharded_optimizer import ShardedOptimizer
from tests.unit.trainer.sharding.shards import filled, optimizer_of

NUM_STEPS = 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        sizes: list[Any] = [(37, 11), (37,), (), (200, 3)]
        self.all = nn.ParameterList(
            nn.Parameter(torch.randn(size, generator=generator)) for size in sizes
        )
        self.unused = nn.Parameter(torch.ones(70))


def set_gradients(model: Model, step: int) -> None:
    generator = torch.Generator().manual_seed(step + 1)
    for parameter in model.all:
        parameter.grad = torch.randn(parameter.shape, generator=generator) * 0.1


def divide(ranks: list[ShardedOptimizer], world_size: int) -> list[ShardedOptimizer]:
    """Divide the state among ``world_size`` ranks, in place of ``shard_sync``."""
    layout = ranks[0].layout
    forms = forms_of(ranks)
    new: list[ShardedOptimizer] = []
    for rank in range(world_size):
        own = copy_of(ranks[rank % len(ranks)])
        held = layout.shards(rank, world_size)
        own.replace([filled(span, forms, ranks) for span in held])
        own.adopt(rank, world_size)
        new.append(own)
    return new


def forms_of(ranks: list[ShardedOptimizer]) -> dict[int, Form]:
    """Return the forms of all parameters' state, as the ranks send them to each other."""
    found = {}
    for one in ranks:
        for index in range(len(one.layout.names)):
            if form := one.form(index):
                found[index] = Form.from_json(json.loads(json.dumps(form.to_json())))
    return found


def copy_of(one: ShardedOptimizer) -> ShardedOptimizer:
    model = copy.deepcopy(one.model)  # type: ignore[attr-defined]
    return sharded(model, one.options)  # type: ignore[attr-defined]


def sharded(model: Model, options: dict[str, Any]) -> ShardedOptimizer:
    made = ShardedOptimizer(optimizer_of(model, **options), model)
    made.model, made.options = model, options  # type: ignore[attr-defined]
    return made


def exchange(ranks: list[ShardedOptimizer]) -> None:
    """Give all ranks the weights of all shards."""
    for owner in ranks:
        for part in owner.held[0].parts:
            for other in ranks:
                other.layout.weights(part).copy_(owner.layout.weights(part))


def make_step(ranks: list[ShardedOptimizer], step: int) -> None:
    for one in ranks:
        set_gradients(one.model, step)  # type: ignore[attr-defined]
        one._optimizer.step()
    exchange(ranks)


CASES = [
    *(pytest.param({"name": name}, id=name) for name in sorted(ELEMENTWISE)),
    pytest.param({"name": "SGD", "momentum": 0.9, "nesterov": True}, id="momentum"),
    pytest.param({"name": "Adam", "amsgrad": True, "weight_decay": 0.1}, id="amsgrad"),
    pytest.param({"name": "RMSprop", "centered": True, "momentum": 0.9}, id="centered"),
    pytest.param({"name": "AdamW", "foreach": True}, id="foreach"),
    pytest.param({"name": "AdamW", "weight_decay": 0.1, "no_decay": "auto"}, id="groups"),
]


@pytest.mark.parametrize("options", CASES)
def test_shards_are_updated_as_the_whole_while_the_ranks_change(options):
    model = Model()
    whole = optimizer_of(model, **options)
    ranks = [sharded(Model(), options)]
    for step, world_size in enumerate((1, 3, 2, 4)):
        ranks = divide(ranks, world_size)
        set_gradients(model, step)
        whole.step()
        make_step(ranks, step)
        for one in ranks:
            for own, expected in zip(one.layout.parameters, whole_parameters(whole), strict=True):
                assert torch.equal(own, expected)


def whole_parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def test_both_holders_of_a_shard_have_equal_state():
    ranks = divide([sharded(Model(), {"name": "AdamW"})], 3)
    make_step(ranks, 0)
    for rank, one in enumerate(ranks):
        own, copied = one.held[0], ranks[(rank - 1) % 3].held[1]
        assert own.span == copied.span
        for part, other in zip(own.parts, copied.parts, strict=True):
            mine, theirs = own.state_of(part), copied.state_of(other)
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_state_of_a_rank_shrinks_with_the_number_of_ranks():
    sizes = []
    for world_size in (1, 2, 4):
        ranks = divide([sharded(Model(), {"name": "AdamW"})], world_size)
        make_step(ranks, 0)
        sizes.append(max(one.num_bytes for one in ranks))
    assert sizes[1] <= sizes[0] * 1.05
    assert sizes[2] < sizes[0] * 0.65


def test_learning_rate_of_a_schedule_applies_to_the_shards():
    model = Model()
    one = sharded(model, {"name": "SGD"})
    before = model.all[0].detach().clone()
    set_gradients(model, 0)
    one._optimizer.param_groups[0]["lr"] = 0.0
    one._optimizer.step()
    assert torch.equal(model.all[0], before)


def test_optimizer_keeps_no_state_of_its_own():
    one = sharded(Model(), {"name": "Adagrad"})
    set_gradients(one.model, 0)
    one._optimizer.step()
    assert not one._optimizer.state


@pytest.mark.parametrize("name", sorted(set(NAMED_LR) - ELEMENTWISE - {"LAMB", "LARS"}))
def test_optimizer_that_needs_whole_tensors_is_refused(name):
    model = nn.Linear(4, 4, bias=False)
    optimizer = optimizer_of(model, name)
    with pytest.raises(WorkloadError, match=f"cannot divide the state of {name}"):
        ShardedOptimizer(optimizer, model)


def test_subclass_of_a_known_optimizer_is_refused():
    class Adam(torch.optim.Adam):
        pass

    model = Model()
    with pytest.raises(WorkloadError, match="cannot divide the state of Adam"):
        ShardedOptimizer(Adam(model.parameters()), model)


def test_parameter_that_is_not_contiguous_is_refused():
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    with pytest.raises(WorkloadError, match="needs contiguous parameters, but weight is not"):
        ShardedOptimizer(torch.optim.SGD(model.parameters()), model)
