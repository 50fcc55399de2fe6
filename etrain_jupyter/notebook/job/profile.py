"""Profile a cell: train it for a short time on one and on two workers."""

from __future__ import annotations

import time
from collections.abc import Callable

from etrain_jupyter.config.fields import Interval
from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.log.events import TERMINAL_STATUSES
from etrain_jupyter.notebook.job.training_job import TrainingJob

PROFILE_S = 60.0
"""Maximum duration of a profile from its first step, in seconds."""
PART_S = 15.0
"""Time for the steps on each number of workers, in seconds, unless ``NUM_STEPS`` take less."""
NUM_STEPS = 60
"""Number of steps on each number of workers, including the slower first ones."""
MIN_STEPS = 6
"""Minimum number of these steps, even if they take longer than ``PART_S``."""


def profile_config(config: TrainConfig) -> TrainConfig:
    """Return the configuration of a profile: one worker, another name, and no checkpoints.

    The number of steps is kept, because the plan needs it and a schedule may depend on it.
    """
    never = Interval(value=1e9, unit="s")
    updates = {"every": never, "best": None}
    return config.model_copy(
        update={
            "name": f"{config.name or 'cell'}-profile",
            "workers": config.workers.model_copy(update={"min": 1, "max": 1}),
            "checkpoint": config.checkpoint.model_copy(update=updates),
        }
    )


def measure_steps(
    job: TrainingJob, *, max_workers: int, now: Callable[[], float] = time.monotonic
) -> None:
    """Train on one worker and then on two, and stop the job.

    An interrupt stops the job as well.

    Raises:
        JobFailedError: If the job fails.
        JobLostError: If its cluster ends.
    """
    try:
        # The time until a pool has started is not part of the profile.
        job.wait(until=lambda job: job.step >= 1 or job.status in TERMINAL_STATUSES)
        ends_at = now() + PROFILE_S
        _await_steps(job, workers=1, ends_at=ends_at, now=now)
        # Each worker needs a sample in each step.
        is_wide = max_workers >= 2 and job.history()["samples"][0] >= 2
        if is_wide and now() < ends_at and job.status not in TERMINAL_STATUSES:
            job.scale(max=2)
            _await_steps(job, workers=2, ends_at=ends_at, now=now)
        if job.status == "failed":
            job.raise_for_status()
    finally:
        if job.status not in TERMINAL_STATUSES:
            job.stop(now=True)
            job.wait()


def _await_steps(
    job: TrainingJob, *, workers: int, ends_at: float, now: Callable[[], float]
) -> None:
    """Wait for enough steps on a number of workers."""
    first_at: float | None = None

    def is_done(job: TrainingJob) -> bool:
        nonlocal first_at
        num_steps = sum(world == workers for world in job.history()["world_size"])
        if num_steps and first_at is None:
            first_at = now()
        has_lasted = first_at is not None and now() >= first_at + PART_S
        return (
            num_steps >= NUM_STEPS
            or (num_steps >= MIN_STEPS and has_lasted)
            or now() >= ends_at
            or job.status in TERMINAL_STATUSES
        )

    job.wait(until=is_done)
