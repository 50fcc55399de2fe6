"""A data set in shards on a real local pool: a kill, a leave, joins, and a resume in mid-epoch."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from etrain_jupyter.data import Shards, write_shards
from etrain_jupyter.log.events import (
    TERMINAL_STATUSES,
    GenerationFormed,
    JobPlanned,
    JobResumed,
    StepCompleted,
    UserErrorRaised,
    WeightsHashed,
)
from etrain_jupyter.notebook.job.training_job import TrainingJob
from etrain_jupyter.testing.invariants import assert_invariants
from etrain_jupyter.testing.s3_faults import S3Fault
from etrain_jupyter.testing.s3_server import S3Server
from tests.integration.conftest import until

pytestmark = pytest.mark.timeout(400)  # real processes on a machine that may be busy

NUM_SAMPLES, BATCH, STEPS = 1000, 16, 240  # 63 steps per epoch; the last one has 8 samples

SLOW = Path(tempfile.mkdtemp()) / "slow"
"""While this file exists, steps are slow but use no CPU time."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def slow_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if SLOW.exists():
        time.sleep(0.05)
    return F.cross_entropy(output, target)


@pytest.fixture(autouse=True)
def slow() -> Iterator[None]:
    yield
    SLOW.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def corpus(s3_process: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Provide a set in a bucket of about 40 blocks; the cluster inherits the bucket's address."""
    s3_process.make_bucket("corpus")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_process.environment.items():
            patch.setenv(name, value)
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("cache")))
        rng = np.random.default_rng(3)
        x = rng.standard_normal((NUM_SAMPLES, 8)).astype(np.float32)
        url = "s3://corpus/train"
        columns = {"x": x, "label": (x.sum(axis=1) > 0).astype(np.int64)}
        write_shards(columns, url, block_bytes=1200, progress=False)
        yield url


def body(corpus: str, **changes: Any) -> dict[str, Any]:
    shards = Shards(corpus, window=8)
    return {
        "model": Net,
        "data": {"train": shards, "eval": shards},
        "eval": "40 steps",
        "loss": slow_loss,
        "optimizer": {"name": "AdamW", "lr": 0.01},
        "batch": {"global": BATCH},
        "steps": STEPS,
        "workers": {"min": 1, "max": 2},
        "reproducible": {"shards": 4},
        "checkpoint": {"every": "10 steps"},
        **changes,
    }


def found(job: TrainingJob, kind: type) -> list[Any]:
    return [event for event in job.events() if isinstance(event, kind)]


def steps_on(job: TrainingJob, count: int = 5) -> None:
    goal = job.step + count
    until(lambda: job.step >= goal or job.status in TERMINAL_STATUSES, f"step {goal}")
    job.raise_for_status()


def full(job: TrainingJob, world_size: int) -> None:
    until(
        lambda: job.world_size == world_size and job.status == "running",
        f"world size {world_size}",
    )
    steps_on(job)


def final_digest(job: TrainingJob) -> str:
    [digest] = {event.digest for event in found(job, WeightsHashed) if event.step == STEPS}
    return str(digest)


def test_churn_and_a_resume_leave_the_weights_of_a_calm_run(
    s3_process: S3Server, corpus: str, submit: Any
) -> None:
    calm = submit(**body(corpus, workers={"min": 1, "max": 1}))
    assert calm.wait(timeout=200) == "finished", calm
    s3_process.set_faults(S3Fault(kind="truncate", every=9, match="part-"))
    SLOW.touch()
    job = submit(**body(corpus))
    full(job, 2)
    victim = next(w for w in job.workers() if w["rank"] == 0)
    os.kill(victim["trainer_pid"], signal.SIGKILL)
    until(lambda: len(found(job, GenerationFormed)) > 1, "another generation")
    full(job, 2)  # the replacement has joined
    job.scale(max=1)
    full(job, 1)
    job.stop()
    assert job.wait(timeout=200) == "stopped", job
    assert job.step % 63 > 0, "stopped in mid-epoch"

    SLOW.unlink()
    job.resume(max=2)
    assert job.wait(timeout=200) == "finished", job

    assert final_digest(job) == final_digest(calm)
    log = list(job.events())
    assert_invariants(log)
    assert [e for e in log if isinstance(e, JobResumed)]
    planned = found(job, JobPlanned)[0]
    assert planned.train_layout == Shards(corpus, window=8).layout.encode()
    assert {event.world_size for event in found(job, StepCompleted)} == {1, 2}


def test_missing_shard_ends_the_job_with_its_name(
    s3_process: S3Server, corpus: str, submit: Any
) -> None:
    write_shards(Shards(corpus), "s3://corpus/broken", block_bytes=1200, progress=False)
    keys = body("s3://corpus/broken")
    len(keys["data"]["train"])
    s3_process.remove("corpus", "broken/part-00000.arrow")

    job = submit(**keys)

    assert job.wait(timeout=200) == "failed", job
    assert (
        "part-00000.arrow is missing in s3://corpus/broken" in found(job, UserErrorRaised)[0].error
    )
