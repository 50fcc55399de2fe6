"""A model in FSDP2 and without it again, in one process: nothing of FSDP2 remains."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _composable_state

from etrain_jupyter.trainer.gradients.stopwatch import Stopwatch
from etrain_jupyter.trainer.sharding.fsdp_wrap import WrappedModel, find_blocks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x)


class Model(nn.Module):
    """Blocks in a list, tied weights outside of them, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.last.weight = self.first.weight
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.frozen = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.last(x).sum()


class Alone:
    """The collectives of a group of one rank."""

    def __init__(self) -> None:
        self.num_reduced = 0
        self.fails = False

    def all_gather(self, output: torch.Tensor, own: torch.Tensor) -> Alone:
        output.copy_(own)
        return self

    reduce_scatter = all_gather

    def wait(self) -> None:
        """Do nothing: the collective is complete."""


@pytest.fixture
def default_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def wrapped(model: nn.Module) -> tuple[WrappedModel, list[nn.Parameter], list[torch.Tensor]]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    shapes = [p.shape for p in parameters]
    memory = [p.detach().clone().view(-1) for p in parameters]
    for parameter in parameters:
        parameter.data = torch.empty(0)
    group: Any = Alone()
    return WrappedModel(model, group, Stopwatch(), parameters, shapes, memory), parameters, memory


def traces_of(model: nn.Module) -> list[Any]:
    """Return what FSDP2 changes in the modules."""
    known = _composable_state._module_state_mapping
    hooks = [
        (key, len(value))
        for module in model.modules()
        for key, value in module.__dict__.items()
        if key.endswith("_hooks") and value
    ]
    return [
        *hooks,
        *((type(module), sorted(module.__dict__), module in known) for module in model.modules()),
    ]


def test_gradients_are_those_of_the_plain_model(default_group: None) -> None:
    torch.manual_seed(0)
    plain = Model()
    model = Model()
    model.load_state_dict(plain.state_dict())
    plain(torch.ones(2, 3)).backward()
    fsdp, _, _ = wrapped(model)
    model(torch.ones(2, 3)).backward()
    expected = [p.grad for p in plain.parameters() if p.requires_grad]
    for found, gradient in zip(fsdp.gradients(), expected, strict=True):
        torch.testing.assert_close(found, gradient.reshape(-1))
    fsdp.unwrap()


def test_nothing_remains_after_unwrap(default_group: None) -> None:
    model = Model()
    before, parameters = traces_of(model), [p for p in model.parameters() if p.requires_grad]
    for _ in range(2):
        values = [p.detach().clone() for p in parameters]
        fsdp, _, memory = wrapped(model)
        assert traces_of(model) != before
        model(torch.ones(2, 3)).backward()
        fsdp.unwrap()
        assert traces_of(model) == before
        assert [p for p in model.parameters() if p.requires_grad] == parameters
        assert model.last.weight is model.first.weight
        for parameter, value, rows in zip(parameters, values, memory, strict=True):
            parameter.data = rows.view(value.shape)
            assert torch.equal(parameter, value)
    assert model(torch.ones(2, 3)).isfinite()


def test_pass_that_fails_in_the_middle_leaves_a_model_that_can_be_unwrapped(
    default_group: None,
) -> None:
    model = Model()
    before = traces_of(model)
    fsdp, _, _ = wrapped(model)

    def fail(*_: Any) -> None:
        raise RuntimeError("a peer is lost")

    handle = model.blocks[1].linear.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="a peer is lost"):
        model(torch.ones(2, 3))
    handle.remove()
    fsdp.forget_gradients()
    fsdp.unwrap()
    assert traces_of(model) == before


def test_wrapped_model_is_freed_after_unwrap(default_group: None) -> None:
    model = Model()
    fsdp, _, memory = wrapped(model)
    model(torch.ones(2, 3)).backward()
    fsdp.unwrap()
    found = weakref.ref(memory[0])
    del fsdp, memory
    gc.collect()
    assert found() is None


def test_blocks_are_the_repeated_children_of_lists() -> None:
    model = Model()
    assert find_blocks(model) == list(model.blocks)
    layers = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.LayerNorm(2))
    assert find_blocks(layers) == [layers[0], layers[2]]


def test_block_with_weights_of_another_one_is_no_block_of_its_own() -> None:
    model = Model()
    model.blocks[1].linear.weight = model.blocks[0].linear.weight
    assert find_blocks(model) == []
