"""Parts of a step by worker, and the time that a step would save without one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, get_args

Cause = Literal[
    "overhead", "straggler", "input", "communication", "compute", "optimizer", "metrics",
    "evaluation", "checkpoint",
]  # fmt: skip
"""Reasons for which a job is slow."""
CAUSES: tuple[Cause, ...] = get_args(Cause)

SLOW_FACTOR = 1.2
"""A worker is a straggler if its own time exceeds that of every other worker by this factor."""
FIXED_SHARE = 2 / 3
"""Share of the passes that does not depend on the number of samples, from which a batch counts as
tiny: a batch four times as large then takes less than twice the time."""


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """Mean durations of the parts of a step on one worker, in seconds."""

    worker: str
    place: str = ""
    """Its host and the type of its machine, for display."""
    data_s: float
    """Waiting for samples."""
    passes_s: float
    """Forward and backward passes, without metrics if these were measured."""
    metrics_s: float | None
    """The cell's metrics; None on a GPU, where they are not measured."""
    communication_s: float
    """Exposed communication: transfer, and waiting for slower workers."""
    wait_s: float
    """Part of ``communication_s``: waiting for slower workers."""
    optimizer_s: float
    """The update."""
    rest_s: float
    """The remainder of the step, which is overhead of the training loop."""
    evaluation_s: float = 0.0
    """Evaluations between the steps."""
    checkpoint_s: float = 0.0
    """Time for which checkpoints block training between the steps."""
    slowed_s: float = 0.0
    """Part of the other times: slower steps while a checkpoint is written in the background."""
    core_wait_s: float | None = None
    """Part of the other times: waiting for a core; None if not measured."""
    cpu_s: float = 0.0
    """Part of the other times: on a core, counted once for each thread."""

    @property
    def own_s(self) -> float:
        """Time that the worker needs for itself: the step without communication."""
        parts = self.data_s + self.passes_s + self.optimizer_s + self.rest_s
        return parts + (self.metrics_s or 0.0)

    @property
    def total_s(self) -> float:
        """Mean time from one step to the next one."""
        return self.own_s + self.communication_s + self.evaluation_s + self.checkpoint_s

    @property
    def transfer_s(self) -> float:
        """Exposed transfer of the gradients."""
        return self.communication_s - self.wait_s


def core_wait_of(workers: Sequence[StepParts]) -> float | None:
    """Return the part of the workers' own work in which they waited for a core, from 0 to 1.

    None if it was not measured on all workers.
    """
    waits = [one.core_wait_s for one in workers]
    known = [one for one in waits if one is not None]
    # A worker that waits for samples needs no core.
    work_s = sum(one.own_s - one.data_s for one in workers)
    if len(known) < len(waits) or work_s <= 0:
        return None
    return min(1.0, sum(known) / work_s)


def step_s(workers: Sequence[StepParts]) -> float:
    """Return the mean time from one step to the next one, in seconds."""
    return fmean(one.total_s for one in workers)


def transfer_s(workers: Sequence[StepParts]) -> float:
    """Return the exposed transfer in a step."""
    return fmean(one.transfer_s for one in workers)


def split_stragglers(
    workers: Sequence[StepParts],
) -> tuple[list[StepParts], list[StepParts]]:
    """Return the workers that hold up the others, and these others.

    At most a minority are stragglers (of two workers, one). Without a straggler, the first list is
    empty.
    """
    ranked = sorted(workers, key=lambda one: one.own_s)
    most = max(1, (len(ranked) - 1) // 2) if len(ranked) > 1 else 0
    for count in range(most, 0, -1):
        others, slow = ranked[:-count], ranked[-count:]
        if slow[0].own_s > SLOW_FACTOR * others[-1].own_s:
            return slow, others
    return [], ranked


def saved_s(workers: Sequence[StepParts], *, fixed_s: float | None = None) -> dict[Cause, float]:
    """Return the seconds that a step would save without each cause.

    The workers run in lockstep, so a step takes as long as the slowest worker and the transfer. A
    part that only one of several workers has therefore saves less than its mean.

    Args:
        workers: The parts of a step by worker, at least one.
        fixed_s: Part of ``passes_s`` that does not depend on the number of samples; None if it was
            not measured.

    Returns:
        Seconds by cause; a cause is missing if it was not measured. ``compute`` has the mean time
        of the passes, because no remedy removes all of it.
    """
    longest = max(one.own_s for one in workers)
    passes_s = fmean(one.passes_s for one in workers)
    rest_s = fmean(one.rest_s for one in workers)
    slow, others = split_stragglers(workers)
    found: dict[Cause, float] = {
        "input": longest - max(one.own_s - one.data_s for one in workers),
        "optimizer": longest - max(one.own_s - one.optimizer_s for one in workers),
        "compute": passes_s,
        # One worker evaluates or saves longer than the others, which wait for it.
        "evaluation": max(one.evaluation_s for one in workers),
        "checkpoint": max(one.checkpoint_s + one.slowed_s for one in workers),
        "overhead": rest_s,
        "communication": transfer_s(workers),
        "straggler": longest - max(one.own_s for one in others) if slow else 0.0,
    }
    if fixed_s is not None and fixed_s > FIXED_SHARE * passes_s:
        found["overhead"] += min(fixed_s, passes_s)
    metrics = [one.metrics_s for one in workers]
    if None not in metrics:
        found["metrics"] = longest - max(one.own_s - (one.metrics_s or 0.0) for one in workers)
    return {cause: max(0.0, seconds) for cause, seconds in found.items()}


def shares_of(workers: Sequence[StepParts], *, fixed_s: float | None = None) -> dict[Cause, float]:
    """Return ``saved_s`` relative to the time of a step, from 0 to 1."""
    whole_s = step_s(workers)
    if whole_s <= 0:
        return {}
    found = saved_s(workers, fixed_s=fixed_s)
    return {cause: min(1.0, seconds / whole_s) for cause, seconds in found.items()}
