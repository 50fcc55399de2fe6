"""How much there is to do, and when what repeats is due."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from etrain_jupyter.config.schema import Interval, TrainConfig
from etrain_jupyter.rules.policy.checkpoint_interval import FIRST_S
from etrain_jupyter.rules.policy.lr_schedule import LrSchedule
from etrain_jupyter.rules.samples import ledger
from etrain_jupyter.trainer.workload import Workload
from etrain_jupyter.wire.messages import PaceUpdate

RETRY_S = 30.0
"""When a checkpoint that failed is tried again, if the next one is not due before."""


@dataclass(frozen=True, kw_only=True)
class WorkPlan:
    """How much there is to do: a pure function of the config and the lengths of the data."""

    num_train: int
    num_eval: int
    global_batch_size: int
    """Of a step; where that changes with the workers, as many as ``scaling.base_workers`` make."""
    steps_per_epoch: int
    """At that batch size."""
    total_steps: int
    """At that batch size."""

    @classmethod
    def of(cls, config: TrainConfig, workload: Workload) -> WorkPlan:
        """Count the work of a job."""
        base_workers = config.scaling.base_workers if config.scaling is not None else 1
        num_train, size = len(workload.train), config.batch.size(base_workers)
        return cls(
            num_train=num_train,
            num_eval=len(workload.eval) if workload.eval is not None else 0,
            global_batch_size=size,
            steps_per_epoch=ledger.steps_per_epoch(num_train, size),
            total_steps=ledger.total_steps(config.epochs, config.steps, num_train, size),
        )

    @cached_property
    def end(self) -> int:
        """Samples that the whole job trains, over all epochs."""
        return ledger.position_after(self.total_steps, self.num_train, self.global_batch_size)

    def span(self, position: int, batch_size: int) -> ledger.StepRange:
        """Return what the next update trains: a batch, or what is left of its epoch or the job.

        Args:
            position: Samples trained before it, over all epochs.
            batch_size: Samples of a full step.
        """
        return ledger.range_at(
            position, num_samples=self.num_train, global_batch_size=batch_size, end=self.end
        )

    def is_boundary(self, position: int) -> bool:
        """Whether an epoch ends there, or the job."""
        return position % self.num_train == 0 or position == self.end


class Mark(NamedTuple):
    """Where a job stands between two steps."""

    step: int
    """Updates so far."""
    position: int
    """Samples trained so far, over all epochs."""


def lr_schedule_of(config: TrainConfig, plan: WorkPlan) -> LrSchedule | None:
    """Return how the learning rate of a job changes; None if it stays."""
    asked = config.schedule
    if asked is None:
        return None
    warmup = 0
    if asked.warmup is not None:
        samples = {"steps": plan.global_batch_size, "epochs": plan.num_train}[asked.warmup.unit]
        warmup = round(asked.warmup.value * samples)
    return LrSchedule(warmup=warmup, decay=asked.decay, end=plan.end)


class Every:
    """When something that repeats is due: at fixed steps, or when its time is over."""

    def __init__(self, interval: Interval, plan: WorkPlan) -> None:
        self._steps = interval.value if interval.unit == "steps" else 0.0
        self._samples = interval.value * plan.num_train if interval.unit == "epochs" else 0.0
        self._seconds = interval.value if interval.unit == "s" else 0.0
        self._last_at = time.monotonic()

    def is_due(self, before: Mark, now: Mark) -> bool:
        """Whether it is due at the boundary between the step that led to ``now`` and the next."""
        return self.is_time_over() or self.is_passed(before, now)

    def is_passed(self, before: Mark, now: Mark) -> bool:
        """Whether that step reached one of its places, by steps or by epochs."""
        return self._num_until(now) > self._num_until(before)

    def _num_until(self, mark: Mark) -> int:
        if self._steps:
            return math.floor(mark.step / self._steps + 1e-9)
        return math.floor(mark.position / self._samples + 1e-9) if self._samples else 0

    def is_time_over(self) -> bool:
        """Whether it repeats by time, and its time is over."""
        return bool(self._seconds) and time.monotonic() - self._last_at >= self._seconds

    def restart(self) -> None:
        """Count the time from now."""
        self._last_at = time.monotonic()


class CheckpointPace:
    """When ``checkpoint.every: auto`` is due: by an interval that the coordinator chooses.

    The control thread sets it and the main thread asks; both only read and write single numbers.
    """

    def __init__(self) -> None:
        self.interval_s = FIRST_S
        self._last_at = time.monotonic()

    def adopt(self, pace: PaceUpdate) -> None:
        """Take over how often to save, and how old the newest checkpoint is if that is given."""
        self.interval_s = pace.interval_s
        if pace.age_s is not None:
            self._last_at = time.monotonic() - pace.age_s

    def is_due(self) -> bool:
        """Whether the newest checkpoint is old enough."""
        return time.monotonic() - self._last_at >= self.interval_s

    def restart(self) -> None:
        """Count the time from now: a checkpoint begins."""
        self._last_at = time.monotonic()

    def hurry(self) -> None:
        """One has failed: do not wait for the whole interval, the store may be back soon."""
        self._last_at = time.monotonic() - max(0.0, self.interval_s - RETRY_S)
