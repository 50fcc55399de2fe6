"""Track the best evaluations and decide on early stopping.

All ranks get the same sums, so each makes the same decision without communication. A value that is
not finite is never better than another one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Mode = Literal["min", "max"]

KEEP_BEST = 32
"""Number of best evaluations to remember. If the weights of the best one are lost with the machine
that was saving them, the next best one counts."""


class EvaluationRecord(NamedTuple):
    """One measurement after a step."""

    step: int
    value: float


def is_better(value: float, than: float | None, *, mode: Mode, min_delta: float = 0.0) -> bool:
    """Return whether ``value`` improves on ``than`` by more than ``min_delta``.

    Args:
        value: The new value.
        than: The best earlier value; None if there is none.
        mode: ``min`` if lower is better, ``max`` if higher is better.
        min_delta: Improvements up to this size do not count.

    >>> [is_better(0.52, 0.5, mode="max", min_delta=d) for d in (0.0, 0.1)]
    [True, False]
    >>> is_better(math.nan, None, mode="min")
    False
    """
    if not math.isfinite(value):
        return False
    if than is None:
        return True
    gain = value - than if mode == "max" else than - value
    return gain > min_delta


def add_evaluation(
    best: Sequence[EvaluationRecord], found: EvaluationRecord, *, mode: Mode
) -> tuple[EvaluationRecord, ...]:
    """Add an evaluation; return the best ones, best first. Among equals, the earlier is better.

    >>> known = (EvaluationRecord(20, 0.9), EvaluationRecord(10, 0.7))
    >>> [e.step for e in add_evaluation(known, EvaluationRecord(30, 0.9), mode="max")]
    [20, 30, 10]
    """
    # A repeated evaluation of a step replaces the earlier one.
    others = [known for known in best if known.step != found.step]
    if not math.isfinite(found.value):
        return tuple(others)
    sign = -1.0 if mode == "max" else 1.0
    ranked = sorted([*others, found], key=lambda known: (sign * known.value, known.step))
    return tuple(ranked[:KEEP_BEST])


@dataclass(frozen=True, kw_only=True)
class Trend:
    """Best and newest evaluation of a metric, for early stopping."""

    best: float | None = None
    """None before the first finite one."""
    best_step: int = 0
    step: int = 0
    """Step of the newest evaluation."""
    num_stale: int = 0
    """Evaluations since the last improvement."""

    def after(self, found: EvaluationRecord, *, mode: Mode, min_delta: float) -> Trend:
        """Return the trend after one more evaluation."""
        # ``min_delta`` is measured from the best evaluation, so small gains add up until they
        # count.
        if is_better(found.value, self.best, mode=mode, min_delta=min_delta):
            return Trend(best=found.value, best_step=found.step, step=found.step)
        return dataclasses.replace(self, step=found.step, num_stale=self.num_stale + 1)


def describe_early_stop(trend: Trend, *, metric: str) -> str:
    """Explain why a job ends early.

    >>> trend = Trend(best=0.912, best_step=1200, step=1800, num_stale=3)
    >>> describe_early_stop(trend, metric="accuracy")
    'early stopping: accuracy has not improved in 3 evaluations since its best, 0.912 at step 1200'
    """
    since = "1 evaluation" if trend.num_stale == 1 else f"{trend.num_stale} evaluations"
    if trend.best is None:
        return f"early stopping: {metric} was not finite in {since}"
    return (
        f"early stopping: {metric} has not improved in {since} since its best, {trend.best:.4g} at "
        f"step {trend.best_step}"
    )
