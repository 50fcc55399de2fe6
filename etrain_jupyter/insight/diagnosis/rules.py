"""Choose the cause that slows a job down, with its confidence, or abstain.

The inputs are the parts of a step on each worker. They determine how much time a step would save
without each cause.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal, get_args

Cause = Literal[
    "overhead", "straggler", "input", "communication", "compute", "optimizer", "metrics",
    "evaluation", "checkpoint",
]  # fmt: skip
"""Causes that can slow a job down."""
CAUSES: tuple[Cause, ...] = get_args(Cause)

SLOW_FACTOR = 1.2
"""A worker is a straggler if its own time exceeds that of every other worker by this factor."""
FIXED_SHARE = 2 / 3
"""A batch counts as tiny if at least this share of the passes does not depend on the number of
samples. A batch four times as large then takes at most twice the time."""


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """Mean durations of the parts of a step on one worker, in seconds."""

    worker: str
    place: str = ""
    """The worker's host and the type of its machine, for display."""
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
    """Return the stragglers, which hold up the other workers, and these other workers.

    Only a minority can be stragglers (or one of two workers). Without a straggler, the first list
    is empty.
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


# --- verdict --------------------------------------------------------------------------------------

Confidence = Literal["high", "medium", "low"]

NAMED_FROM = 0.2
"""Minimum share of a step for a cause to be the verdict."""
NOTED_FROM = 0.1
"""Minimum share of a step for another cause to be mentioned, if its interval excludes 0."""
COMPUTE_FROM = 0.5
"""Minimum share of the passes for a job without another cause to be compute-bound."""
MIN_STEPS = 24
"""With fewer steps than this, the confidence is low."""
MIN_ROUNDS = 3
"""Minimum number of reports per worker to compute the interval of a share."""
ALWAYS_WRITING = 0.8
"""Checkpoints written for at least this part of the time count as always being written."""
SAME_CAUSE = 0.8
"""A straggler is the cause if removing it saves at least this fraction of the time that would be
saved by removing the part in which it is slow."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """Parts of the steps between two reports, for each worker."""

    workers: tuple[StepParts, ...]
    num_steps: int


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One cause, and its part in the time of a step."""

    cause: Cause
    share: float
    """Part of a step that would be saved without it, from 0 to 1; for ``compute``, the part of the
    passes."""
    interval: tuple[float, float] | None = None
    """Range of the share over the reports, two standard errors in each direction; None if there
    are too few reports."""
    confidence: Confidence = "low"
    workers: tuple[str, ...] = ()
    """Names of the stragglers; empty for other causes."""

    @property
    def ceiling(self) -> float | None:
        """Gain in throughput without the cause: 0.38 for +38 %.

        None for ``compute``, and if the share is 1.
        """
        if self.cause == "compute" or self.share >= 1:
            return None
        return self.share / (1 - self.share)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Conclusion from the parts of a step."""

    main: Finding | None
    """The cause; None to abstain."""
    reason: str = ""
    """Reason for abstaining, as text; empty if there is a cause."""
    others: tuple[Finding, ...] = ()
    """Further causes, largest first."""
    not_measured: tuple[Cause, ...] = ()
    """Causes about which nothing is known."""


def judge(
    workers: Sequence[StepParts],
    *,
    rounds: Sequence[Round] = (),
    num_steps: int,
    fixed_s: float | None = None,
) -> Verdict:
    """Return the verdict for the mean parts of ``num_steps`` steps.

    Args:
        workers: The mean parts of a step by worker, at least one.
        rounds: The parts between two reports, which show how much the shares vary.
        num_steps: Number of steps of each worker.
        fixed_s: Part of the passes that does not depend on the number of samples; None if it was
            not measured.
    """
    shares = shares_of(workers, fixed_s=fixed_s)
    not_measured = [cause for cause in CAUSES if cause not in shares]
    is_overhead_known = fixed_s is not None or shares.get("overhead", 0.0) >= NAMED_FROM
    if not is_overhead_known and "overhead" not in not_measured:
        not_measured.append("overhead")
    if not shares:
        return Verdict(
            main=None, reason="The log has no durations.", not_measured=tuple(not_measured)
        )
    slow = tuple(one.worker for one in split_stragglers(workers)[0])
    found = {
        cause: _finding(
            cause, share, rounds, num_steps, fixed_s, slow if cause == "straggler" else ()
        )
        for cause, share in shares.items()
    }
    cause = _choose(shares)
    main = found.get(cause) if cause else None
    others = _others(found, shares, cause)
    reason = ""
    if main is None:
        reason = "No single cause takes 20 % of a step."
    elif main.interval is not None and main.interval[0] <= 0:
        reason = (
            f"The share of the largest cause, {main.cause}, varies too much between the reports: "
            f"{main.interval[0]:.0%} to {main.interval[1]:.0%}."
        )
        main = None
    return Verdict(main=main, reason=reason, others=others, not_measured=tuple(not_measured))


def doubt_exchange(
    verdict: Verdict, workers: Sequence[StepParts], *, writing_s: float = 0.0
) -> Verdict:
    """Return the verdict, after considering reasons other than the exchange itself.

    On a machine that is busy with other work, the exchange takes longer, because both of its ends
    need a core at the same time. It may then be the largest part of a step on a fast network:

    ====================================  ==========================================================
    the workers wait for a core           no communication verdict; low confidence in any other
    checkpoints are always being written  no communication verdict, unless their cost is known
    ====================================  ==========================================================

    Args:
        verdict: The verdict.
        workers: The mean parts of a step by worker.
        writing_s: Time per step in which a checkpoint was being written, in seconds.
    """
    main, core_wait = verdict.main, core_wait_of(workers) or 0.0
    if main is None:
        return verdict
    is_starved = core_wait >= NAMED_FROM
    if main.cause != "communication":
        return replace(verdict, main=replace(main, confidence="low")) if is_starved else verdict
    reason = ""
    if is_starved:
        reason = (
            f"The exchange takes {main.share:.0%} of a step, but the workers waited for a core "
            f"{core_wait:.0%} of the time in which they could have computed: other processes use "
            "the machine, or it has fewer cores than workers. Diagnose the job again on an idle "
            "machine or with fewer workers."
        )
    elif writing_s >= ALWAYS_WRITING * step_s(workers) and not any(o.slowed_s for o in workers):
        reason = (
            f"The exchange takes {main.share:.0%} of a step, but a checkpoint was being written "
            "during nearly all steps, which slows the exchange down by an unknown time. Save less "
            "often (checkpoint.every), and diagnose the job again."
        )
    return replace(verdict, main=None, reason=reason) if reason else verdict


def _choose(shares: Mapping[Cause, float]) -> Cause | None:
    # | candidates                             | cause
    # |----------------------------------------|----------------------------------------------
    # | overhead, and a cheap update           | overhead: its share also includes the latency
    # |                                        | of the exchange, which a larger batch hides
    # | straggler, slow in a part of its own   | straggler: the other workers are not slow there
    # | several others                         | the largest one
    # | none, but passes take half of the step | compute
    large = {c: s for c, s in shares.items() if c != "compute" and s >= NAMED_FROM}
    if "overhead" in large and shares["optimizer"] < NAMED_FROM:
        return "overhead"
    own = max(large.get(c, 0.0) for c in ("input", "metrics", "optimizer"))
    if large.get("straggler", 0.0) >= max(SAME_CAUSE * own, large.get("communication", 0.0)):
        large = {"straggler": large["straggler"]} if "straggler" in large else large
    else:
        large.pop("straggler", None)
    if large:
        return max(large, key=lambda cause: large[cause])
    return "compute" if shares["compute"] >= COMPUTE_FROM else None


def _others(
    found: Mapping[Cause, Finding], shares: Mapping[Cause, float], cause: Cause | None
) -> tuple[Finding, ...]:
    noted = [
        one
        for one in found.values()
        if one.cause not in (cause, "compute")
        and one.share >= NOTED_FROM
        and one.interval is not None
        and one.interval[0] > 0
    ]
    return tuple(sorted(noted, key=lambda one: -shares[one.cause]))


def _finding(
    cause: Cause,
    share: float,
    rounds: Sequence[Round],
    num_steps: int,
    fixed_s: float | None,
    slow: tuple[str, ...],
) -> Finding:
    interval = _interval(cause, share, rounds, fixed_s)
    confidence: Confidence = "medium"
    if num_steps < MIN_STEPS:
        confidence = "low"
    elif interval is not None and interval[0] >= NAMED_FROM:
        confidence = "high"
    return Finding(cause=cause, share=share, interval=interval, confidence=confidence, workers=slow)


def _interval(
    cause: Cause, share: float, rounds: Sequence[Round], fixed_s: float | None
) -> tuple[float, float] | None:
    if len(rounds) < MIN_ROUNDS:
        return None
    values = [shares_of(one.workers, fixed_s=fixed_s).get(cause, 0.0) for one in rounds]
    weights = [one.num_steps for one in rounds]
    mean = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
    # Reports of more steps vary less, so weight them as in the mean.
    spread = sum(w * (v - mean) ** 2 for w, v in zip(weights, values, strict=True)) / sum(weights)
    half = 2 * math.sqrt(spread / (len(rounds) - 1))
    return max(0.0, share - half), min(1.0, share + half)
