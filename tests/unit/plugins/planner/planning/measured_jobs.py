"""Jobs that never ran: logs made from the model of step times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from etrain_jupyter.log import events as t
from etrain_jupyter.rules.sizing.step_time import StepTimeModel
from tests.unit.insight.logged_jobs import CONFIG, START, LoggedJob, steps_of
from tests.unit.log.spent import NOTHING_ELSE

NUM_STEPS = 20


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
) -> LoggedJob:
    """Return a job that ran ``NUM_STEPS`` steps at each number of workers and samples per step.

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
    """
    job_id = f"{name}-00000000"
    common: dict[str, Any] = {"job_id": job_id, "time": START - 60}
    most = max((workers for workers, _ in at), default=1)
    first = at[0] if at else (1, 32)
    beginning: list[t.Event] = [
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
    ]  # fmt: skip
    job = LoggedJob(job_id, name, status=status)
    job.log.extend([event.with_seq(seq) for seq, event in enumerate(beginning, 1)])
    step, now = 1, START
    for generation, (workers, samples) in enumerate(at, 1):
        predicted = model.predict(workers, samples / workers)
        phases = {
            "generation": generation,
            "compute_s": predicted.step_s - predicted.exposed_s,
            "communication_s": predicted.exposed_s,
        }
        formed = t.GenerationFormed(
            job_id=job_id, time=now, generation=generation, why="start", world_size=workers,
            ranks=[f"w{number}" for number in range(workers)], step=step - 1, backend="gloo",
        )  # fmt: skip
        job.log.extend([formed.with_seq(len(job.log) + 1)])
        job.log.add_block(
            steps_of(
                job_id, len(job.log) + 1, num_steps=NUM_STEPS, batch=samples, workers=workers,
                step_s=predicted.step_s, phases=phases, first_step=step, began_at=now,
            )
        )  # fmt: skip
        step += NUM_STEPS
        elapsed_s = NUM_STEPS * predicted.step_s
        now += elapsed_s
        timed = t.RankTimed(
            job_id=job_id, time=now, generation=generation, worker="w0", rank=0,
            world_size=workers, step=step - 1, num_steps=NUM_STEPS, samples=samples * NUM_STEPS,
            elapsed_s=elapsed_s, data_s=0.0, compute_s=phases["compute_s"] * NUM_STEPS,
            communication_s=predicted.exposed_s * NUM_STEPS, optimizer_s=0.0,
            noise_variance=noise[0] if noise else None,
            noise_square_norm=noise[1] if noise else None,
            **(NOTHING_ELSE | {"evaluation_s": evaluation_share * elapsed_s}),
        )  # fmt: skip
        job.log.extend([timed.with_seq(len(job.log) + 1)])
    return job
