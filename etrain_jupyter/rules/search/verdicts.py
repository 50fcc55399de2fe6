"""When a study ends, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

StudyStatus = Literal["running", "finished", "stopped", "failed"]
TrialState = Literal["RUNNING", "COMPLETE", "PRUNED", "FAIL"]

MAX_FIRST_FAILURES = 3
"""A study whose first trials all fail stops after this many."""


@dataclass(frozen=True, kw_only=True)
class StudyProgress:
    """A study's trials and what they have used so far."""

    states: tuple[TrialState, ...]
    num_trials: int
    """Trials to run in total."""
    samples: int = 0
    elapsed_s: float = 0.0
    usd: float = 0.0
    last_failure: str = ""


@dataclass(frozen=True, kw_only=True)
class StudyLimits:
    """Budget of a study; None for no limit."""

    samples: int | None = None
    time_s: float | None = None
    usd: float | None = None


@dataclass(frozen=True, kw_only=True)
class StudyVerdict:
    """The end of a study."""

    status: StudyStatus
    reason: str = ""


def judge_study(progress: StudyProgress, limits: StudyLimits) -> StudyVerdict | None:
    """Return how a study ends; None while it continues."""
    counts = Counter(progress.states)
    settled = len(progress.states) - counts["RUNNING"]
    failed = counts["FAIL"]
    if failed and failed == len(progress.states):
        first = min(MAX_FIRST_FAILURES, progress.num_trials)
        if failed >= first:
            which = f"all {failed} trials failed" if failed > 1 else "its trial failed"
            return StudyVerdict(
                status="failed", reason=f"{which}; the last one with: {progress.last_failure}"
            )
    if settled >= progress.num_trials:
        return StudyVerdict(status="finished")
    spent = _exceeded(progress, limits)
    return (
        StudyVerdict(status="finished", reason=f"the budget is used up: {spent}") if spent else None
    )


def _exceeded(progress: StudyProgress, limits: StudyLimits) -> str:
    if limits.samples is not None and progress.samples >= limits.samples:
        return f"{progress.samples:,} of {limits.samples:,} samples"
    if limits.time_s is not None and progress.elapsed_s >= limits.time_s:
        return f"{progress.elapsed_s:,.0f} of {limits.time_s:,.0f} s"
    if limits.usd is not None and progress.usd >= limits.usd:
        return f"{progress.usd:.2f} of {limits.usd:.2f} USD"
    return ""


def num_to_start(
    states: Sequence[TrialState], *, num_trials: int, concurrent: int, num_leaving: int = 0
) -> int:
    """Return how many trials to start now.

    Args:
        states: States of the trials so far.
        num_trials: Trials to run in total.
        concurrent: Trials that may run at the same time.
        num_leaving: Trials among the running ones that stop at their next step boundary. Their
            successors start now, so that they are ready when the workers are free.

    >>> num_to_start(["COMPLETE", "RUNNING"], num_trials=8, concurrent=3)
    2
    """
    running = sum(state == "RUNNING" for state in states) - num_leaving
    return max(0, min(concurrent - running, num_trials - len(states)))
