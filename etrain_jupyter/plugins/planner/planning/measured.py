"""Read from a job's log what a plan needs: step times by hardware, and the work that is left."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from etrain_jupyter.errors import ConfigError
from etrain_jupyter.insight.measures import (
    Columns,
    clock_hours,
    divide,
    step_durations,
    to_floats,
)
from etrain_jupyter.insight.runs import Job, PricedRecord
from etrain_jupyter.log.events import (
    TERMINAL_STATUSES,
    Event,
    GenerationFormed,
    JobPlanned,
    RankTimed,
    WorkerJoined,
)
from etrain_jupyter.plugins.ec2.type_table import MACHINE_TYPES
from etrain_jupyter.rules.learning_rate import GradientNoise
from etrain_jupyter.rules.sizing.step_time import (
    Exchange,
    StepPoint,
    exchange_of,
    passes_of,
    step_point,
)

WARM_UP_STEPS = 3
"""The first steps of a generation are slower; they are left out if enough others remain."""
MIN_STEPS = 3
"""A median of at least this many steps counts as measured."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Machines on which steps were measured."""

    machine: str
    """Type of the machine, for example ``g5.xlarge``, or a device such as ``cpu``."""
    workers_per_machine: int
    """Workers that share a machine; 0 if all workers ran on one machine."""


@dataclass(frozen=True, kw_only=True)
class MeasuredJob:
    """A job as its log describes it."""

    job_id: str
    is_over: bool
    points: Mapping[Hardware, tuple[StepPoint, ...]]
    """Measured step times; at least one."""
    num_steps: int
    total_samples: float
    """Samples of the whole job."""
    samples_left: float
    """``total_samples`` if the job has ended, because the plan is then for a new run of it."""
    plan: JobPlanned
    """Samples per step, and parameters of the network."""
    compression: str = "none"
    passes: int = 1
    precision: str = "fp32"
    max_workers: int = 1
    outside_share: float = 0.0
    """Time in evaluations and checkpoints, relative to the time in steps."""
    log_hours: float = 0.0
    """From the beginning of the first step in the log to the end of the last one."""
    step_hours: float = 0.0
    """The part of ``log_hours`` in steps."""
    outside_hours: float = 0.0
    """The part of ``log_hours`` in evaluations and checkpoints."""
    usd_per_h: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Price of a worker by machine type and lifecycle, as its pool reported it."""
    noise: GradientNoise | None = None
    """Gradient noise of one worker's samples; None if it was not measured."""
    losses_per_node_hour: float = math.nan
    """Preempted and lost workers per worker hour; NaN if the job ran for less than an hour."""

    @property
    def unexplained_share(self) -> float:
        """Part of the time in the log in which the job neither trained, evaluated nor saved."""
        spent = self.step_hours + self.outside_hours
        return max(0.0, 1 - divide(spent, self.log_hours)) if self.log_hours > 0 else 0.0

    def batch_at(self, workers: int) -> float:
        """Return the samples per worker and step."""
        return self.plan.batch_size_of(workers) / workers

    @property
    def grows(self) -> bool:
        """True if the samples per step grow with the workers."""
        return bool(self.plan.per_worker_batch_size)

    def statistical_efficiency(self, workers: int) -> float:
        """Return the progress per sample, relative to a step of one worker; NaN if unknown.

        A step of ``W`` workers is worth ``gain`` steps of one worker (AdaScale), but has ``W``
        times the samples.
        """
        if not self.grows:
            return 1.0
        if self.noise is None:
            return math.nan
        return self.noise.gain(world_size=workers, base_workers=1) / workers

    def exchange(self, s_per_byte: float | None = None) -> Exchange:
        """Return the exchange of the gradients, over a network of known or unknown bandwidth."""
        return exchange_of(
            num_parameters=self.plan.num_trained_parameters,
            compression=self.compression,
            passes=self.passes,
            s_per_byte=s_per_byte,
        )


def read_measured(job: Job) -> MeasuredJob:
    """Fold the log of a job.

    Raises:
        ConfigError: If the job has no measured steps, or its log has no plan.
    """
    record = _PlanRecord().apply_all(job.events())
    columns = job.history()
    points = _points_by_hardware(columns, record)
    plan = record.plan
    if not points or plan is None:
        raise ConfigError(
            f"job {job.id} ({job.status}) has {len(columns['step'])} completed steps, so there is "
            "nothing to predict from. No plan was made",
            hint="let it train for about 30 s, first on one worker and then on two (%etrain scale "
            "2), and plan again",
        )
    done, total = float(sum(columns["samples"])), float(plan.total_samples)
    is_over = job.status in TERMINAL_STATUSES
    left = max(0.0, total - done)
    config = record.config
    return MeasuredJob(
        job_id=job.id,
        is_over=is_over,
        points=points,
        num_steps=len(columns["step"]),
        total_samples=total,
        # A job that was stopped or has failed can be resumed.
        samples_left=total if job.status == "finished" or left == 0 else left,
        plan=plan,
        compression=str(config.get("compression") or "none"),
        passes=passes_of(config),
        precision=str(config.get("precision") or "fp32"),
        max_workers=max(record.workers[1], max(map(int, columns["world_size"]))),
        outside_share=divide(record.outside_s, record.elapsed_s) if record.elapsed_s else 0.0,
        log_hours=float(clock_hours(columns, record.gaps)[-1]),
        step_hours=float(step_durations(columns).sum()) / 3600,
        outside_hours=record.outside_s / 3600,
        usd_per_h={
            (one.machine, one.lifecycle): one.usd_per_h
            for one in record.joined.values()
            if one.machine and one.usd_per_h is not None
        },
        losses_per_node_hour=_losses_of(columns, record),
        noise=record.noise,
    )


class _PlanRecord(PricedRecord):
    """Record of a job with its machines, their generations, and its time outside of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.joined: dict[str, WorkerJoined] = {}
        self.formed: dict[int, tuple[str, ...]] = {}
        """Workers by generation."""
        self.elapsed_s = 0.0
        self.outside_s = 0.0
        self.noise: GradientNoise | None = None

    def apply(self, event: Event) -> Self:
        """Add the next event of the log."""
        match event:
            case WorkerJoined():
                self.joined[event.worker] = event
            case GenerationFormed():
                self.formed[event.generation] = tuple(event.ranks)
            case RankTimed() if event.rank == 0:
                self.elapsed_s += event.elapsed_s
                self.outside_s += event.evaluation_s + event.checkpoint_s
                if event.noise_variance is not None and event.noise_square_norm is not None:
                    self.noise = GradientNoise(
                        variance=event.noise_variance,
                        square_norm=event.noise_square_norm,
                        num_estimates=1,
                    )
        return super().apply(event)

    def hardware_of(self, generation: int) -> Hardware:
        """Return the machines of a generation; different types are joined by ``+``."""
        ranks = self.formed.get(generation, ())
        joined = [self.joined[one] for one in ranks if one in self.joined]
        types = sorted({one.machine for one in joined} - {""})
        if types:
            per_machine = {MACHINE_TYPES[one].gpus if one in MACHINE_TYPES else 1 for one in types}
            return Hardware(machine="+".join(types), workers_per_machine=min(per_machine))
        devices = sorted({one.device for one in joined})
        return Hardware(machine="+".join(devices) or "unknown", workers_per_machine=0)


def _points_by_hardware(
    columns: Columns, record: _PlanRecord
) -> dict[Hardware, tuple[StepPoint, ...]]:
    if not len(columns["step"]):
        return {}
    generations = to_floats(columns["generation"])
    ran_on: dict[Hardware, list[float]] = {}
    for number in np.unique(generations).tolist():
        ran_on.setdefault(record.hardware_of(int(number)), []).append(number)
    found = {
        hardware: tuple(_points_of(columns, np.isin(generations, numbers)))
        for hardware, numbers in ran_on.items()
    }
    return {hardware: points for hardware, points in found.items() if points}


def _points_of(columns: Columns, ran: np.ndarray[Any, np.dtype[np.bool_]]) -> Iterator[StepPoint]:
    """Yield a point for each number of workers and samples among the steps that ``ran`` selects."""
    durations = step_durations(columns)
    exposed = to_floats(columns["communication_s"])
    worlds, samples = to_floats(columns["world_size"]), to_floats(columns["samples"])
    is_warm = _is_warm(to_floats(columns["generation"]))
    used = ran & (durations > 0) & (worlds >= 1) & (samples > 0)
    groups = np.unique(np.stack([worlds[used], samples[used]], axis=1), axis=0).tolist()
    counts = {
        (world, size): int((used & (worlds == world) & (samples == size)).sum())
        for world, size in groups
    }
    for (world, size), count in counts.items():
        # The last step of an epoch is smaller; a few such steps are not worth a point.
        if count < MIN_STEPS <= max(counts.values()):
            continue
        chosen = used & (worlds == world) & (samples == size)
        if (chosen & is_warm).sum() >= MIN_STEPS:
            chosen &= is_warm
        yield step_point(
            workers=int(world),
            samples=int(size),
            durations=durations[chosen].tolist(),
            exposed=exposed[chosen].tolist(),
        )


def _is_warm(generations: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, Any]:
    """Return True for the steps after the first ones of their generation."""
    starts = np.flatnonzero(np.diff(generations, prepend=math.nan) != 0)
    since = np.arange(len(generations)) - np.repeat(
        starts, np.diff([*starts.tolist(), len(generations)])
    )
    warm: np.ndarray[Any, Any] = since >= WARM_UP_STEPS
    return warm


def _losses_of(columns: Columns, record: _PlanRecord) -> float:
    worker_h = float((step_durations(columns) * to_floats(columns["world_size"])).sum()) / 3600
    if worker_h < 1.0 or not any(one.lifecycle == "spot" for one in record.joined.values()):
        return math.nan
    return (record.num_preempted + record.num_lost) / worker_h


def most_measured(measured: MeasuredJob, among: Sequence[str] = ()) -> Hardware:
    """Return the hardware with the most points, restricted to these types if any was measured."""
    known = [one for one in measured.points if one.machine in among] or list(measured.points)
    return max(known, key=lambda one: len(measured.points[one]))
