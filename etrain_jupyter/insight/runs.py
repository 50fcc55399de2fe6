"""Fold the log of one job into the values that tables and curves show."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self, get_args

import numpy as np
from pydantic import ValidationError

from etrain_jupyter.config.differences import flat_keys
from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.errors import ConfigError
from etrain_jupyter.insight.measures import (
    Columns,
    Floats,
    busy_durations,
    clock_hours,
    divide,
    mean_workers,
    step_durations,
    to_floats,
)
from etrain_jupyter.log.events import CostUpdated, Event, JobResumed, JobSubmitted, WorkerJoined
from etrain_jupyter.log.job_record import JobRecord

Axis = Literal["steps", "samples", "time", "usd"]
"""Quantity on the horizontal axis: steps, samples trained on, hours, or US dollars."""
AXES: tuple[Axis, ...] = get_args(Axis)

LAST_STEPS = 10
"""Number of steps over which the final training loss is averaged."""
LOWER_IS_BETTER = ("loss", "error", "perplexity")
"""A metric whose name contains one of these is minimized, unless the cell says otherwise."""


class Job(Protocol):
    """The part of a ``TrainingJob`` that a comparison reads."""

    @property
    def id(self) -> str:
        """Id of the job."""

    @property
    def name(self) -> str:
        """Name of the job."""

    @property
    def status(self) -> str:
        """Status of the job."""

    def history(self) -> Columns:
        """Return columns with one row per committed step."""

    def events(self) -> Iterable[Event]:
        """Return the events of the log, in order."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """The task of a job. Scaling efficiency is computed only between jobs of one task."""

    model: str = ""
    """Expression in the cell."""
    data: str = ""
    """Expression of the training set in the cell."""
    loss: str = ""
    """Expression of the loss, or of the function that replaces it."""
    metrics: tuple[str, ...] = ()
    """Names of the metrics, sorted."""
    num_parameters: int = 0
    num_train_samples: int = 0

    def differences(self, other: Task) -> list[str]:
        """Return the names of the fields that differ, for a message."""
        return [
            name.removeprefix("num_").replace("_", " ")
            for name, value in vars(self).items()
            if value != getattr(other, name)
        ]


@dataclass(frozen=True, kw_only=True)
class Score:
    """Values of one metric over the evaluations of a job."""

    best: float
    final: float


class PricedRecord(JobRecord):
    """Record of a job with its prices over time, its machines and the gaps between attempts."""

    def __init__(self) -> None:
        super().__init__()
        self.config: Mapping[str, Any] = {}
        self.machines: dict[str, None] = {}
        self.costs: list[CostUpdated] = []
        """Cost over time; empty if the pool has no prices."""
        self.gaps: list[tuple[float, float]] = []
        """Beginning of an attempt, and the seconds since the end of the previous one."""

    def apply(self, event: Event) -> Self:
        """Add the next event of the log."""
        match event:
            case JobSubmitted():
                self.config = event.config
            case JobResumed():
                self.config = event.config or self.config
                self.gaps.append((event.time, max(0.0, event.time - self.changed_at)))
            case WorkerJoined():
                machine = event.machine or event.device
                self.machines[f"{machine} {event.lifecycle}".strip()] = None
            case CostUpdated():
                self.costs.append(event)
        return super().apply(event)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One job in a comparison."""

    job_id: str
    name: str
    status: str
    columns: Columns
    """Columns of ``job.history()``."""
    record: PricedRecord

    @property
    def config(self) -> Mapping[str, Any]:
        """JSON form of the job's TrainConfig."""
        return self.record.config

    @functools.cached_property
    def task(self) -> Task:
        """The task, as far as the log describes it."""
        config, plan = self.config, self.record.plan
        return Task(
            model=str(config.get("model") or ""),
            data=str(group_of(config, "data").get("train") or ""),
            loss=str(config.get("step") or config.get("loss") or ""),
            metrics=tuple(sorted(group_of(config, "metrics"))),
            num_parameters=plan.num_parameters if plan else 0,
            num_train_samples=plan.num_train_samples if plan else 0,
        )

    @property
    def device(self) -> str:
        """Types of the machines or devices in the order in which they joined, with commas."""
        return ", ".join(self.record.machines)

    @property
    def num_interruptions(self) -> int:
        """Number of workers that were preempted or lost."""
        return self.record.num_preempted + self.record.num_lost

    # --- size ---

    @property
    def num_steps(self) -> int:
        """Number of committed steps that belong to the job's state."""
        return len(self.columns["step"])

    @property
    def num_samples(self) -> int:
        """Number of samples in these steps."""
        return int(sum(self.columns["samples"]))

    # --- throughput ---

    @functools.cached_property
    def _busy_s(self) -> Floats:
        return busy_durations(self.columns)

    @functools.cached_property
    def workers(self) -> float:
        """Mean number of workers, weighted by time; NaN without steps."""
        return mean_workers(self.columns, self._busy_s)

    @property
    def samples_per_s(self) -> float:
        """Samples per second of step time, without loading, evaluation, saving and recovery."""
        return divide(self.num_samples, float(self._busy_s.sum()))

    @property
    def step_hours(self) -> float:
        """Total duration of the steps, in hours."""
        return float(step_durations(self.columns).sum()) / 3600

    # --- time and cost ---

    @functools.cached_property
    def clock_h(self) -> Floats:
        """Hours since the beginning of the first step, at the end of each step.

        The time between the end of an attempt and its resume does not count. Shape
        ``(num_steps,)``.
        """
        return clock_hours(self.columns, self.record.gaps)

    @property
    def hours(self) -> float:
        """Hours from the beginning of the first step to the end of the last; NaN without steps."""
        return float(self.clock_h[-1]) if self.num_steps else math.nan

    @property
    def has_prices(self) -> bool:
        """True if the pool has prices."""
        return bool(self.record.costs)

    @property
    def cost(self) -> CostUpdated | None:
        """Newest cost; None if the pool has no prices."""
        return self.record.costs[-1] if self.record.costs else None

    # --- curves ---

    def positions(self, over: Axis) -> Floats:
        """Return the position of each step on an axis, shape ``(num_steps,)``.

        Dollars are interpolated between the updates of the cost; they are NaN if the pool has no
        prices.
        """
        match over:
            case "steps":
                return to_floats(self.columns["step"])
            case "samples":
                return np.cumsum(to_floats(self.columns["samples"]))
            case "time":
                return self.clock_h
            case "usd":
                return self._usd_by_step()

    def _usd_by_step(self) -> Floats:
        if not self.record.costs:
            return np.full(self.num_steps, math.nan)
        # Processes with different clocks report the costs, so sort them by time.
        known = sorted((cost.time, cost.spent_usd) for cost in self.record.costs)
        if self.record.started_at < known[0][0]:
            known.insert(0, (self.record.started_at, 0.0))
        times, amounts = zip(*known, strict=True)
        return to_floats(np.interp(to_floats(self.columns["time"]), times, amounts))

    # --- metrics ---

    def scores(self) -> dict[str, Score]:
        """Return the best and the final value of each metric of the evaluations, by name."""
        found = {}
        for name, values in self.columns.items():
            known = to_floats(values) if name.startswith("eval_") else np.empty(0)
            known = known[~np.isnan(known)]
            if len(known):
                name = name.removeprefix("eval_")
                best = known.min() if self._is_minimized(name) else known.max()
                found[name] = Score(best=float(best), final=float(known[-1]))
        return found

    @property
    def train_loss(self) -> float:
        """Mean training loss of the last ``LAST_STEPS`` steps; NaN without steps."""
        losses = to_floats(self.columns["loss"])[-LAST_STEPS:]
        return float(losses.mean()) if len(losses) else math.nan

    def _is_minimized(self, metric: str) -> bool:
        # The cell says which direction is better in `checkpoint.best` and `early_stopping`.
        for rule in (
            group_of(group_of(self.config, "checkpoint"), "best"),
            group_of(self.config, "early_stopping"),
        ):
            if rule.get("metric") == metric:
                return rule.get("mode") == "min"
        return any(part in metric.lower() for part in LOWER_IS_BETTER)


def read_run(job: Job) -> Run:
    """Fold the log of a job."""
    record = PricedRecord().apply_all(job.events())
    return Run(
        job_id=job.id, name=job.name, status=job.status, columns=job.history(), record=record
    )


def group_of(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a group of a configuration; empty if it is missing or invalid."""
    # The log may be from another version, or another user may have written it.
    group = config.get(key)
    return group if isinstance(group, Mapping) else {}


def check_axis(word: str, runs: Sequence[Run]) -> Axis:
    """Return the axis with that name.

    Raises:
        ConfigError: If it is unknown, or if it is ``usd`` and no job has prices.
    """
    for axis in AXES:
        if axis == word:
            if axis == "usd" and not any(run.has_prices for run in runs):
                raise ConfigError(
                    "over='usd': the pools of these jobs have no prices",
                    hint="use over='steps', 'samples' or 'time'",
                )
            return axis
    raise ConfigError(f"over={word!r}: unknown axis", hint=f"known axes: {', '.join(AXES)}")


def config_by_key(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys of a job's configuration, as spelled in a cell, with their values as text."""
    try:
        values = TrainConfig.model_validate(config).model_dump(mode="json", by_alias=True)
    except ValidationError:
        values = dict(config)  # of another version: show its keys as they are in the log
    return {key: str(value) for key, value in flat_keys(values) if value not in (None, [])}
