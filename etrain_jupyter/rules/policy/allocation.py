"""Allocate workers to jobs: first the minimum of each job, then up to its maximum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One job's request for workers."""

    job_id: str
    min_workers: int
    max_workers: int
    held: tuple[str, ...] = ()
    """Workers that it has now, in the order in which it keeps them (rank order)."""
    unfit: frozenset[str] = frozenset()
    """Workers that cannot run it."""


def allocate(claims: Sequence[Claim], workers: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Share ``workers`` among jobs.

    In order of submission, each job gets its minimum, and then, in the same order, up to its
    maximum. A job keeps its workers as far as its share allows, so that workers move only if they
    have to.

    Args:
        claims: One per job, in order of submission.
        workers: Names of all workers that may be used.

    Returns:
        Workers by job id; every worker is in at most one job. A job may get fewer than its share
        if other jobs hold the only workers that can run it.

    >>> allocate([Claim(job_id="a", min_workers=1, max_workers=4, held=("w1", "w2")),
    ...           Claim(job_id="b", min_workers=1, max_workers=2)], ["w1", "w2"])
    {'a': ('w1',), 'b': ('w2',)}
    """
    # Determine first how many workers each job gets, and then which ones. For example, with 5
    # workers, a job of 1 to 4 workers and a job of exactly 2:
    #
    #             minimum   maximum (what is left, in order of submission)
    #   job a        1         1 + 2 = 3
    #   job b        2         2
    free = len(workers)
    shares = {claim.job_id: 0 for claim in claims}
    for bound in ("min_workers", "max_workers"):
        for claim in claims:
            bounded = min(getattr(claim, bound), sum(name not in claim.unfit for name in workers))
            more = min(free, max(0, bounded - shares[claim.job_id]))
            shares[claim.job_id] += more
            free -= more
    return _pick(claims, workers, shares)


def _pick(
    claims: Sequence[Claim], workers: Sequence[str], shares: dict[str, int]
) -> dict[str, tuple[str, ...]]:
    # All jobs keep their workers before any gets new ones: keeping a running rank matters most.
    usable = set(workers)
    kept: dict[str, tuple[str, ...]] = {}
    for claim in claims:
        fit = usable - claim.unfit
        held = tuple(name for name in claim.held if name in fit)[: shares[claim.job_id]]
        kept[claim.job_id] = held
        usable -= set(held)
    # Jobs that can run on few of the free workers choose first: the others can use the rest.
    for claim in sorted(claims, key=lambda claim: -len(claim.unfit & usable)):
        missing = shares[claim.job_id] - len(kept[claim.job_id])
        spare = [name for name in workers if name in usable and name not in claim.unfit]
        kept[claim.job_id] += tuple(spare[:missing])
        usable -= set(spare[:missing])
    return kept
