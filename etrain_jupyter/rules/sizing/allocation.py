"""Allocate workers to jobs: first the minimum of each job, then up to its maximum.

Jobs that are sized by goodput share what the other jobs leave, so that the product of their
goodputs is largest: a worker goes where it raises the goodput by the largest factor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MIN_GAIN = 1.05
"""Workers move between jobs that are sized by goodput only if the product of the goodputs rises by
this factor, so that noise in the measured rates does not move workers to and fro."""


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
    goodputs: tuple[float, ...] = ()
    """For a job that is sized by goodput: its goodput by number of workers, from 0 to
    ``max_workers``. Empty for other jobs, which come first."""


def allocate(claims: Sequence[Claim], workers: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Share ``workers`` among jobs.

    In order of submission, each job gets its minimum. In the same order, each job that is not sized
    by goodput then gets up to its maximum. Jobs that are sized by goodput share the rest. A job
    keeps its workers as far as its share allows, so that workers move only if they have to.

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
    fitting = {
        claim.job_id: sum(name not in claim.unfit for name in workers) if claim.unfit else free
        for claim in claims
    }
    sized = [claim for claim in claims if claim.goodputs]
    fixed = [claim for claim in claims if not claim.goodputs]
    for bound, members in (("min_workers", claims), ("max_workers", fixed)):
        for claim in members:
            bounded = min(getattr(claim, bound), fitting[claim.job_id])
            more = min(free, max(0, bounded - shares[claim.job_id]))
            shares[claim.job_id] += more
            free -= more
    if sized and free:
        most = {claim.job_id: min(claim.max_workers, fitting[claim.job_id]) for claim in sized}
        shares |= _share(sized, shares, most, free)
    return _pick(claims, workers, shares)


def _share(
    claims: Sequence[Claim], least: dict[str, int], most: dict[str, int], free: int
) -> dict[str, int]:
    """Divide ``free`` workers so that the product of the goodputs is largest.

    Args:
        claims: Jobs that are sized by goodput.
        least: Workers that each job has already got.
        most: Maximum number of workers of each job.
        free: Workers to divide.
    """
    # best[n]: the largest sum of logarithms with n of the free workers, over the jobs so far.
    best = np.zeros(free + 1)
    chosen = []
    for claim in claims:
        low = least[claim.job_id]
        values = [_log(claim, low + more) for more in range(max(0, most[claim.job_id] - low) + 1)]
        totals = np.full((len(values), free + 1), -math.inf)
        for more, value in enumerate(values[: free + 1]):
            totals[more, more:] = best[: free + 1 - more] + value
        # Among equal values, take the first: the fewest workers.
        chosen.append(totals.argmax(axis=0))
        best = totals.max(axis=0)
    left, shares = free, {}
    for claim, counts in zip(reversed(claims), reversed(chosen), strict=True):
        more = int(counts[left])
        shares[claim.job_id] = least[claim.job_id] + more
        left -= more
    held = {claim.job_id: len(claim.held) for claim in claims}
    is_allowed = sum(held.values()) == sum(shares.values()) and all(
        least[id] <= count <= max(least[id], most[id]) for id, count in held.items()
    )
    if is_allowed and _total(claims, shares) < _total(claims, held) + math.log(MIN_GAIN):
        return held
    return shares


def _total(claims: Sequence[Claim], shares: dict[str, int]) -> float:
    return sum(_log(claim, shares[claim.job_id]) for claim in claims)


def _log(claim: Claim, workers: int) -> float:
    goodput = claim.goodputs[min(workers, len(claim.goodputs) - 1)]
    return math.log(max(goodput, 1e-300))


def _pick(
    claims: Sequence[Claim], workers: Sequence[str], shares: dict[str, int]
) -> dict[str, tuple[str, ...]]:
    # All jobs keep their workers before any gets new ones. Keeping a running rank matters most.
    usable = set(workers)
    kept: dict[str, tuple[str, ...]] = {}
    for claim in claims:
        fit = usable - claim.unfit
        held = tuple(name for name in claim.held if name in fit)[: shares[claim.job_id]]
        kept[claim.job_id] = held
        usable -= set(held)
    # Jobs that can run on few of the free workers choose first; the others can use the rest.
    for claim in sorted(claims, key=lambda claim: -len(claim.unfit & usable)):
        missing = shares[claim.job_id] - len(kept[claim.job_id])
        spare = [name for name in workers if name in usable and name not in claim.unfit]
        kept[claim.job_id] += tuple(spare[:missing])
        usable -= set(spare[:missing])
    return kept
