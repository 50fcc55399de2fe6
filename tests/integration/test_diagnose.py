"""Diagnose real jobs with a known cause: a slow data set, and a slow rank."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import etrain_jupyter
from etrain_jupyter.log.events import RankTimed
from etrain_jupyter.notebook.job.training_job import TrainingJob
from tests.integration.conftest import PATIENCE_S, until

pytestmark = pytest.mark.timeout(400)

NAP_S = 0.03


class SlowSet(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Fetching a sample takes a while, as from a slow disk."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(NAP_S / 8)
        return torch.full((8,), float(index)), torch.tensor(index % 2)


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(3))
    return x, (x.sum(dim=1) > 0).long()


def slow_on_rank_1(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
        time.sleep(3 * NAP_S)
    return F.cross_entropy(output, target)


def has_times(job: TrainingJob) -> bool:
    """Return True once both ranks of one generation have reported enough steps."""
    job.raise_for_status()
    steps: dict[tuple[int, int], int] = {}
    for event in job.events():
        if isinstance(event, RankTimed) and event.world_size == 2:
            key = (event.generation, event.rank)
            steps[key] = steps.get(key, 0) + event.num_steps
    newest = max((generation for generation, _ in steps), default=0)
    return min(steps.get((newest, 0), 0), steps.get((newest, 1), 0)) >= 30


def test_slow_data_set_of_an_ended_job_is_input(submit: Callable[..., TrainingJob]) -> None:
    job = submit(
        model=lambda: nn.Linear(8, 2),
        data={"train": SlowSet},
        loss=F.cross_entropy,
        batch={"global": 16},
        steps=60,
        workers={"min": 2, "max": 2},
    )
    job.wait(timeout=PATIENCE_S)

    diagnosis = etrain_jupyter.diagnose(job)

    assert diagnosis.verdict.main is not None, str(diagnosis)
    assert diagnosis.verdict.main.cause == "input", str(diagnosis)
    assert diagnosis.remedy is not None
    assert "num_workers: " in diagnosis.remedy.line


def test_slow_rank_of_a_running_job_is_a_straggler_with_its_name(
    submit: Callable[..., TrainingJob],
) -> None:
    job = submit(
        model=lambda: nn.Linear(8, 2),
        data={"train": make_data},
        loss=slow_on_rank_1,
        batch={"global": 16},
        epochs=10_000,
        workers={"min": 2, "max": 2},
    )
    until(lambda: has_times(job), "times of 30 steps")
    [slow] = [worker["worker"] for worker in job.workers() if worker["rank"] == 1]

    diagnosis = etrain_jupyter.diagnose(job)

    assert diagnosis.verdict.main is not None, str(diagnosis)
    assert diagnosis.verdict.main.cause == "straggler", str(diagnosis)
    assert diagnosis.verdict.main.workers == (slow,)
    assert diagnosis.remedy is not None
    assert diagnosis.remedy.line == f"%etrain preempt {slow} --job {job.id}"
