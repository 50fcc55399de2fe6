"""Jobs that never ran: logs with the times of workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from etrain_jupyter.insight.diagnosis.rules import StepParts
from etrain_jupyter.log import events as t
from tests.unit.insight.logged_jobs import START, LoggedJob, logged_job
from tests.unit.log.spent import NOTHING_ELSE

PARTS = ("data_s", "compute_s", "communication_s", "optimizer_s")


def parts(worker: str = "w0", **seconds: float | None) -> StepParts:
    """Return the parts of a step; 10 ms of passes by default, all others 0."""
    values: dict[str, Any] = {
        "data_s": 0.0, "passes_s": 0.010, "metrics_s": 0.0, "communication_s": 0.0, "wait_s": 0.0,
        "optimizer_s": 0.0, "rest_s": 0.0, **seconds,
    }  # fmt: skip
    return StepParts(worker=worker, **values)


def lockstep(*workers: StepParts, transfer_s: float = 0.0) -> list[StepParts]:
    """Return the workers with the waits of a step that begins and ends on all of them together."""
    longest = max(one.own_s for one in workers)
    waits = [(one, longest - one.own_s) for one in workers]
    return [
        dataclasses.replace(one, communication_s=wait_s + transfer_s, wait_s=wait_s)
        for one, wait_s in waits
    ]


def job_with_times(
    times: Mapping[str, Mapping[str, float | None]],
    *,
    num_reports: int = 4,
    steps_per_report: int = 50,
    generation: int = 1,
    num_steps: int = 200,
    name: str = "digits",
    status: str = "finished",
    config: Mapping[str, Any] | None = None,
) -> LoggedJob:
    """Return a job whose workers have reported these mean times of a step."""
    job = logged_job(
        name, workers=len(times), num_steps=num_steps,
        config={"batch": {"global": 64}, **(config or {})},
    )  # fmt: skip
    job.status = status
    for number in range(1, num_reports + 1):
        for rank, (worker, parts_of_step) in enumerate(times.items()):
            if number == 1:
                job.add(joined(job, worker, rank))
            job.add(
                timed(
                    job, worker, rank, parts_of_step, num_steps=steps_per_report,
                    step=number * steps_per_report, world_size=len(times), generation=generation,
                )
            )  # fmt: skip
    return job


def joined(job: LoggedJob, worker: str, rank: int) -> t.WorkerJoined:
    address = f"tls://10.0.0.{rank + 1}:40000"
    return t.WorkerJoined(
        job_id=job.id, time=START, worker=worker, address=address, machine="g5.xlarge"
    )


def timed(
    job: LoggedJob,
    worker: str,
    rank: int,
    parts_of_step: Mapping[str, float | None],
    *,
    num_steps: int,
    step: int,
    world_size: int,
    generation: int = 1,
) -> t.RankTimed:
    """Return the report of a worker; ``elapsed_s`` is the sum of the parts unless it is given."""
    mean: dict[str, float | None] = {
        **dict.fromkeys(PARTS, 0.0), **NOTHING_ELSE, **parts_of_step,
    }  # fmt: skip
    mean.setdefault("elapsed_s", sum(mean[name] or 0.0 for name in PARTS))
    spent: dict[str, Any] = {
        name: None if value is None else value * num_steps for name, value in mean.items()
    }
    return t.RankTimed(
        job_id=job.id, time=START + step, generation=generation, worker=worker, rank=rank,
        world_size=world_size, step=step, num_steps=num_steps, samples=num_steps, **spent,
    )  # fmt: skip
