"""Loggers of a real job show each step once, through kills, a restore and a resume."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from etrain_jupyter.log.events import CheckpointCommitted, JobRestored, WorkerLost
from etrain_jupyter.notebook.job.training_job import TrainingJob
from etrain_jupyter.testing.invariants import assert_invariants
from tests.acme_package import install_acme, losses_of, rows_of, status_of
from tests.integration.conftest import until
from tests.integration.slow_jobs import make_data, make_model, slow_loss

pytestmark = pytest.mark.timeout(400)  # real processes on a machine that may be busy


@pytest.fixture(autouse=True)
def acme(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package with a logger before the cluster starts."""
    install_acme(runs.parent / "site", monkeypatch)


def found(job: TrainingJob, kind: type) -> list[Any]:
    return [event for event in job.events() if isinstance(event, kind)]


def steps_on(job: TrainingJob, count: int = 5) -> None:
    goal = job.step + count
    until(lambda: job.step >= goal, f"step {goal}")


def history_of(job: TrainingJob) -> list[tuple[int, float]]:
    columns = job.history()
    return list(zip(columns["step"], columns["loss"], strict=True))


def test_each_step_is_logged_once_through_kills_a_restore_and_a_resume(submit, tmp_path):
    folder = tmp_path / "acme"
    job = submit(
        model=make_model,
        data={"train": make_data},
        loss=slow_loss,
        batch={"global": 16},
        epochs=10_000,
        checkpoint={"every": "5 steps"},
        workers={"min": 1, "max": 2},
        log={"to": {"acme": {"folder": str(folder)}}},
    )
    until(lambda: job.world_size == 2 and job.step >= 5, "steps of two workers")

    os.kill(job.workers()[0]["trainer_pid"], signal.SIGKILL)
    until(lambda: found(job, WorkerLost), "the loss of a worker")
    until(lambda: job.world_size == 2, "the replacement")
    steps_on(job)

    until(lambda: found(job, CheckpointCommitted), "a checkpoint")
    until(lambda: losses_of(folder), "values in the tool")
    for worker in job.workers():
        os.kill(worker["pid"], signal.SIGKILL)
    until(lambda: found(job, JobRestored), "the restore")
    steps_on(job)
    job.stop()
    assert job.wait(timeout=150) == "stopped"
    until(lambda: status_of(folder) == "stopped", "the end of the logger")
    assert losses_of(folder) == history_of(job)
    assert [row["number"] for row in rows_of(folder)] == list(range(len(rows_of(folder))))

    last = job.step
    job.resume()
    until(lambda: job.step >= last + 5, "steps after the resume")
    job.stop()
    assert job.wait(timeout=150) == "stopped"
    until(lambda: len(losses_of(folder)) == job.step, "the values after the resume")

    assert job.track() == f"{job.id} (stopped) is in acme (folder: {folder})"
    logged = losses_of(folder)
    assert logged == history_of(job)
    assert [step for step, _ in logged] == list(range(1, job.step + 1))
    assert_invariants(job.events())
