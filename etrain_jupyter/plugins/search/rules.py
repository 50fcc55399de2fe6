"""Decisions of a study: rungs, the end of the study, trials to start, and shares of workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from etrain_jupyter.plugins.search.schema import Budget
from etrain_jupyter.rules.sizing.allocation import Claim, allocate

StudyStatus = Literal["running", "finished", "stopped", "failed"]
TrialState = Literal["RUNNING", "COMPLETE", "PRUNED", "FAIL"]

MAX_RUNGS = 5
"""Maximum number of rungs below the end of a trial, as in Determined's searcher."""

MAX_FIRST_FAILURES = 3
"""A study stops if this many of its first trials all fail."""


# --- rungs ---


def place_rungs(*, num_samples: int, divisor: int, min_samples: int) -> tuple[int, ...]:
    """Return the sample counts at which trials are compared, lowest first.

    The end of a trial counts as the last rung and is not included; a trial that reaches it is
    complete. All rungs are at or above ``min_samples``, the samples at the first evaluation.

    Args:
        num_samples: Samples of a whole trial.
        divisor: Ratio between two rungs, and the inverse of the share that continues.
        min_samples: Samples until the first evaluation.

    >>> place_rungs(num_samples=64_000, divisor=4, min_samples=3_000)
    (4000, 16000)
    """
    rungs: list[int] = []
    least = num_samples // divisor
    while least >= max(1, min_samples) and len(rungs) < MAX_RUNGS:
        rungs.append(least)
        least //= divisor
    if not rungs:
        return ()
    # Optuna's pruner multiplies the lowest rung, so that its rungs are these.
    lowest = rungs[-1]
    return tuple(lowest * divisor**number for number in range(len(rungs)))


def rung_of(samples: int, rungs: Sequence[int]) -> int:
    """Return how many rungs a trial has reached."""
    return sum(samples >= rung for rung in rungs)


# --- start and end ---


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
class StudyVerdict:
    """The end of a study."""

    status: StudyStatus
    reason: str = ""


def judge_study(progress: StudyProgress, limits: Budget) -> StudyVerdict | None:
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


def _exceeded(progress: StudyProgress, limits: Budget) -> str:
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


# --- workers ---


@dataclass(frozen=True, kw_only=True)
class StudyShare:
    """Rule by which one study shares its workers."""

    sharing: Literal["fair", "promising"]
    ranking: tuple[str, ...]
    """Job ids of the running trials, best first."""


def share_studies(
    claims: Sequence[Claim], workers: Sequence[str], studies: Sequence[StudyShare]
) -> list[Claim]:
    """Limit the claims of trials, so that ``allocate`` shares each study's workers by its rule.

    A study gets as many workers as its trials would get as ordinary jobs. Each trial keeps its
    minimum; the rest goes around one by one (``fair``), or to the best trial up to its maximum,
    then to the next (``promising``). The claims of other jobs do not change.

    Args:
        claims: One per job, in order of submission.
        workers: Names of all workers that may be used.
        studies: The studies that are running.
    """
    if not studies:
        return list(claims)
    shares = {job: len(names) for job, names in allocate(claims, workers).items()}
    by_job = {claim.job_id: claim for claim in claims}
    limits: dict[str, int] = {}
    for study in studies:
        members = [by_job[job] for job in study.ranking if job in by_job]
        num_workers = sum(shares[claim.job_id] for claim in members)
        if study.sharing == "fair":
            # In order of submission, so that an evaluation alone moves no worker.
            order = [claim for claim in claims if claim in members]
            limits |= _share_fairly(order, num_workers, shares)
        else:
            limits |= _share_by_rank(members, num_workers, shares)
    return [
        replace(c, max_workers=max(c.min_workers, limits.get(c.job_id, c.max_workers)))
        for c in claims
    ]


def _share_fairly(
    members: Sequence[Claim], num_workers: int, shares: Mapping[str, int]
) -> dict[str, int]:
    limits = _minimums(members, shares)
    left = num_workers - sum(limits.values())
    while left > 0:
        open_claims = [c for c in members if limits[c.job_id] < c.max_workers]
        if not open_claims:
            break
        smallest = min(open_claims, key=lambda claim: limits[claim.job_id])
        limits[smallest.job_id] += 1
        left -= 1
    return limits


def _share_by_rank(
    members: Sequence[Claim], num_workers: int, shares: Mapping[str, int]
) -> dict[str, int]:
    limits = _minimums(members, shares)
    left = num_workers - sum(limits.values())
    for claim in members:
        more = min(left, claim.max_workers - limits[claim.job_id])
        limits[claim.job_id] += more
        left -= more
    return limits


def _minimums(members: Sequence[Claim], shares: Mapping[str, int]) -> dict[str, int]:
    # A trial waits if it would get less than its minimum as an ordinary job.
    return {c.job_id: min(c.min_workers, shares[c.job_id]) for c in members}
