"""Small jobs for external Dask clusters, with steps that are slow but use no CPU time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from etrain_jupyter import launch
from etrain_jupyter.notebook.job.training_job import TrainingJob

PATIENCE_S = 150.0

BODY = """
model: make_model
data: {train: make_data}
loss: slow_loss
batch: {global: 16}
epochs: 3000
checkpoint: {every: 5 steps}
workers: {min: 1, max: 3}
"""


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(3))
    return x, (x.sum(dim=1) > 0).long()


def make_model() -> nn.Module:
    return nn.Linear(8, 2)


def slow_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    time.sleep(0.02)
    return F.cross_entropy(output, target)


NAMES = {"make_model": make_model, "make_data": make_data, "slow_loss": slow_loss}


def until(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen in {PATIENCE_S:.0f} s"
        time.sleep(0.05)
    return found


def submit(address: str) -> TrainingJob:
    flags = {"pool": address}
    return launch.submit(launch.plan_cell(BODY, NAMES, flags, "%%etrain distributed"))


def await_steps(job: TrainingJob, *, world_size: int) -> None:
    """Wait until a generation of that size has completed steps."""

    def trains(after: int) -> bool:
        job.raise_for_status()
        return job.world_size == world_size and job.step > after

    until(lambda: trains(0), f"a generation of {world_size}")
    step = job.step
    until(lambda: trains(step + 3), "steps")
