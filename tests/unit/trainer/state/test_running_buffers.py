from __future__ import annotations

import torch
from torch import nn

from etrain_jupyter.trainer.state.running_buffers import RunningBuffers


def test_moves_are_applied_to_each_buffer() -> None:
    mean, count = torch.tensor([1.0, 2.0]), torch.tensor(3)
    buffers = RunningBuffers([mean, count])
    before = buffers.copy()
    mean += torch.tensor([0.5, -0.5])
    count += 1

    moves_B = buffers.moves_from(before, 0.5)
    assert moves_B.tolist() == [0.25, -0.25, 0.5]
    assert moves_B.dtype == torch.float64

    buffers.move(before, moves_B * 2)
    assert mean.tolist() == [1.5, 1.5]
    assert count.item() == 4


def test_unchanged_buffer_keeps_every_bit() -> None:
    mean = torch.tensor([0.1, 1e-30])
    buffers = RunningBuffers([mean])
    before = buffers.copy()

    buffers.move(before, buffers.moves_from(before, 1 / 3))

    assert torch.equal(mean, before[0])


def test_tensor_that_a_pass_assigns_to_a_buffer_counts_as_its_new_value() -> None:
    model = nn.Module()
    model.register_buffer("hidden", torch.tensor([1.0, 2.0]))
    model.register_buffer("cache", torch.zeros(1), persistent=False)
    original = model.hidden
    buffers = RunningBuffers.of(model)
    before = buffers.copy()
    model.hidden = torch.tensor([2.0, 4.0])
    model.cache = torch.ones(1)

    [moving] = buffers.moved_since(before)
    assert moving is model.hidden
    assert buffers.moves_from(before, 0.5).tolist() == [0.5, 1.0, 0.0]

    buffers.move(before, torch.tensor([0.5, 1.0, 0.0]))
    assert model.hidden is original
    assert model.hidden.tolist() == [1.5, 3.0]
    assert model.cache.tolist() == [1.0]

    model.hidden = torch.tensor([9.0, 9.0])
    buffers.put_back(before)
    assert model.hidden is original
    assert model.hidden.tolist() == [1.0, 2.0]
