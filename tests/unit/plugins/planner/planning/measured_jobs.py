"""Jobs that never ran: logs made from true step times."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from etrain_jupyter.log import events as t
from etrain_jupyter.rules.sizing.step_time import Exchange, Placement, StepTimeModel
from tests.unit.insight.logged_jobs import CONFIG, START, LoggedJob
from tests.unit.log.spent import NOTHING_ELSE

if TYPE_CHECKING:
    from etrain_jupyter.plugins.planner.planning.options import Option

NUM_STEPS = 20
MLP_BYTES = 4e7


def model_of(
    placement: Placement, *, fixed_s: float, sample_s: float, s_per_byte: float
) -> StepTimeModel:
    """Return a model that overlaps half of the exchange with the backward pass."""
    return StepTimeModel(
        placement=placement,
        exchange=Exchange(num_bytes=MLP_BYTES, num_buckets=2),
        values=np.array([*map(math.log, (fixed_s, sample_s, 2e-4, s_per_byte)), 0.0]),
        covariance=np.zeros((5, 5)),
    )


CPU = model_of(Placement(cores=2), fixed_s=0.01, sample_s=0.001, s_per_byte=1 / 1.4e9)
"""Workers that share two cores."""
GPUS = model_of(Placement(workers_per_machine=1), fixed_s=0.01, sample_s=0.02, s_per_byte=8 / 2.5e9)
"""One GPU per machine, and 2.5 Gbit/s between them."""


def option(
    workers: int, hours: float, usd: float, *, error: float = 0.1, machine: str = "g5.xlarge"
) -> Option:
    """Return an option with a time and a cost: on spot machines, unless it has no price."""
    from etrain_jupyter.plugins.planner.planning.options import Option

    return Option(
        machine=machine, workers=workers, machines=workers,
        lifecycle="" if math.isnan(usd) else "spot", batch=64, step_s=0.1, samples_per_s=640.0,
        efficiency=1.0, statistical_efficiency=1.0, hours=hours, error=error, usd=usd,
        is_measured=False,
    )  # fmt: skip


def measured_job(
    model: StepTimeModel,
    at: Sequence[tuple[int, int]],
    *,
    machine: str = "",
    device: str = "cpu",
    lifecycle: str = "",
    usd_per_h: float | None = None,
    total_samples: int = 1_000_000,
    num_parameters: int = 10_000_000,
    num_trained: int = 0,
    per_worker: bool = False,
    status: str = "running",
    config: Mapping[str, Any] | None = None,
    evaluation_share: float = 0.0,
    noise: tuple[float, float] | None = None,
    name: str = "net",
    num_steps: int = NUM_STEPS,
    between_s: float = 0.0,
) -> LoggedJob:
    """Return a job that ran some steps at each number of workers and samples per step.

    Args:
        model: The true step times.
        at: Number of workers, and samples per step.
        machine: Type of all machines.
        device: Device of the workers.
        lifecycle: How the machines are paid.
        usd_per_h: Price of a worker.
        total_samples: Samples of the whole job.
        num_parameters: Parameters of the network.
        num_trained: Those that are trained; 0 for all.
        per_worker: True if the samples per step depend on the number of workers.
        status: Status of the job.
        config: Keys of the cell.
        evaluation_share: Time in evaluations, relative to the time in steps.
        noise: Variance of a worker's gradient and squared norm of the true one, if measured.
        name: Name of the job.
        num_steps: Number of steps at each of them.
        between_s: Time between two steps.
    """
    job_id = f"{name}-00000000"
    common: dict[str, Any] = {"job_id": job_id, "time": START - 60}
    most = max((workers for workers, _ in at), default=1)
    first = at[0] if at else (1, 32)
    job = LoggedJob(job_id, name, status=status)
    job.add(
        t.JobSubmitted(
            **common, name=name, min_workers=1, max_workers=most,
            config={**CONFIG, **(config or {})},
        ),
        *(
            t.WorkerJoined(
                **common, worker=f"w{number}", device=device, machine=machine,
                lifecycle=lifecycle, usd_per_h=usd_per_h,
            )
            for number in range(most)
        ),
        t.JobPlanned(
            **common, num_train_samples=total_samples // 10, num_eval_samples=0,
            global_batch_size=first[1], steps_per_epoch=total_samples // 10 // first[1],
            total_steps=total_samples // first[1], num_parameters=num_parameters,
            total_samples=total_samples, num_trained_parameters=num_trained or num_parameters,
            per_worker_batch_size=first[1] // first[0] if per_worker else 0,
        ),
    )  # fmt: skip
    step, now = 1, START
    for generation, (workers, samples) in enumerate(at, 1):
        predicted = model.predict(workers, samples / workers)
        phases = {
            "generation": generation,
            "compute_s": predicted.step_s - predicted.exposed_s,
            "communication_s": predicted.exposed_s,
        }
        job.add(
            t.GenerationFormed(
                job_id=job_id, time=now, generation=generation, why="start", world_size=workers,
                ranks=[f"w{number}" for number in range(workers)], step=step - 1, backend="gloo",
            )
        )  # fmt: skip
        job.add_steps(
            num_steps=num_steps, batch=samples, workers=workers, step_s=predicted.step_s,
            between_s=between_s, phases=phases, first_step=step, began_at=now,
        )  # fmt: skip
        step += num_steps
        elapsed_s = num_steps * predicted.step_s
        now += elapsed_s + num_steps * between_s
        job.add(
            t.RankTimed(
                job_id=job_id, time=now, generation=generation, worker="w0", rank=0,
                world_size=workers, step=step - 1, num_steps=num_steps, samples=samples * num_steps,
                elapsed_s=elapsed_s, data_s=0.0, compute_s=phases["compute_s"] * num_steps,
                communication_s=predicted.exposed_s * num_steps, optimizer_s=0.0,
                noise_variance=noise[0] if noise else None,
                noise_square_norm=noise[1] if noise else None,
                **(NOTHING_ELSE | {"evaluation_s": evaluation_share * elapsed_s}),
            )
        )  # fmt: skip
    return job
