"""Elastic training on a real local pool: kills, notices, joins, and the invariants after them."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from etrain_jupyter.log.events import (
    TERMINAL_STATUSES,
    CheckpointCommitted,
    GenerationFormed,
    JobRestored,
    LogLine,
    StepCompleted,
    StepUndone,
    UserErrorRaised,
    WeightsHashed,
    WorkerLeft,
    WorkerLost,
)
from etrain_jupyter.notebook.commands.other_jobs import find_other_jobs, find_pools
from etrain_jupyter.notebook.job.runs import open_runs
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


SLOW = Path(tempfile.mkdtemp()) / "slow"
"""While this file exists, steps are slow but use no CPU time."""


def slow_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if SLOW.exists():
        time.sleep(0.05)
    return F.cross_entropy(output, target)


@pytest.fixture(autouse=True)
def slow() -> Iterator[None]:
    """Make steps slow until ``finish`` is called."""
    SLOW.touch()
    yield
    SLOW.unlink(missing_ok=True)


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(-1) == target).float()


class Pairs(Dataset):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        x, y = make_data()
        return x[index], y[index]


def body(**changes: Any) -> dict[str, Any]:
    return {
        "model": Net,
        "data": {"train": make_data, "eval": make_data},
        "loss": slow_loss,
        "metrics": {"accuracy": accuracy},
        "optimizer": {"name": "AdamW", "lr": 0.01},
        "batch": {"global": BATCH},
        "epochs": 200,
        "workers": {"min": 1, "max": 2},
        **changes,
    }


def steps_on(job: TrainingJob, count: int = 5) -> None:
    """Wait until the job has completed ``count`` more steps."""
    goal = job.step + count
    until(lambda: job.step >= goal or job.status in TERMINAL_STATUSES, f"step {goal}")
    job.raise_for_status()


def full(job: TrainingJob, world_size: int) -> None:
    until(
        lambda: job.world_size == world_size and job.status == "running",
        f"world size {world_size}",
    )
    steps_on(job)


def found(job: TrainingJob, kind: type) -> list[Any]:
    return [event for event in job.events() if isinstance(event, kind)]


def finish(job: TrainingJob) -> None:
    SLOW.unlink(missing_ok=True)
    assert job.wait(timeout=200) == "finished", job
    assert_invariants(job.events())


def rank(job: TrainingJob, number: int) -> dict[str, Any]:
    return next(w for w in job.workers() if w["rank"] == number)


def test_kills_restart_no_survivor_and_lose_no_sample(submit):
    job = submit(**body(workers={"min": 1, "max": 4}, epochs=10_000))
    full(job, 4)
    for victim in ("trainer of rank 0", "trainer of rank 2", "Dask worker of rank 1"):
        before = {w["worker"]: w["trainer_pid"] for w in job.workers()}
        number = int(victim[-1])
        target = rank(job, number)
        os.kill(target["pid"] if "Dask" in victim else target["trainer_pid"], signal.SIGKILL)
        until(lambda t=target: t["worker"] in {e.worker for e in found(job, WorkerLost)}, victim)
        steps_on(job)
        formed = found(job, GenerationFormed)[-1]
        now = dict(zip(formed.ranks, formed.trainer_pids, strict=True))
        for worker in before.keys() - {target["worker"]}:
            assert now[worker] == before[worker], f"{worker} was restarted"
        full(job, 4)
    job.stop()
    assert job.wait(timeout=200) == "stopped"
    assert_invariants(job.events())
    assert len(found(job, WorkerLost)) == 3
    assert len({e.step for e in found(job, StepUndone)}) <= 3


def test_job_loses_nothing_by_notices_scaling_pauses_and_the_death_of_all_workers(submit):
    """Spend one job's life on everything that it must survive, then stop it."""
    job = submit(**body(epochs=10_000))
    full(job, 2)
    noticed = rank(job, 1)["worker"]
    job.preempt(noticed)
    until(lambda: noticed in {e.worker for e in found(job, WorkerLeft)}, "the leave")
    full(job, 2)
    assert noticed not in {w["worker"] for w in job.workers()}

    job.scale(max=1)
    full(job, 1)
    only = rank(job, 0)
    job.pause()
    until(lambda: job.status == "paused", "the pause")
    step = job.step
    job.scale(max=2)
    job.resume()
    full(job, 2)
    assert job.step > step
    assert rank(job, 0)["trainer_pid"] == only["trainer_pid"], "pausing restarts no trainer"

    job.scale(max=1)
    full(job, 1)
    last = rank(job, 0)["worker"]
    job.preempt(last)  # its replacement receives its state before it leaves
    until(lambda: last in {e.worker for e in found(job, WorkerLeft)}, "the only worker's leave")
    job.scale(max=2)
    full(job, 2)
    assert found(job, StepUndone) == found(job, WorkerLost) == found(job, JobRestored) == []

    until(lambda: found(job, CheckpointCommitted), "a checkpoint")
    for worker in job.workers():
        os.kill(worker["pid"], signal.SIGKILL)
    until(lambda: found(job, JobRestored), "the restore")
    assert found(job, JobRestored)[0].step > 0
    full(job, 2)

    job.stop()
    assert job.wait(timeout=150) == "stopped"
    assert_invariants(job.events())
    assert found(job, CheckpointCommitted)[-1].step == job.step
    job.load_into(Net())
    assert job.audit().ok


def test_weights_loaded_in_the_notebook_are_the_evaluated_ones(submit):
    job = submit(**body(epochs=8))
    finish(job)
    model = job.load_into(Net()).eval()
    x, y = make_data()
    with torch.no_grad():
        mean = accuracy(model(x), y).mean().item()
    assert mean == pytest.approx(job.history()["eval_accuracy"][-1], abs=1e-6)
    digests = {e.digest for e in found(job, WeightsHashed) if e.step == job.step}
    assert len(digests) == 1


@long
def test_two_jobs_share_the_pool(submit):
    first = submit(**body(workers={"min": 1, "max": 2}, epochs=200))
    second = submit(**body(workers={"min": 1, "max": 2}, epochs=10))
    until(lambda: first.step and second.step, "steps of both")
    # The view of another kernel's side panel on the jobs and the pool.
    around = find_other_jobs(open_runs(), {first.id}, is_asked=False)
    assert [other["job_id"] for other in around.others or ()] == [second.id]
    until(lambda: find_pools()[0]["workers"] >= 2, "two workers in the pool's load")
    assert find_pools()[0]["idle_s"] == 0.0
    finish(second)
    finish(first)
    used = [{w for e in found(job, GenerationFormed) for w in e.ranks} for job in (first, second)]
    assert all(used)
    until(lambda: find_pools()[0]["idle_s"] > 0.0, "an idle pool")


@long
def test_data_loader_processes_deliver_every_sample_once_across_a_scale_down(submit):
    job = submit(**body(data={"train": Pairs, "num_workers": 1}, epochs=20))
    full(job, 2)
    job.scale(max=1)
    full(job, 1)
    finish(job)


def test_output_of_a_rank_is_logged(submit):
    def chatty(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        print("hello from the loss")
        return F.cross_entropy(output, target)

    job = submit(**body(loss=chatty, epochs=1, workers={"min": 1, "max": 1}))
    finish(job)
    assert "hello from the loss" in {e.text for e in found(job, LogLine)}


class Torn(torch.optim.SGD):
    """Updates the first parameter and raises an error before it updates the others."""

    def step(self, closure: Any = None) -> None:
        self.num_steps = getattr(self, "num_steps", 0) + 1
        if self.num_steps < 12:
            return super().step(closure)
        self.param_groups[0]["params"][0].data.add_(1.0)
        raise ArithmeticError("the update went wrong")


def make_torn(parameters: Any) -> Torn:
    return Torn(parameters, lr=0.01)


def test_half_updated_weights_are_never_saved(submit):
    keys = {"optimizer": make_torn, "workers": {"min": 1, "max": 1}}
    job = submit(**body(**keys, checkpoint={"every": "1 epoch"}))
    until(lambda: job.status in TERMINAL_STATUSES, "the end")
    assert job.status == "failed"
    (error,) = found(job, UserErrorRaised)
    assert "ArithmeticError: the update went wrong" in error.error
    assert error.step == 11
    # One checkpoint per epoch of seven steps; the weights of the last good step are lost.
    assert [event.step for event in found(job, CheckpointCommitted)] == [7]


@long
def test_batch_per_worker_scales_and_trains_every_sample_once(submit):
    job = submit(
        **body(
            batch={"per_worker": 4},
            workers={"min": 1, "max": 3},
            optimizer={"name": "SGD", "lr": 0.01, "momentum": 0.9},
            epochs=60,
        )
    )
    full(job, 3)
    os.kill(rank(job, 1)["trainer_pid"], signal.SIGKILL)
    until(lambda: found(job, WorkerLost), "the loss")
    full(job, 3)
    job.scale(max=1)
    full(job, 1)
    finish(job)
    steps = found(job, StepCompleted)
    assert {s.samples for s in steps if s.first + s.samples < NUM_SAMPLES} <= {4, 8, 12}
    assert all(s.samples <= 4 * s.world_size for s in steps)
    # Linear scaling for SGD: one worker uses the rate of the cell, three at most three times it.
    assert steps[-1].lr == pytest.approx(0.01)
    assert 0.01 <= max(s.lr for s in steps) <= 0.03 + 1e-9
