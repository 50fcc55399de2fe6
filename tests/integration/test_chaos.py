"""Random faults on a real pool, as ``%etrain chaos`` injects them, cost no sample."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from etrain_jupyter.errors import PoolError
from etrain_jupyter.log.events import FaultInjected, GenerationFormed, WorkerLeft, WorkerLost
from etrain_jupyter.notebook.job.training_job import TrainingJob
from etrain_jupyter.testing.invariants import assert_invariants
from tests.capabilities import long
from tests.integration.conftest import PATIENCE_S, until

pytestmark = pytest.mark.timeout(400)

CHAOS_S = 20.0
SEED = int(os.environ.get("ETRAIN_CHAOS_SEED", "5"))
NUM_SAMPLES, BATCH = 96, 16


@pytest.fixture(scope="module", autouse=True)
def limits() -> Iterator[None]:
    """Lower the hang timeout, before the module's cluster starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ETRAIN_HANG_S", "3")
        yield


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(NUM_SAMPLES, 8, generator=generator)
    return x, (x.sum(dim=1) > 0).long()


def slow_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    time.sleep(0.05)
    return F.cross_entropy(output, target)


@long
def test_chaos_for_twenty_seconds_costs_no_sample(submit: Callable[..., TrainingJob]) -> None:
    job = submit(
        model=lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2)),
        data={"train": make_data},
        loss=slow_loss,
        batch={"global": BATCH},
        epochs=90,
        workers={"min": 1, "max": 3},
    )
    until(lambda: job.world_size == 3 and job.status == "running", "three ranks")

    said = job.chaos(mtbf_s=3.0, duration_s=CHAOS_S, seed=SEED)
    with pytest.raises(PoolError, match="earthquake"):
        job.chaos(mode="earthquake")

    assert said
    until(lambda: found(job, FaultInjected), "the first fault")
    assert job.wait(timeout=2 * PATIENCE_S) == "finished", describe(job)
    assert_invariants(job.events())
    suffered = {e.worker for e in found(job, FaultInjected)}
    assert {e.worker for e in found(job, WorkerLost)} <= suffered
    assert len(found(job, GenerationFormed)) >= 3
    assert len(found(job, WorkerLost)) + len(found(job, WorkerLeft)) >= 2


def describe(job: TrainingJob) -> str:
    """Return the last events without the steps."""
    lines = [str(e)[:300] for e in job.events() if e.kind not in ("StepCompleted", "WeightsHashed")]
    return "\n".join([repr(job), *lines[-100:]])


def found(job: TrainingJob, kind: type) -> list:
    return [event for event in job.events() if isinstance(event, kind)]
