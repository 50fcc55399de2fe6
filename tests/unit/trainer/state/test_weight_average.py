"""Averaged weights: the arithmetic, exact replacement in evaluations, and the state."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from etrain_jupyter.trainer.state.capture import digest_of
from etrain_jupyter.trainer.state.packing import StateError
from etrain_jupyter.trainer.state.running_buffers import RunningBuffers
from etrain_jupyter.trainer.state.weight_average import WeightAverage


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def change(model: nn.Module) -> None:
    """Change all parameters and running statistics, as a step does."""
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            if value.is_floating_point():
                value.add_(torch.randn_like(value))


def test_average_equals_that_of_torch():
    model = make_model()
    average = WeightAverage(model, decay=0.9, has_warmup=False)
    # torch copies the weights at the first update, where this average starts.
    peer = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    peer.update_parameters(model)

    for _ in range(5):
        change(model)
        average.after_update()
        peer.update_parameters(model)

    for name, expected in peer.module.named_parameters():
        torch.testing.assert_close(average.tensors[name], expected)


def test_warmup_raises_the_decay_to_its_value():
    weight = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(weight.weight)
    average = WeightAverage(weight, decay=0.2, has_warmup=True)
    nn.init.ones_(weight.weight)

    found = []
    for _ in range(3):
        average.after_update()
        found.append(float(average.tensors["weight"]))

    # The decays are 1 / 10, 2 / 11 and 0.2.
    assert found == pytest.approx([1 - 0.1, 1 - 0.1 * 2 / 11, 1 - 0.1 * 2 / 11 * 0.2])


def test_running_statistics_are_averaged_and_counters_are_not():
    model = make_model()
    average = WeightAverage(model, decay=0.5, has_warmup=False)
    average.follow_buffers(RunningBuffers(model.buffers()))
    change(model)
    average.after_update()

    assert {"1.running_mean", "1.running_var"} < set(average.tensors)
    assert "1.num_batches_tracked" not in average.tensors
    torch.testing.assert_close(
        average.tensors["1.running_mean"], model[1].running_mean / 2, atol=1e-7, rtol=0
    )


def test_weights_are_restored_bit_for_bit_after_an_error_in_an_evaluation():
    model = make_model()
    average = WeightAverage(model, decay=0.9, has_warmup=True)
    change(model)
    average.after_update()
    before = digest_of(model)

    def evaluate() -> None:
        with average.applied():
            evaluated.append(model[0].weight.detach().clone())
            raise RuntimeError("in the notebook")

    evaluated: list[torch.Tensor] = []
    with pytest.raises(RuntimeError, match="in the notebook"):
        evaluate()

    assert torch.equal(evaluated[0], average.tensors["0.weight"])
    assert digest_of(model) == before


def test_low_precision_weights_have_an_average_that_moves():
    model = nn.Linear(2, 1, bias=False).to(torch.bfloat16)
    nn.init.ones_(model.weight)
    average = WeightAverage(model, decay=0.999, has_warmup=False)
    nn.init.constant_(model.weight, 2.0)
    for _ in range(100):
        average.after_update()

    # In bfloat16, 1 + 0.001 is 1.
    assert float(average.tensors["weight"][0, 0]) == pytest.approx(2 - 0.999**100, rel=1e-5)


def test_frozen_parameters_have_no_average_and_tied_ones_share_it():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)

    tensors = WeightAverage(model, decay=0.9, has_warmup=True).tensors

    assert set(tensors) == {"0.weight", "1.weight", "1.bias"}
    assert tensors["0.weight"] is tensors["1.weight"]


def test_state_continues_bit_for_bit():
    model = make_model()
    average = WeightAverage(model, decay=0.9, has_warmup=True)
    for _ in range(3):
        change(model)
        average.after_update()
    other_model = copy.deepcopy(model)
    other = WeightAverage(other_model, decay=0.9, has_warmup=True)
    other.load_state_dict(copy.deepcopy(average.state_dict()))
    for one in (average, other):
        one.after_update()

    assert all(torch.equal(other.tensors[k], v) for k, v in average.tensors.items())


def test_average_of_another_model_is_refused():
    average = WeightAverage(nn.Linear(2, 2), decay=0.9, has_warmup=True)
    frozen = nn.Linear(2, 2)
    frozen.bias.requires_grad_(False)

    with pytest.raises(StateError, match=r"differ from this model's in bias\. Build"):
        WeightAverage(frozen, decay=0.9, has_warmup=True).load_state_dict(average.state_dict())
