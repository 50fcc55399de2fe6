"""The state goes from one trainer to another without loss."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from etrain_jupyter.ranks.state import copy_to_cpu, digest_of, put_state, take_state

OPTIMIZERS = ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adafactor"]


def build() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    options = {"momentum": 0.9} if name == "SGD" else {}
    return getattr(torch.optim, name)(model.parameters(), lr=0.01, **options)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    model(torch.randn(16, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_newcomer_goes_on_exactly_as_the_survivor(name):
    model = build()
    optimizer = make_optimizer(name, model)
    for seed in range(3):
        step(model, optimizer, seed)
    optimizer.param_groups[0]["lr"] = 0.005
    header, tensors = take_state(model, optimizer)
    tensors = copy_to_cpu(tensors)

    newcomer = build()
    its_optimizer = make_optimizer(name, newcomer)
    put_state(newcomer, its_optimizer, copy.deepcopy(header), tensors)
    assert digest_of(newcomer) == digest_of(model)
    assert its_optimizer.param_groups[0]["lr"] == 0.005

    for both in ((model, optimizer), (newcomer, its_optimizer)):
        step(*both, seed=9)
    assert digest_of(newcomer) == digest_of(model)


def test_digest_tells_a_single_changed_bit():
    model = build()
    before = digest_of(model)
    with torch.no_grad():
        model[0].weight[0, 0] = torch.nextafter(model[0].weight[0, 0], torch.tensor(9.0))
    assert digest_of(model) != before
