"""Suspended processes: a suspended worker is replaced, a suspended head evicts no worker."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from etrain_jupyter.log.events import GenerationFormed, WorkerLost
from etrain_jupyter.notebook.job.training_job import TrainingJob
from etrain_jupyter.testing.invariants import assert_invariants
from tests.integration.conftest import processes_of, until

pytestmark = pytest.mark.timeout(400)

SILENCE_S = 4.0
SLOW = Path(tempfile.mkdtemp()) / "slow"


@pytest.fixture(scope="module", autouse=True)
def limits() -> Iterator[None]:
    """Lower the heartbeat timeout, before the module's cluster starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ETRAIN_SILENCE_S", str(SILENCE_S))
        yield


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(96, 8, generator=generator)
    return x, (x.sum(dim=1) > 0).long()


def slow_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if SLOW.exists():
        time.sleep(0.05)
    return F.cross_entropy(output, target)


def lost(job: TrainingJob) -> list[WorkerLost]:
    job.raise_for_status()
    return [event for event in job.events() if isinstance(event, WorkerLost)]


def whole(job: TrainingJob) -> list[dict[str, Any]]:
    """Wait until both ranks train, and return their workers."""

    def is_whole() -> bool:
        job.raise_for_status()
        return job.world_size == 2 and job.status == "running"

    until(is_whole, "world size 2")
    goal = job.step + 5
    until(lambda: job.step >= goal, f"step {goal}")
    return [worker for worker in job.workers() if worker["rank"] is not None]


def test_suspended_worker_is_replaced_and_a_suspended_head_evicts_no_worker(
    submit: Callable[..., TrainingJob], runs: Path
) -> None:
    SLOW.touch()
    job = submit(
        model=lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)),
        data={"train": make_data},
        loss=slow_loss,
        batch={"global": 16},
        epochs=10_000,
        workers={"min": 1, "max": 2},
    )
    survivor, victim = whole(job)

    os.kill(victim["pid"], signal.SIGSTOP)
    until(lambda: lost(job), "the detection of the silent worker")
    [event] = lost(job)
    assert event.worker == victim["worker"]
    assert event.cause.startswith("no heartbeat for ")
    assert event.detected_s > SILENCE_S
    workers = whole(job)
    assert victim["worker"] not in {worker["worker"] for worker in workers}
    formed = [e for e in job.events() if isinstance(e, GenerationFormed)][-1]
    assert survivor["trainer_pid"] in formed.trainer_pids

    [head] = [p for p in processes_of(runs.parent) if "etrain_jupyter.head.main" in p.cmdline()]
    step = job.step
    head.suspend()
    time.sleep(2 * SILENCE_S)
    head.resume()
    until(lambda: job.step > step + 20, "steps after the head was resumed")
    assert len(lost(job)) == 1

    job.stop()
    assert job.wait(timeout=200) == "stopped", job
    assert_invariants(job.events())
