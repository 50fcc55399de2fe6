"""Plans of real local jobs: of one that ran, and of a cell that is profiled first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import etrain_jupyter
from etrain_jupyter import launch
from etrain_jupyter.cli import main
from etrain_jupyter.log.events import TERMINAL_STATUSES
from etrain_jupyter.notebook.job.training_job import TrainingJob
from tests.capabilities import long
from tests.integration.conftest import PATIENCE_S, until

pytestmark = pytest.mark.timeout(400)  # real processes on a machine that may be busy

NUM_SAMPLES, BATCH, EPOCHS = 512, 64, 500


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(NUM_SAMPLES, 256, generator=torch.Generator().manual_seed(3))
    return x, (x.sum(dim=1) > 0).long()


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 2))


def num_steps(job: TrainingJob, workers: int) -> int:
    """Return the number of steps on a number of workers."""
    return sum(world == workers for world in job.history()["world_size"])


@pytest.mark.plugins
def test_command_plans_a_job_from_its_own_steps(
    submit: Callable[..., TrainingJob], runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = submit(
        model=make_model, data={"train": make_data}, loss=F.cross_entropy,
        batch={"per_worker": BATCH}, scaling={"rule": "adascale"}, epochs=EPOCHS,
        workers={"min": 1, "max": 1}, name="net",
    )  # fmt: skip
    until(lambda: num_steps(job, 1) >= 20, "training on one worker")
    job.scale(max=2)
    until(lambda: num_steps(job, 2) >= 20, "training on two workers")
    job.stop()
    job.wait(timeout=PATIENCE_S)

    assert main(["--runs", str(runs), "plan", job.id, "--deadline", "10h", "--workers", "4"]) == 0

    said = capsys.readouterr().out
    done = sum(job.history()["samples"])
    assert f"{NUM_SAMPLES * EPOCHS - done:,} samples left of {NUM_SAMPLES * EPOCHS:,}" in said
    assert "Recommended: " in said
    plan = etrain_jupyter.plan(job, workers=4)
    by_workers = {one.workers: one for one in plan.options}
    assert [one.is_measured for _, one in sorted(by_workers.items())] == [True, True, False, False]
    # AdaScale measured the gradient noise on two workers.
    assert by_workers[1].statistical_efficiency == 1.0
    assert 0.5 <= by_workers[2].statistical_efficiency < 1.0
    assert plan.job.plan.num_parameters == 256 * 512 + 512 + 512 * 2 + 2


@long
def test_cell_is_profiled_on_one_and_two_workers_and_stopped(runs: Path) -> None:
    body = f"""
model: make_model
data: {{train: make_data}}
loss: F.cross_entropy
batch: {{global: {BATCH}}}
epochs: 20000
workers: {{min: 1, max: 2}}
name: fresh
"""
    names: dict[str, Any] = {"make_model": make_model, "make_data": make_data, "F": F}

    job = launch.profile(launch.plan_cell(body, names, {}, "%%etrain plan"))

    assert job.status in TERMINAL_STATUSES
    assert job.name == "fresh-profile"
    assert num_steps(job, 1) >= 6
    assert num_steps(job, 2) >= 6
    plan = etrain_jupyter.plan(job, is_profile=True)
    assert plan.job.samples_left == NUM_SAMPLES * 20_000
    assert {one.workers for one in plan.options if one.is_measured} == {1, 2}
