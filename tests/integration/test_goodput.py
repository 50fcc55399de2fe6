"""``workers.target: goodput`` with real workers: each job takes those worth their cost."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from etrain_jupyter.log.events import WorkersSized
from etrain_jupyter.notebook.job.training_job import TrainingJob
from tests.capabilities import long
from tests.integration.conftest import until

pytestmark = pytest.mark.timeout(400)  # real processes on a machine that may be busy


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(960, 8, generator=torch.Generator().manual_seed(3))
    return x, (x.sum(dim=1) > 0).long()


def make_model() -> nn.Module:
    return nn.Linear(8, 2)


def parallel_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    time.sleep(0.01 * len(target))  # a sample takes its time, but no core
    return F.cross_entropy(output, target)


def serial_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    time.sleep(0.1)  # a step takes its time, however few samples a worker has
    return F.cross_entropy(output, target)


def sizes(job: TrainingJob) -> list[WorkersSized]:
    return [event for event in job.events() if isinstance(event, WorkersSized)]


def settled(job: TrainingJob, *limits: str) -> WorkersSized | None:
    """Return the newest size if its reason is one of these."""
    found = sizes(job)
    return found[-1] if found and found[-1].limit in limits else None


Submit = Callable[..., TrainingJob]


def start(submit: Submit, name: str, loss: Callable[..., Any], max_workers: int) -> TrainingJob:
    return submit(
        model=make_model, data={"train": make_data}, loss=loss, batch={"global": 12}, epochs=5000,
        workers={"min": 1, "max": max_workers, "target": "goodput"}, name=name,
    )  # fmt: skip


def test_job_that_more_workers_do_not_speed_up_stays_at_one_and_says_why(submit: Submit) -> None:
    job = start(submit, "serial", serial_loss, 3)
    until(lambda: settled(job, "cost"), "the decision")
    until(lambda: job.world_size == 1, "one worker")

    assert max(job.history()["world_size"]) == 2  # it measured two, never three
    reason = sizes(job)[-1].reason
    assert reason.startswith("1 of 3 workers: 2 make ")
    assert "at 100 % more cost" in reason
    assert "the pool has no price, so the cost is worker-seconds" in reason


@long
def test_jobs_on_one_pool_take_what_a_worker_is_worth_to_each(submit: Submit) -> None:
    serial = start(submit, "serial", serial_loss, 2)
    parallel = start(submit, "parallel", parallel_loss, 2)
    until(lambda: settled(serial, "cost"), "the decision for the job that does not scale")
    until(lambda: settled(parallel, "max"), "the decision for the job that scales")
    until(lambda: (serial.world_size, parallel.world_size) == (1, 2), "the shares")

    assert "all 2 workers: 2 make" in sizes(parallel)[-1].reason
