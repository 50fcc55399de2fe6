"""Read the parts of a job's steps from its log."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from etrain_jupyter.errors import ConfigError
from etrain_jupyter.insight.diagnosis.rules import MIN_STEPS, Round, StepParts
from etrain_jupyter.insight.measures import Columns, to_floats
from etrain_jupyter.insight.runs import Job, PricedRecord
from etrain_jupyter.log.events import (
    CheckpointCommitted,
    Event,
    RankTimed,
    WorkerJoined,
)
from etrain_jupyter.rules.sizing.step_time import exchange_of

MIN_SMALL_STEPS = 3
"""Minimum number of smaller steps to know their duration."""
SMALL_BATCH = 0.75
"""Largest size of a smaller step relative to a full one."""


@dataclass(frozen=True, kw_only=True)
class Saves:
    """Checkpoints that were written in the background of some steps."""

    steps_between: float = math.nan
    """Mean number of steps from one checkpoint to the next one; NaN with fewer than two."""
    writing_s: float = 0.0
    """Time per step in which a checkpoint was being written, in seconds."""
    slowed_s: float = 0.0
    """Time per step by which this slowed down training, in seconds; also 0 if it was not measured,
    because nearly all steps ran during a write."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Parts of the steps of one generation."""

    workers: tuple[StepParts, ...]
    """Mean parts of a step on each worker, in rank order."""
    rounds: tuple[Round, ...]
    """Mean parts of the steps between two reports."""
    generation: int
    num_steps: int
    """Number of steps of each worker."""
    last_step: int
    fixed_s: float | None
    """Part of the passes that does not depend on the number of samples; None if all steps had
    the same number of samples."""
    saves: Saves = Saves()
    """Checkpoints in these steps."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """JSON form of the job's TrainConfig."""
    share_cores: bool = False
    """True if all workers are CPU slots of the machine with the scheduler."""
    gradient_bytes: float | None = None
    """Bytes of one worker's gradients as they are sent; None if the log has no size."""
    model_size: str = ""
    """Parameters of the model as text; empty if the log has no size."""


def read_step_times(job: Job) -> Measured:
    """Return the parts of the steps of a job's newest generation that has enough of them.

    Raises:
        ConfigError: If the job has no steps, or no worker has reported its times yet.
    """
    record = _TimesRecord().apply_all(job.events())
    reports, joined = record.reports, record.joined
    places = {worker: _place_of(event) for worker, event in joined.items()}
    columns = job.history()
    if not reports:
        raise _no_times(job, num_steps=len(columns["step"]))
    generation = _choose_generation(reports)
    by_rank = _by_rank(reports[generation])
    num_steps = min(sum(one.num_steps for one in mine) for mine in by_rank.values())
    last_step = max(one.step for one in reports[generation])
    saves = _saves_of(
        [one for one in record.written if last_step - num_steps < one.step <= last_step], num_steps
    )
    totals = {rank: _parts(mine, places, saves) for rank, mine in by_rank.items()}
    rounds = [
        Round(
            workers=tuple(_parts([one], places, saves) for one in same),
            num_steps=min(one.num_steps for one in same),
        )
        for same in zip(*by_rank.values(), strict=False)
    ]
    return Measured(
        workers=tuple(totals.values()),
        rounds=tuple(rounds),
        generation=generation,
        num_steps=num_steps,
        last_step=last_step,
        fixed_s=fixed_time(columns, generation),
        saves=saves,
        config=record.config,
        share_cores=all(
            one.worker in joined and _is_local_slot(joined[one.worker]) for one in totals.values()
        ),
        gradient_bytes=_gradient_bytes(record),
        model_size=record.plan.model_size if record.plan is not None else "",
    )


class _TimesRecord(PricedRecord):
    """Record of a job with the reports of its workers and its checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.reports: dict[int, list[RankTimed]] = {}
        """Reports by generation."""
        self.joined: dict[str, WorkerJoined] = {}
        self.written: list[CheckpointCommitted] = []

    def apply(self, event: Event) -> Self:
        """Add the next event of the log."""
        match event:
            case WorkerJoined():
                self.joined[event.worker] = event
            # A report without steps has only evaluations and checkpoints.
            case RankTimed(num_steps=steps) if steps > 0:
                self.reports.setdefault(event.generation, []).append(event)
            case CheckpointCommitted():
                self.written.append(event)
        return super().apply(event)


def _gradient_bytes(record: PricedRecord) -> float | None:
    if record.plan is None or not record.plan.num_parameters:
        return None
    compression = str(record.config.get("compression") or "none")
    exchange = exchange_of(
        num_parameters=record.plan.num_trained_parameters, compression=compression, passes=1
    )
    return exchange.num_bytes


def _no_times(job: Job, *, num_steps: int) -> ConfigError:
    if not num_steps:
        return ConfigError(
            f"job {job.id} has no steps (status {job.status}), so there is nothing to diagnose",
            hint=f"wait for its first steps; %etrain logs {job.id} shows its log",
        )
    return ConfigError(
        f"job {job.id} has {num_steps:,} step{'s' * (num_steps > 1)}, but no worker has reported "
        "its times yet",
        hint="workers report every few seconds and at the end of each generation: try again later",
    )


def _host_of(event: WorkerJoined) -> str:
    # tls://10.0.3.7:40231 -> 10.0.3.7
    return event.address.rpartition("://")[2].rpartition(":")[0]


def _is_local_slot(event: WorkerJoined) -> bool:
    return event.device == "cpu" and not event.machine and _host_of(event).startswith("127.")


def _place_of(event: WorkerJoined) -> str:
    host, machine = _host_of(event), event.machine
    return f"{host} ({machine})" if host and machine else host or machine


def _choose_generation(reports: Mapping[int, Sequence[RankTimed]]) -> int:
    # | generations with times                | chosen
    # |---------------------------------------|-----------------------------------------------
    # | some have MIN_STEPS steps on each rank| the newest of them: it shows the current state
    # | none                                  | the one with the most steps
    steps = {generation: _num_steps(mine) for generation, mine in reports.items()}
    long = [generation for generation, count in steps.items() if count >= MIN_STEPS]
    return max(long) if long else max(steps, key=lambda generation: (steps[generation], generation))


def _num_steps(reports: Iterable[RankTimed]) -> int:
    return min(sum(one.num_steps for one in mine) for mine in _by_rank(list(reports)).values())


def _by_rank(reports: Sequence[RankTimed]) -> dict[int, list[RankTimed]]:
    by_rank: dict[int, list[RankTimed]] = {}
    for one in sorted(reports, key=lambda report: report.rank):
        by_rank.setdefault(one.rank, []).append(one)
    # The first report includes the first steps, in which buffers are allocated and caches filled.
    later = {rank: mine[1:] for rank, mine in by_rank.items()}
    is_enough = all(sum(one.num_steps for one in mine) >= MIN_STEPS for mine in later.values())
    return later if is_enough else by_rank


def _saves_of(written: Sequence[CheckpointCommitted], num_steps: int) -> Saves:
    if not written:
        return Saves()
    steps = sorted(one.step for one in written)
    return Saves(
        steps_between=(steps[-1] - steps[0]) / (len(steps) - 1) if len(steps) > 1 else math.nan,
        writing_s=sum(_seconds(one.duration_s) for one in written) / num_steps,
        slowed_s=sum(_seconds(one.slowed_s) for one in written) / num_steps,
    )


def _parts(reports: Sequence[RankTimed], places: Mapping[str, str], saves: Saves) -> StepParts:
    num_steps = sum(one.num_steps for one in reports)

    def mean(name: str) -> float:
        return sum(_seconds(getattr(one, name)) for one in reports) / num_steps

    def mean_if_known(name: str, most_s: float) -> float | None:
        known = all(getattr(one, name) is not None for one in reports)
        return min(mean(name), most_s) if known else None

    compute_s, communication_s = mean("compute_s"), mean("communication_s")
    data_s, optimizer_s = mean("data_s"), mean("optimizer_s")
    metrics_s = mean_if_known("metrics_s", compute_s)
    spent_s = data_s + compute_s + communication_s + optimizer_s
    worker = reports[-1].worker
    return StepParts(
        worker=worker,
        place=places.get(worker, ""),
        data_s=data_s,
        passes_s=compute_s - (metrics_s or 0.0),
        metrics_s=metrics_s,
        communication_s=communication_s,
        wait_s=min(mean("wait_s"), communication_s),
        optimizer_s=optimizer_s,
        # Separate clock readings may add up to slightly more than the elapsed time.
        rest_s=max(0.0, mean("elapsed_s") - spent_s),
        evaluation_s=mean("evaluation_s"),
        checkpoint_s=mean("checkpoint_s"),
        # Rank 0 measures it, and the other ranks wait for rank 0.
        slowed_s=saves.slowed_s,
        core_wait_s=mean_if_known("core_wait_s", math.inf),
        cpu_s=mean("cpu_s"),
    )


def _seconds(value: float | None) -> float:
    # A log may come from another user.
    return float(value) if value is not None and math.isfinite(value) and value > 0 else 0.0


def fixed_time(columns: Columns, generation: int) -> float | None:
    """Return the seconds of rank 0's passes that do not depend on the number of samples.

    The last step of an epoch is often smaller than the others. The median times of full and of
    smaller steps define a line: the time of the passes over the number of samples.

    Args:
        columns: Columns of ``job.history()``.
        generation: The generation to look at, because the time depends on the number of workers.

    Returns:
        The line's value at 0 samples, at least 0; None if the smaller steps are too few.
    """
    is_here = to_floats(columns["generation"]) == generation
    samples, passes = to_floats(columns["samples"])[is_here], to_floats(columns["compute_s"])
    passes = passes[is_here]
    if not len(samples):
        return None
    full = float(samples.max())
    small = samples <= SMALL_BATCH * full
    # Take one size: the most frequent one.
    sizes, counts = np.unique(samples[small], return_counts=True)
    if not len(sizes) or counts.max() < MIN_SMALL_STEPS:
        return None
    size = float(sizes[counts.argmax()])
    full_s = float(np.median(passes[samples == full]))
    small_s = float(np.median(passes[samples == size]))
    if not (math.isfinite(full_s) and math.isfinite(small_s)):
        return None
    return min(full_s, max(0.0, small_s - (full_s - small_s) * size / (full - size)))
