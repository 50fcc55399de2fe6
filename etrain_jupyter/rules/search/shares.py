"""Share the workers of a study among its trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from etrain_jupyter.rules.sizing.allocation import Claim, allocate


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

    A study gets what its trials get together as ordinary jobs. Each trial keeps its minimum; the
    rest goes around one by one (``fair``), or to the best trial up to its maximum, then to the next
    (``promising``). The claims of other jobs do not change.

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
    # A trial that gets less than its minimum as an ordinary job waits.
    return {c.job_id: min(c.min_workers, shares[c.job_id]) for c in members}
