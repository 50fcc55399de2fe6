from __future__ import annotations

import torch

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
