"""A cell that is run twice: the second job trains, and a warning names the first one."""

from __future__ import annotations

from pathlib import Path

import pytest

from etrain_jupyter import launch
from etrain_jupyter.notebook.job.training_job import TrainingJob
from tests.integration.conftest import PATIENCE_S
from tests.integration.slow_jobs import BODY, NAMES, await_steps

pytestmark = pytest.mark.timeout(400)


def run_cell(body: str) -> TrainingJob:
    return launch.submit(launch.plan_cell(body, NAMES, {}, "%%etrain distributed"))


def test_cell_run_again_warns_of_the_job_that_still_trains(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = f"{BODY.replace('max: 3', 'max: 1')}name: twice\n"
    first = run_cell(body)
    await_steps(first, world_size=1)
    assert "same cell" not in capsys.readouterr().out

    second = run_cell(f"# once more\n{body}")
    shown = capsys.readouterr().out
    assert f"etrain: job {first.id}, started from this same cell, is still training" in shown
    assert "on pool local" in shown
    assert f"the new job {second.id} shares the pool's workers with it" in shown
    assert f"%etrain stop {first.id}" in shown
    assert f"%etrain attach {first.id}" in shown
    await_steps(second, world_size=1)

    first.stop(now=True)
    first.wait(PATIENCE_S)
    third = run_cell(body)
    shown = capsys.readouterr().out
    assert f"job {second.id}, started from this same cell" in shown
    assert first.id not in shown
    for job in (second, third):
        job.stop(now=True)
        assert job.wait(PATIENCE_S) == "stopped"
