"""The profile of a cell: one worker, then two, for at most a minute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from etrain_jupyter.config import parse_mapping
from etrain_jupyter.errors import JobFailedError
from etrain_jupyter.notebook.job.profile import measure_steps, profile_config
from etrain_jupyter.notebook.job.training_job import TrainingJob


class Job:
    """A job that trains a step each time its clock advances."""

    def __init__(self, *, step_s: float, length: int = 10**6, batch: int = 8) -> None:
        self.step_s, self.length, self.batch = step_s, length, batch
        self.time, self.worlds = 0.0, [1]
        self.workers, self.status = 1, "running"
        self.asked: list[str] = []
        self.failure: Exception | None = None

    @property
    def step(self) -> int:
        return len(self.worlds)

    def history(self) -> dict[str, list[int]]:
        return {"world_size": self.worlds, "samples": [self.batch] * self.step}

    def scale(self, *, max: int) -> None:
        self.asked.append(f"scale {max}")
        self.workers = max

    def stop(self, *, now: bool) -> None:
        self.asked.append("stop")
        self.status = "stopped"

    def raise_for_status(self) -> None:
        if self.failure:
            raise self.failure

    def wait(self, *, until: Callable[[Any], bool] | None = None) -> None:
        while until is not None and not until(self):
            self.time += self.step_s
            self.worlds.append(self.workers)
            if len(self.worlds) >= self.length:
                self.status = "failed" if self.failure else "finished"


def profile(job: Job, *, max_workers: int = 4) -> Job:
    """Measure a job by its own clock."""
    measure_steps(cast(TrainingJob, job), max_workers=max_workers, now=lambda: job.time)
    return job


def test_fast_steps_are_counted() -> None:
    job = profile(Job(step_s=0.01))

    assert (job.worlds.count(1), job.worlds.count(2)) == (60, 60)
    assert job.asked == ["scale 2", "stop"]


def test_slow_steps_are_timed() -> None:
    job = profile(Job(step_s=1.0))

    assert (job.worlds.count(1), job.worlds.count(2)) == (16, 16)


@pytest.mark.parametrize("step_s", [5.0, 11.0, 30.0])
def test_profile_lasts_a_minute_and_the_step_that_runs(step_s: float) -> None:
    job = profile(Job(step_s=step_s))

    assert job.time <= 60.0 + step_s
    assert job.asked[-1] == "stop"


@pytest.mark.parametrize(("max_workers", "batch"), [(1, 8), (4, 1)])
def test_second_worker_is_not_used_where_the_cell_has_no_place_for_it(
    max_workers: int, batch: int
) -> None:
    job = profile(Job(step_s=0.01, batch=batch), max_workers=max_workers)

    assert job.asked == ["stop"]
    assert set(job.worlds) == {1}


def test_job_that_finishes_first_is_not_stopped() -> None:
    job = profile(Job(step_s=0.01, length=5))

    assert job.asked == []
    assert job.status == "finished"


def test_failure_is_raised() -> None:
    job = Job(step_s=0.01, length=5)
    job.failure = JobFailedError("no")

    with pytest.raises(JobFailedError):
        profile(job)


def test_interrupt_stops_the_job() -> None:
    job = Job(step_s=0.01)

    def interrupted(**_: Any) -> None:
        if not job.asked:
            raise KeyboardInterrupt

    job.wait = interrupted  # type: ignore[method-assign]

    with pytest.raises(KeyboardInterrupt):
        profile(job)

    assert job.asked == ["stop"]


def test_profile_keeps_the_length_but_not_the_name_workers_and_checkpoints() -> None:
    names = {"net": object, "xs": [1], "mse": min}
    body = {
        "model": "net", "data": {"train": "xs"}, "loss": "mse", "name": "digits", "epochs": 3,
        "workers": {"min": 2, "max": 4}, "checkpoint": {"every": "5 steps"},
    }  # fmt: skip
    config = parse_mapping(body, names).config

    changed = profile_config(config)

    assert (changed.name, changed.epochs) == ("digits-profile", 3)
    assert (changed.workers.min, changed.max_workers()) == (1, 1)
    assert changed.checkpoint.every is not None
    assert changed.checkpoint.every.value == 1e9
    assert config.name == "digits"
