"""``ema`` and ``sync_batchnorm`` on a real local pool whose trainers are killed."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from etrain_jupyter.errors import JobFailedError
from etrain_jupyter.log.events import (
    EvalCompleted,
    StepUndone,
    UserErrorRaised,
    WeightsHashed,
    WorkerLost,
)
from etrain_jupyter.notebook.job.training_job import TrainingJob
from etrain_jupyter.testing.invariants import assert_invariants
from tests.capabilities import long
from tests.integration.conftest import until

pytestmark = pytest.mark.timeout(400)  # real processes on a machine that may be busy

NUM_SAMPLES, BATCH = 100, 16  # the last step of an epoch has 4 samples


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(NUM_SAMPLES, 8, generator=generator)
    return x, (x.sum(dim=1) > 0).long()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


BROKEN = Path(tempfile.mkdtemp()) / "broken"
"""While this file exists, one sample of an epoch is an error."""


class Fragile(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sample = make_data()[0][0]
        if BROKEN.exists() and self.training and (x == sample).all(dim=1).any():
            raise ValueError("a sample is broken")
        return super().forward(x)


SLOW = Path(tempfile.mkdtemp()) / "slow"
"""While this file exists, steps are slow but use no CPU time."""


def slow_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if SLOW.exists():
        time.sleep(0.05)
    return F.cross_entropy(output, target)


def body(**changes: Any) -> dict[str, Any]:
    return {
        "model": Net,
        "data": {"train": make_data, "eval": make_data},
        "loss": slow_loss,
        "optimizer": {"name": "AdamW", "lr": 0.01},
        "batch": {"global": BATCH},
        "ema": 0.99,
        "eval": "5 epochs",
        **changes,
    }


def found(job: TrainingJob, kind: type) -> list[Any]:
    return [event for event in job.events() if isinstance(event, kind)]


def kill(job: TrainingJob, number: int, *, world_size: int) -> None:
    """Kill a rank some steps after there are at least ``world_size`` workers."""
    until(lambda: job.world_size >= world_size, f"{world_size} workers")
    goal = job.step + 10
    until(lambda: job.step >= goal, f"step {goal}")
    victim = next(worker for worker in job.workers() if worker["rank"] == number)
    num_lost = len(found(job, WorkerLost))
    os.kill(victim["trainer_pid"], signal.SIGKILL)
    until(lambda: len(found(job, WorkerLost)) > num_lost, "the loss")


def run(submit: Any, *, kills: tuple[int, ...], **changes: Any) -> TrainingJob:
    if kills:
        SLOW.touch()
    job = submit(**body(**changes))
    for survivors, number in zip((2, 1), kills, strict=False):
        kill(job, number, world_size=survivors + 1)
    SLOW.unlink(missing_ok=True)
    assert job.wait(timeout=200) == "finished", job
    assert_invariants(job.events())
    return job


def test_kills_abort_batchnorm_and_undo_the_step(submit):
    keys = {"sync_batchnorm": True, "epochs": 100, "workers": {"min": 1, "max": 3}}
    job = run(submit, kills=(1, 0), **keys)
    alone = run(submit, kills=(), **{**keys, "epochs": 10, "workers": {"min": 1, "max": 1}})

    # The digests of all ranks, which include the averages, have been compared by the invariants.
    assert found(job, WeightsHashed)
    assert len(found(job, StepUndone)) <= 2 * len(found(job, WorkerLost))
    raw, averaged = job.state_dict(weights="raw"), job.state_dict()
    assert int(raw["layers.1.num_batches_tracked"]) == job.step
    assert not torch.equal(raw["layers.0.weight"], averaged["layers.0.weight"])
    # After the same steps, the losses are those of one worker, except for rounding.
    history, expected = job.history(), alone.history()
    size = len(expected["loss"])
    assert history["loss"][:size] == pytest.approx(expected["loss"], rel=1e-3)


@long
def test_reproducible_averages_do_not_depend_on_kills(submit):
    keys = {"reproducible": {"shards": 4}, "epochs": 100}
    alone = run(submit, kills=(), workers={"min": 1, "max": 1}, **keys)
    killed = run(submit, kills=(0, 1), workers={"min": 1, "max": 3}, **keys)

    assert len(found(killed, WorkerLost)) >= 2
    for weights in ("raw", "averaged"):
        one, other = (job.state_dict(weights=weights) for job in (alone, killed))
        assert all(torch.equal(other[name], value) for name, value in one.items())
    losses = [[event.loss for event in found(job, EvalCompleted)] for job in (alone, killed)]
    assert losses[0] == losses[1]


def test_error_before_batchnorm_on_one_rank_ends_the_wait_of_the_other(submit):
    SLOW.touch()
    job = submit(
        **body(model=Fragile, sync_batchnorm=True, epochs=500, workers={"min": 2, "max": 2})
    )
    until(lambda: job.step >= 10 and job.world_size == 2, "10 steps on 2 workers")
    BROKEN.touch()
    try:
        with pytest.raises(JobFailedError):
            job.wait(timeout=100)
    finally:
        BROKEN.unlink()
        SLOW.unlink()

    [error] = found(job, UserErrorRaised)
    assert "a sample is broken" in error.error
    assert len(error.workers) == 1
