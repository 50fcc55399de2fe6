"""Divide an evaluation into parts, and resume it after members have left or joined.

A part is a fixed run of positions in data.eval, so its batch is the same whatever rank evaluates
it. Each rank keeps the records of the parts that it has evaluated. After a change of members, the
ranks report which parts they hold, and evaluate only the missing ones::

    generation 3   rank 0: parts 0 2 4     rank 1: parts 1 3 (dies)
    generation 4   rank 0 holds 0 2 4; 1 3 5 6 are missing: rank 0 takes 1 5, rank 1 takes 3 6
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

NUM_KEEPERS = 2
"""Number of ranks that keep all records until they are scored, so that one of them may die."""


class PartPlan(NamedTuple):
    """Owners of the parts that are done, and the assignment of the rest."""

    owners: dict[int, int]
    """Rank by part; only parts that are done."""
    todo: tuple[tuple[int, ...], ...]
    """Parts that each rank still evaluates, in order."""


class ScoreStatus(NamedTuple):
    """State of one rank with respect to the evaluation that is scored."""

    has_result: bool = False
    is_scoring: bool = False
    has_records: bool = False
    """True if it holds the records of all samples."""


def cut_parts(num_samples: int, size: int) -> list[range]:
    """Cut the positions of data.eval into parts of ``size``; the last one may be smaller.

    >>> cut_parts(5, 2)
    [range(0, 2), range(2, 4), range(4, 5)]
    """
    everything = range(num_samples)
    return [everything[first : first + size] for first in range(0, num_samples, size)]


def plan_parts(held: Sequence[Collection[int]], num_parts: int) -> PartPlan:
    """Return the plan from the parts that each rank holds; every rank gets the same plan.

    >>> plan_parts([{0, 2}, {2, 1}], 5)
    PartPlan(owners={0: 0, 1: 1, 2: 0}, todo=((3,), (4,)))
    """
    owners: dict[int, int] = {}
    # A part that two ranks hold counts once: the lowest rank owns it.
    for rank in reversed(range(len(held))):
        owners |= dict.fromkeys(held[rank], rank)
    missing = [part for part in range(num_parts) if part not in owners]
    todo = tuple(tuple(missing[rank :: len(held)]) for rank in range(len(held)))
    return PartPlan({part: owners[part] for part in sorted(owners)}, todo)


def choose_scorer(ranks: Sequence[ScoreStatus]) -> int | None:
    """Return the rank that should score: one that does already, else one with all records.

    >>> choose_scorer([ScoreStatus(has_records=True), ScoreStatus(is_scoring=True)])
    1
    >>> choose_scorer([ScoreStatus(), ScoreStatus()]) is None
    True
    """
    for wanted in ("is_scoring", "has_records"):
        for rank, status in enumerate(ranks):
            if getattr(status, wanted):
                return rank
    return None


def choose_receivers(ranks: Sequence[ScoreStatus]) -> list[int]:
    """Return the ranks that should receive all records from one that holds them.

    >>> choose_receivers([ScoreStatus(), ScoreStatus(has_records=True), ScoreStatus()])
    [0]
    """
    num_keepers = sum(status.has_records for status in ranks)
    if not num_keepers:
        return []
    others = [rank for rank, status in enumerate(ranks) if not status.has_records]
    return others[: max(0, NUM_KEEPERS - num_keepers)]
