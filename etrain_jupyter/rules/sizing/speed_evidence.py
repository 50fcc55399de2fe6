"""Fold a job's speed and gradient noise from its log, for ``rules.sizing.goodput``.

It uses only events, so a coordinator that resumes a job or takes it over knows its speed at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from etrain_jupyter.log import events as t
from etrain_jupyter.rules.learning_rate import GradientNoise
from etrain_jupyter.rules.sizing.goodput import GoodputTerms, progress_of
from etrain_jupyter.rules.sizing.step_time import (
    Exchange,
    Placement,
    StepPoint,
    exchange_of,
    fit_step_times,
    passes_of,
    step_point,
)

WARM_UP_STEPS = 3
"""The first steps of a generation are slower, so this many of them are left out."""
LEAST_STEPS, LEAST_S = 5, 5.0
"""A number of workers counts as measured after this many steps and seconds of training."""
KEEP_STEPS = 200
"""Only this many newest steps are used for each number of workers, so that rates follow changes."""


@dataclass(frozen=True, kw_only=True)
class SizingView:
    """Facts about the pool and the job that are not in the events."""

    min_workers: int
    max_workers: int
    placement: Placement = field(default_factory=Placement)
    usd_per_worker_h: float | None = None
    """None if the pool has no prices."""
    remaining_s: float | None = None
    """Seconds until the deadline; None without one."""


@dataclass
class _Steps:
    """The newest steps with one number of workers and samples."""

    durations: deque[float] = field(default_factory=lambda: deque(maxlen=KEEP_STEPS))
    exposed: deque[float] = field(default_factory=lambda: deque(maxlen=KEEP_STEPS))
    total_s: float = 0.0


class SpeedEvidence:
    """Folds a job's events; ``terms`` gives the inputs of the decision about its size."""

    def __init__(self) -> None:
        self._steps: dict[tuple[int, int], _Steps] = {}
        self._config: Mapping[str, Any] = {}
        self._plan: t.JobPlanned | None = None
        self._noise: GradientNoise | None = None
        self._num_since = 0  # steps since the newest generation began
        self._done: tuple[int, int] = (0, 0)  # newest epoch, and samples of it

    def fold(self, event: t.Event) -> None:
        """Add one event of the log."""
        match event:
            case t.JobSubmitted():
                self._config = event.config
            case t.JobResumed():
                self._config = event.config or self._config
            case t.JobPlanned():
                self._plan = event
            case t.GenerationFormed():
                self._num_since = 0
            case t.StepCompleted():
                self._take(event)
            case t.RankTimed(noise_variance=float(variance), noise_square_norm=float(norm)):
                self._noise = GradientNoise(variance=variance, square_norm=norm, num_estimates=1)
            case _:
                pass

    def _take(self, event: t.StepCompleted) -> None:
        self._num_since += 1
        self._done = (event.epoch, event.first + event.samples)
        if self._num_since <= WARM_UP_STEPS or event.samples_per_s <= 0:
            return
        steps = self._steps.setdefault((event.world_size, event.samples), _Steps())
        duration_s = event.samples / event.samples_per_s
        steps.durations.append(duration_s)
        steps.exposed.append(event.communication_s)
        steps.total_s += duration_s

    def points(self) -> dict[int, StepPoint]:
        """Return the measured step time of each number of workers, at its usual batch."""
        found: dict[int, StepPoint] = {}
        most: dict[int, float] = {}
        for (workers, samples), steps in sorted(self._steps.items()):
            enough = len(steps.durations) >= LEAST_STEPS and steps.total_s >= LEAST_S
            # The last step of an epoch is smaller, so use the batch with the most time.
            if not enough or steps.total_s < most.get(workers, 0.0):
                continue
            most[workers] = steps.total_s
            found[workers] = step_point(
                workers=workers,
                samples=samples,
                durations=steps.durations,
                exposed=steps.exposed,
            )
        return found

    def terms(self, view: SizingView) -> GoodputTerms:
        """Return the inputs of the decision: measured rates, and predictions for the others."""
        points, high = self.points(), view.max_workers
        plan = self._plan
        price = view.usd_per_worker_h
        if not points or plan is None:
            return GoodputTerms(
                min_workers=view.min_workers, max_workers=high, usd_per_worker_h=price
            )
        model = fit_step_times(list(points.values()), view.placement, self._exchange(plan))
        rates = [0.0]
        for workers in range(1, high + 1):
            samples = plan.batch_size_of(workers)
            known = points.get(workers)
            if known is not None:
                rates.append(known.batch * workers / known.step_s)
            else:
                rates.append(samples / model.predict(workers, samples / workers).step_s)
        return GoodputTerms(
            min_workers=view.min_workers,
            max_workers=high,
            rates=tuple(rates),
            measured=frozenset(points),
            is_exchange_known="exchange" not in model.unknown,
            progress=self._progress(plan, high),
            usd_per_worker_h=price,
            needed_rate=self._needed_rate(plan, view.remaining_s),
        )

    def _exchange(self, plan: t.JobPlanned) -> Exchange:
        return exchange_of(
            num_parameters=plan.num_trained_parameters,
            compression=str(self._config.get("compression") or "none"),
            passes=passes_of(self._config),
        )

    def _progress(self, plan: t.JobPlanned, high: int) -> tuple[float, ...] | None:
        if not plan.per_worker_batch_size:
            return (1.0,) * (high + 1)  # the batch never changes, and neither does its progress
        if self._noise is None:
            return None
        gains = [self._noise.gain(world_size=w, base_workers=1) for w in range(1, high + 1)]
        return progress_of((0.0, *gains))

    def _needed_rate(self, plan: t.JobPlanned, remaining_s: float | None) -> float:
        epoch, done = self._done
        left = plan.total_samples - epoch * plan.num_train_samples - done
        if remaining_s is None or left <= 0:
            return 0.0
        return left / max(remaining_s, 1.0)
