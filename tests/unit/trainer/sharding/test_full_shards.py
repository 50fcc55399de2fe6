"""Weights in shards: updated as the whole for every optimizer, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from etrain_jupyter.config.vocabulary import ELEMENTWISE
from etrain_jupyter.trainer.references import WorkloadError
from etrain_jupyter.trainer.sharding.full_shards import WEIGHTS, FullShards
from tests.unit.trainer.sharding.shards import filled, optimizer_of


class Model(nn.Module):
    """Tensors whose rows do not divide evenly, and one with fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        sizes: list[Any] = [(37, 11), (37,), (1, 5), (200, 3)]
        self.all = nn.ParameterList(
            nn.Parameter(torch.randn(size, generator=generator)) for size in sizes
        )


def gradients_of(model: Model, shapes: list[torch.Size], step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step + 1)
    return [torch.randn(shape, generator=generator) * 0.1 for shape in shapes]


def new_rank(options: dict[str, Any]) -> FullShards:
    model = Model()
    return FullShards(optimizer_of(model, **options), model)


def divide(ranks: list[FullShards], world_size: int, options: dict[str, Any]) -> list[FullShards]:
    """Divide weights and state among ``world_size`` ranks, in place of ``shard_sync``."""
    indices = range(len(ranks[0].layout.names))
    found = [(i, one.form(i)) for one in ranks for i in indices]
    forms = {index: form for index, form in found if form is not None}
    new = [*ranks, *(new_rank(options) for _ in range(world_size))][:world_size]
    shards = [
        [filled(spans, forms, ranks) for spans in ranks[0].layout.shards(rank, world_size)]
        for rank in range(world_size)
    ]
    for rank, one in enumerate(new):
        one.drop()
        one.replace(shards[rank])
        one.settle(rank, world_size)
    return new


def make_step(one: FullShards, gradients: list[torch.Tensor]) -> None:
    if one.world_size == 1:
        for parameter, gradient in zip(one.layout.parameters, gradients, strict=True):
            parameter.grad = gradient
    # In place of ``prepare``.
    one._gradients = [
        {p.param: gradients[p.param].reshape(-1)[p.first : p.stop] for p in shard.parts}
        for shard in one.held
    ]
    one._optimizer.step()


CASES = [
    *(pytest.param({"name": name}, id=name) for name in sorted(ELEMENTWISE)),
    pytest.param({"name": "SGD", "momentum": 0.9, "nesterov": True}, id="momentum"),
    pytest.param({"name": "AdamW", "weight_decay": 0.1, "no_decay": "auto"}, id="groups"),
]


@pytest.mark.parametrize("options", CASES)
def test_shards_are_updated_as_the_whole_while_the_ranks_change(options: dict[str, Any]) -> None:
    model = Model()
    whole = optimizer_of(model, **options)
    parameters = [p for group in whole.param_groups for p in group["params"]]
    ranks = [new_rank(options)]
    for step, world_size in enumerate((1, 3, 2, 4, 1)):
        ranks = divide(ranks, world_size, options)
        gradients = gradients_of(model, ranks[0].layout.shapes, step)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        whole.step()
        for one in ranks:
            make_step(one, gradients)
            for part, weights in held_weights(one):
                expected = parameters[part.param].detach().view(-1)[part.first : part.stop]
                torch.testing.assert_close(weights, expected)
    for own, expected in zip(ranks[0].layout.parameters, parameters, strict=True):
        torch.testing.assert_close(own, expected)


def held_weights(one: FullShards) -> list[Any]:
    return [(part, shard.weights_of(part)) for shard in one.held for part in shard.parts]


def test_both_holders_of_a_shard_have_equal_weights_and_state() -> None:
    options = {"name": "AdamW"}
    ranks = divide([new_rank(options)], 3, options)
    gradients = gradients_of(Model(), ranks[0].layout.shapes, 0)
    for one in ranks:
        make_step(one, gradients)
    for rank, one in enumerate(ranks):
        own, copied = one.held[0], ranks[(rank + 1) % 3].held[1]
        assert own.spans == copied.spans
        for part in own.parts:
            mine, theirs = own.vectors_of(part), copied.vectors_of(part)
            assert mine.keys() == theirs.keys() >= {WEIGHTS, "exp_avg", "step"}
            assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_model_is_empty_while_several_ranks_divide_it_and_complete_on_one() -> None:
    options = {"name": "SGD"}
    [one, other] = divide([new_rank(options)], 2, options)
    assert {p.numel() for p in one.layout.parameters} == {0}
    [one] = divide([one, other], 1, options)
    assert [p.shape for p in one.layout.parameters] == one.layout.shapes
    for parameter, expected in zip(one.layout.parameters, Model().all, strict=True):
        assert torch.equal(parameter, expected)


def test_memory_of_a_rank_shrinks_with_the_number_of_ranks() -> None:
    options, sizes = {"name": "AdamW"}, []
    for world_size in (1, 2, 4):
        ranks = divide([new_rank(options)], world_size, options)
        gradients = gradients_of(Model(), ranks[0].layout.shapes, 0)
        for one in ranks:
            make_step(one, gradients)
        sizes.append(max(one.num_bytes for one in ranks))
    assert sizes[1] <= sizes[0] * 1.01
    assert sizes[2] < sizes[0] * 0.6


def test_room_for_padded_rows_keeps_weights_and_state() -> None:
    options = {"name": "Adam"}
    ranks = divide([new_rank(options)], 4, options)
    last = ranks[3].held[0]
    make_step(ranks[3], gradients_of(Model(), ranks[3].layout.shapes, 0))
    part = last.parts[0]  # 7 rows of 37, in the room of 10
    before = last.weights_of(part).clone()
    room = torch.zeros(110)
    room[: len(before)] = before
    last.move(part, room[: len(before)])
    assert last.state_of(part)
    make_step(ranks[3], gradients_of(Model(), ranks[3].layout.shapes, 1))
    assert not torch.equal(room[: len(before)], before)
    assert not room[len(before) :].any()


def scalar() -> nn.Module:
    model = nn.Linear(2, 2)
    model.scale = nn.Parameter(torch.ones(()))
    return model


@pytest.mark.parametrize(
    ("model", "names", "match"),
    [
        pytest.param(nn.Linear(2, 2), ["weight"], "bias is not", id="not in the optimizer"),
        pytest.param(scalar(), ["weight", "bias", "scale"], "scale is a scalar", id="scalar"),
        pytest.param(nn.Linear(2, 2).double(), ["weight", "bias"], "float64", id="type"),
    ],
)
def test_model_that_cannot_be_divided_is_refused(
    model: nn.Module, names: list[str], match: str
) -> None:
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.SGD([parameters[name] for name in names], lr=0.1)
    with pytest.raises(WorkloadError, match=f"shard: full .*{match}"):
        FullShards(optimizer, model)


def test_frozen_parameter_in_the_optimizer_is_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.bias.requires_grad_(False)
    with pytest.raises(WorkloadError, match=r"frozen parameter in the optimizer \(bias\)"):
        FullShards(optimizer, model)


def test_optimizer_that_needs_whole_tensors_is_refused() -> None:
    model = nn.Linear(4, 4, bias=False)
    optimizer = optimizer_of(model, "Muon")
    with pytest.raises(WorkloadError, match="shard: full cannot divide the state of Muon"):
        FullShards(optimizer, model)
