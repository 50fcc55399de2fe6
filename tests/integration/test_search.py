"""Searches with real workers: trials as jobs, and a scheduler that dies in the middle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from etrain_jupyter.errors import JobNotFoundError
from etrain_jupyter.log.event_log import read_events
from etrain_jupyter.log.events import (
    Event,
    JobResumed,
    JobSubmitted,
    SchedulerRestarted,
    WorkerLost,
)
from etrain_jupyter.plugins.search.commands import plan_search
from etrain_jupyter.plugins.search.open_studies import attach_study, submit_study
from etrain_jupyter.plugins.search.study import Study
from etrain_jupyter.pools.base import Leftovers
from etrain_jupyter.pools.local import LocalPool
from etrain_jupyter.process.cluster_dir import cluster_dirs
from etrain_jupyter.testing.invariants import assert_invariants
from tests.capabilities import long
from tests.integration.conftest import PATIENCE_S, until

pytestmark = pytest.mark.slow

BODY = """\
model: Net(width)
data: {train: train_set, eval: eval_set}
loss: slow_loss
metrics: {accuracy: accuracy}
optimizer: {name: SGD, lr: !py lr}
batch: 64
epochs: 8
workers: {min: 1, max: 2}
search:
  space:
    width: {choice: [8, 16]}
    lr: {choice: [1e-5, 0.5]}
  metric: eval_accuracy
  mode: max
  divisor: 2
  method: grid
  pruner: asha
  concurrent: 2
"""


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def make_set(size: int, seed: int) -> TensorDataset:
    x = torch.randn(size, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x.sum(1) > 0).long())


def slow_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    time.sleep(0.03)  # so that a decision at a rung arrives before the trial's end
    return F.cross_entropy(output, target)


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(-1) == target).float()


KERNEL = """
import time
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset
import etrain_jupyter

def make_set(size, seed):
    x = torch.randn(size, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x.sum(1) > 0).long())

def slow_loss(output, target):
    time.sleep(0.03)
    return F.cross_entropy(output, target)

def accuracy(output, target):
    return (output.argmax(-1) == target).float()

def Net(width):
    return torch.nn.Sequential(
        torch.nn.Linear(8, width), torch.nn.ReLU(), torch.nn.Linear(width, 2)
    )

etrain_jupyter.search(
    name="kernel",
    model="Net(width)",
    data={"train": make_set(640, 1), "eval": make_set(128, 2)},
    loss=slow_loss,
    metrics={"accuracy": accuracy},
    optimizer={"name": "SGD", "lr": "!py lr"},
    batch=64,
    epochs=8,
    workers={"min": 1, "max": 2},
    search={
        "space": {"width": {"choice": [8, 16]}, "lr": {"choice": [1e-5, 0.5]}},
        "metric": "eval_accuracy",
        "mode": "max",
        "divisor": 2,
        "method": "grid",
        "pruner": "asha",
        "concurrent": 2,
    },
)
time.sleep(1000)
"""

NAMES: dict[str, Any] = {
    "Net": Net,
    "train_set": make_set(640, 1),
    "eval_set": make_set(128, 2),
    "slow_loss": slow_loss,
    "accuracy": accuracy,
}


@pytest.fixture(autouse=True)
def cluster(runs: Path) -> Iterator[None]:
    """Use a new cluster for each test, and leave nothing of it."""
    yield
    assert LocalPool().down() == Leftovers()


def submit(body: str = BODY, **names: Any) -> Study:
    return submit_study(plan_search(body, NAMES | names, {"name": "net"}, "%%etrain search"))


def test_study_finds_the_best_values_and_its_trials_are_jobs(runs: Path) -> None:
    study = submit()

    status = study.wait(timeout=PATIENCE_S)

    view = study.view()
    assert (status, view.reason) == ("finished", "")
    assert (view.num_samples, view.rungs) == (5120, (640, 1280, 2560))
    assert [trial.state for trial in view.trials].count("FAIL") == 0
    assert study.best_params["lr"] == 0.5
    assert study.best_job.result()["step"] == 80
    assert study.best_job.record.config["model"] == f"Net({study.best_params['width']})"
    for trial in view.trials:
        assert_invariants(study.job(trial.number).events())
    # Another kernel finds the same, and Optuna opens it.
    other = attach_study("net")
    assert other.view() == view
    assert other.optuna.best_params == study.best_params

    # More trials of an ended study: a grid has no more, so the same study continues with random
    # values of its space.
    other.resume(trials=1)
    other.wait(timeout=PATIENCE_S)
    assert len(other.view().trials) == 5


def test_killed_scheduler_in_mid_study_runs_no_trial_twice(runs: Path) -> None:
    study = submit()
    until(lambda: any(trial.curve for trial in study.view().trials), "an evaluation")

    [cluster] = cluster_dirs()
    record = cluster.record()
    assert record is not None
    os.kill(record.scheduler_pid, signal.SIGKILL)

    assert study.wait(timeout=PATIENCE_S) == "finished"
    logs = assert_each_trial_ran_once(study, runs)
    assert any(isinstance(event, SchedulerRestarted) for events in logs for event in events)


@long
def test_killed_half_of_the_workers_in_mid_study_ends_no_trial(runs: Path) -> None:
    study = submit()
    until(lambda: any(trial.curve for trial in study.view().trials), "an evaluation")
    jobs = [study.job(trial.number) for trial in study.view().trials]
    workers = until(lambda: [w for job in jobs for w in job.workers() if w["rank"] == 0], "a rank")

    os.kill(workers[0]["pid"], signal.SIGKILL)

    assert study.wait(timeout=PATIENCE_S) == "finished"
    logs = assert_each_trial_ran_once(study, runs)
    lost = [event for events in logs for event in events if isinstance(event, WorkerLost)]
    assert [event.worker for event in lost] == [workers[0]["worker"]]


def test_study_of_a_killed_kernel_continues_and_another_kernel_finds_it(runs: Path) -> None:
    kernel = subprocess.Popen([sys.executable, "-c", KERNEL], stdin=subprocess.DEVNULL)
    try:
        study = until(find_study_of_kernel, "the study")
        until(lambda: any(trial.curve for trial in study.view().trials), "an evaluation")
        assert kernel.poll() is None
    finally:
        kernel.kill()
        kernel.wait()

    assert study.wait(timeout=PATIENCE_S) == "finished"
    assert_each_trial_ran_once(study, runs)
    assert attach_study(study.id).best_params["lr"] == 0.5


def find_study_of_kernel() -> Study | None:
    try:
        return attach_study("kernel")
    except JobNotFoundError:
        return None


def assert_each_trial_ran_once(study: Study, runs: Path) -> list[list[Event]]:
    """Check that all four trials ended by themselves, in one attempt; return their logs."""
    trials = study.view().trials
    assert [trial.number for trial in trials] == [0, 1, 2, 3]
    assert len({tuple(sorted(trial.params.items())) for trial in trials}) == 4
    logs = []
    for trial in trials:
        # Interrupted is neither failed nor pruned: only a decision at a rung prunes.
        assert trial.state == "COMPLETE" or trial.reason.startswith("pruned at rung"), trial
        events = read_events(study.job(trial.number).record.log_path)
        assert sum(isinstance(event, JobSubmitted) for event in events) == 1
        assert not any(isinstance(event, JobResumed) for event in events)
        assert_invariants(study.job(trial.number).events())
        logs.append(events)
    folders = [path.name for path in runs.glob(f"{study.id}-*")]
    assert sorted(folders) == [trial.job_id for trial in trials]
    return logs


@long
def test_stopped_study_resumes_its_trials_from_their_checkpoints(
    runs: Path, tmp_path: Path
) -> None:
    # While this file exists, a trial takes a minute, so that it cannot end before the stop.
    slow = tmp_path / "slow"
    slow.touch()

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        time.sleep(0.75 if slow.exists() else 0.0)
        return F.cross_entropy(output, target)

    body = BODY.replace("  pruner: asha\n", "").replace("  divisor: 2\n", "")
    study = submit(body + "eval: 2 steps\n", slow_loss=loss)
    until(lambda: any(trial.curve for trial in study.view().trials), "an evaluation")
    evaluated = [trial.number for trial in study.view().trials if trial.curve]

    study.stop()
    assert study.wait(timeout=PATIENCE_S) == "stopped"
    assert {study.view().trials[number].state for number in evaluated} == {"RUNNING"}
    slow.unlink()
    study.resume()

    assert study.wait(timeout=PATIENCE_S) == "finished"
    for number in evaluated:
        [resumed] = [e for e in study.job(number).events() if isinstance(e, JobResumed)]
        assert resumed.step >= 2
        assert_invariants(study.job(number).events())
