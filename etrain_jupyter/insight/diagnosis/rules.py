"""Choose the cause that slows a job down, with its confidence, or abstain."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from etrain_jupyter.insight.diagnosis.step_parts import (
    CAUSES,
    Cause,
    StepParts,
    core_wait_of,
    shares_of,
    split_stragglers,
    step_s,
)

Confidence = Literal["high", "medium", "low"]

NAMED_FROM = 0.2
"""Share of a step from which a cause is the verdict."""
NOTED_FROM = 0.1
"""Share of a step from which another cause is mentioned, if its interval excludes 0."""
COMPUTE_FROM = 0.5
"""Share of the passes from which a job without another cause is compute-bound."""
MIN_STEPS = 24
"""Number of steps below which the confidence is low."""
MIN_ROUNDS = 3
"""Number of reports per worker from which the interval of a share is known."""
ALWAYS_WRITING = 0.8
"""Part of the time from which checkpoints count as being written all the time."""
SAME_CAUSE = 0.8
"""A straggler is the cause if without it, a step saves at least this part of what it would save
without the part in which the straggler is slow."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """Parts of the steps between two reports, by worker."""

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
    """Return the verdict after it was checked for reasons other than the exchange.

    On a machine that is busy otherwise, the exchange takes longer, because both of its ends need a
    core at the same time. It is then the largest part of a step although the network is fast:

    ====================================  ==========================================================
    the workers wait for a core           no verdict of communication; low confidence in any other
    checkpoints are always being written  no verdict of communication, unless their cost is known
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
    # Reports of more steps vary less, so the weights are those of the mean.
    spread = sum(w * (v - mean) ** 2 for w, v in zip(weights, values, strict=True)) / sum(weights)
    half = 2 * math.sqrt(spread / (len(rounds) - 1))
    return max(0.0, share - half), min(1.0, share + half)
