"""Work plan of a job, and schedules for actions that repeat during training."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from etrain_jupyter.config.schema import Interval, TrainConfig
from etrain_jupyter.rules.policy.lr_schedule import LrSchedule
from etrain_jupyter.rules.samples import ledger
from etrain_jupyter.rules.samples.block_order import BlockLayout
from etrain_jupyter.trainer.workload import Workload


@dataclass(frozen=True, kw_only=True)
class WorkPlan:
    """Describes the work in a job; a pure function of the config and the lengths of the data."""

    num_train: int
    """Number of samples in the training set."""
    num_eval: int
    """Number of samples in the evaluation set; 0 if there is none."""
    global_batch_size: int
    """Samples per step. If it depends on the number of workers, the value for
    ``scaling.base_workers``."""
    steps_per_epoch: int
    """Steps per epoch at ``global_batch_size``."""
    total_steps: int
    """Steps of the job at ``global_batch_size``."""
    layout: BlockLayout | None = None
    """Blocks of the training set; None if it is in memory."""

    @classmethod
    def of(cls, config: TrainConfig, workload: Workload) -> WorkPlan:
        """Return the plan of a job."""
        base_workers = config.scaling.base_workers if config.scaling is not None else 1
        num_train, size = len(workload.train), config.batch.size(base_workers)
        return cls(
            num_train=num_train,
            num_eval=len(workload.eval) if workload.eval is not None else 0,
            global_batch_size=size,
            steps_per_epoch=ledger.steps_per_epoch(num_train, size),
            total_steps=ledger.total_steps(config.epochs, config.steps, num_train, size),
            layout=workload.train.layout,
        )

    @cached_property
    def end(self) -> int:
        """Number of samples that the job trains on, over all epochs."""
        return ledger.position_after(self.total_steps, self.num_train, self.global_batch_size)

    def span(self, position: int, batch_size: int) -> ledger.StepRange:
        """Return the samples of the next step: a full batch, or the rest of its epoch or the job.

        Args:
            position: Samples trained on before the step, over all epochs.
            batch_size: Samples of a full step.
        """
        return ledger.range_at(
            position, num_samples=self.num_train, global_batch_size=batch_size, end=self.end
        )

    def is_boundary(self, position: int) -> bool:
        """Return True if an epoch or the job ends at ``position``."""
        return position % self.num_train == 0 or position == self.end


class Mark(NamedTuple):
    """Progress of a job at a step boundary."""

    step: int
    """Number of committed steps."""
    position: int
    """Number of samples trained on, over all epochs."""


def lr_schedule_of(config: TrainConfig, plan: WorkPlan) -> LrSchedule | None:
    """Return the job's learning-rate schedule; None if the rate is constant."""
    schedule = config.schedule
    if schedule is None:
        return None
    warmup = 0
    if schedule.warmup is not None:
        samples = {"steps": plan.global_batch_size, "epochs": plan.num_train}[schedule.warmup.unit]
        warmup = round(schedule.warmup.value * samples)
    return LrSchedule(warmup=warmup, decay=schedule.decay, end=plan.end)


class Every:
    """Schedule for an action that repeats every N steps, epochs or seconds.

    Queries have no side effects. The time is passed as an argument, a ``time.monotonic`` value.
    """

    def __init__(self, interval: Interval, plan: WorkPlan, *, now: float) -> None:
        self._interval, self._num_train = interval, plan.num_train
        self._seconds = interval.value if interval.unit == "s" else 0.0
        self._last_at = now

    def is_due(self, before: Mark, after: Mark, *, now: float) -> bool:
        """Return True if the action is due after the step from ``before`` to ``after``."""
        return self.is_time_over(now) or self.is_passed(before, after)

    def is_passed(self, before: Mark, after: Mark) -> bool:
        """Return True if the step reached a multiple of the interval in steps or epochs."""
        # Compare counts, not remainders: a step may pass a multiple without hitting it.
        return self._num_until(after) > self._num_until(before)

    def _num_until(self, mark: Mark) -> int:
        return self._interval.num_passed(
            step=mark.step, position=mark.position, num_train=self._num_train
        )

    def is_time_over(self, now: float) -> bool:
        """Return True if the interval is in seconds and has elapsed."""
        return bool(self._seconds) and now - self._last_at >= self._seconds

    def restart(self, now: float) -> None:
        """Restart the interval in seconds."""
        self._last_at = now
