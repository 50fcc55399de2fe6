"""How much there is to do, and when what repeats is due."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from etrain_jupyter.config.schema import Interval, TrainConfig
from etrain_jupyter.elastic import ledger
from etrain_jupyter.ranks.workload import Workload


@dataclass(frozen=True, kw_only=True)
class WorkPlan:
    """How much there is to do: a pure function of the config and the lengths of the data."""

    num_train: int
    num_eval: int
    global_batch_size: int
    steps_per_epoch: int
    total_steps: int

    @classmethod
    def of(cls, config: TrainConfig, workload: Workload) -> WorkPlan:
        """Count the work of a job."""
        num_train, size = len(workload.train), config.batch.global_batch_size
        return cls(
            num_train=num_train,
            num_eval=len(workload.eval) if workload.eval is not None else 0,
            global_batch_size=size,
            steps_per_epoch=ledger.steps_per_epoch(num_train, size),
            total_steps=ledger.total_steps(config.epochs, config.steps, num_train, size),
        )

    def span(self, step: int) -> ledger.StepRange:
        """Return what the update after ``step`` committed ones trains."""
        return ledger.cursor_at(step, self.num_train, self.global_batch_size)


class Every:
    """When something that repeats is due: at fixed steps, or when its time is over."""

    def __init__(self, interval: Interval, plan: WorkPlan) -> None:
        per_unit = {"steps": 1.0, "epochs": float(plan.steps_per_epoch)}
        self._steps = per_unit.get(interval.unit, 0.0) * interval.value
        self._seconds = interval.value if interval.unit == "s" else 0.0
        self._last_at = time.monotonic()

    def times_until(self, step: int) -> int:
        """Return how often it was due up to and including ``step``, by steps."""
        return math.floor(step / self._steps + 1e-9) if self._steps else 0

    def is_due(self, step: int) -> bool:
        """Whether it is due at the boundary after ``step``."""
        return self.is_time_over() or self.is_at(step)

    def is_at(self, step: int) -> bool:
        """Whether it is due at the boundary after ``step`` by steps."""
        return self.times_until(step) > self.times_until(step - 1)

    def is_time_over(self) -> bool:
        """Whether it repeats by time, and its time is over."""
        return bool(self._seconds) and time.monotonic() - self._last_at >= self._seconds

    def restart(self) -> None:
        """Count the time from now."""
        self._last_at = time.monotonic()
