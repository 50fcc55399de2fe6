"""Divide an evaluation into parts, and resume it after members have left or joined.

A part is a fixed run of positions in data.eval, so its batch is the same regardless of which rank
evaluates it. Each rank keeps the records of the parts that it has evaluated. After a change of
members, the ranks report which parts they hold, and evaluate only the missing ones::

    generation 3   rank 0: parts 0 2 4     rank 1: parts 1 3 (dies)
    generation 4   rank 0 holds 0 2 4; 1 3 5 6 are missing: rank 0 takes 1 5, rank 1 takes 3 6

The loss and the metrics of an evaluation are accumulated over runs of consecutive parts. A later
generation continues each run where it stopped, on any rank::

    generation 3   rank 0: run 0-4, interrupted after 2     rank 1: run 5-9, interrupted after 7
    generation 4   rank 0: continues 0-2 with 3-4           rank 1: continues 5-7 with 8-9
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from etrain_jupyter.rules.samples.batch_plan import share_range

NUM_KEEPERS = 2
"""Number of ranks that keep all records until they are scored, so that one of them may die."""


class PartPlan(NamedTuple):
    """Owners of the parts that are done, and the assignment of the rest."""

    owners: dict[int, int]
    """Rank by part; only parts that are done."""
    todo: tuple[tuple[int, ...], ...]
    """Parts that each rank still evaluates, in order."""


class Run(NamedTuple):
    """Consecutive parts, ``first`` to ``stop - 1``, in one group."""

    first: int
    stop: int


class RunPlan(NamedTuple):
    """Runs that are done, and the assignment of the missing parts."""

    kept: tuple[Run, ...]
    """Runs that count, in order; none overlaps another."""
    todo: tuple[tuple[Run, ...], ...]
    """Runs that each rank still evaluates. A run that begins where a kept run of the same group
    ends continues that kept run."""


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


def split_part(part: range, size: int) -> list[range]:
    """Split a part into as few batches of at most ``size`` as possible, of about equal lengths.

    >>> split_part(range(32, 48), 5)
    [range(32, 36), range(36, 40), range(40, 44), range(44, 48)]
    """
    num_batches = -(-len(part) // size)
    shares = (share_range(len(part), number, num_batches) for number in range(num_batches))
    return [part[share.start : share.stop] for share in shares]


def plan_parts(held: Sequence[Collection[int]], num_parts: int) -> PartPlan:
    """Return the plan from the parts that each rank holds; every rank gets the same plan.

    >>> plan_parts([{0, 2}, {2, 1}], 5)
    PartPlan(owners={0: 0, 1: 1, 2: 0}, todo=((3,), (4,)))
    """
    owners: dict[int, int] = {}
    # A part that two ranks hold counts once; the lowest rank owns it.
    for rank in reversed(range(len(held))):
        owners |= dict.fromkeys(held[rank], rank)
    missing = [part for part in range(num_parts) if part not in owners]
    todo = tuple(tuple(missing[rank :: len(held)]) for rank in range(len(held)))
    return PartPlan({part: owners[part] for part in sorted(owners)}, todo)


def plan_runs(
    held: Iterable[Run], groups: Sequence[Run], world_size: int, *, may_cut: bool
) -> RunPlan:
    """Return the plan from the runs that all ranks hold; every rank gets the same plan.

    Args:
        held: Runs of all ranks; several ranks may hold the same run, or different lengths of it.
        groups: Runs that cover all parts. No run extends beyond its group.
        world_size: Number of ranks.
        may_cut: True if the missing parts of a group may be evaluated by several ranks; False if
            they must be added to the group's sums in order.

    >>> plan_runs([Run(0, 2), Run(0, 3), Run(5, 6)], [Run(0, 5), Run(5, 9)], 2, may_cut=False)
    RunPlan(kept=(Run(first=0, stop=3), Run(first=5, stop=6)), \
todo=((Run(first=3, stop=5),), (Run(first=6, stop=9),)))
    """
    kept: list[Run] = []
    # The longest of the runs with the same beginning is the newest.
    for run in sorted(set(held), key=lambda run: (run.first, -run.stop)):
        if run.first >= (kept[-1].stop if kept else 0):
            kept.append(run)
    missing = [gap for group in groups for gap in _gaps(group, kept)]
    if not may_cut:
        shares = [share_range(len(missing), rank, world_size) for rank in range(world_size)]
        todo = tuple(tuple(missing[share.start : share.stop]) for share in shares)
        return RunPlan(tuple(kept), todo)
    num_missing = sum(gap.stop - gap.first for gap in missing)
    shares = [share_range(num_missing, rank, world_size) for rank in range(world_size)]
    return RunPlan(tuple(kept), tuple(tuple(_cut(missing, share)) for share in shares))


def _gaps(group: Run, kept: Sequence[Run]) -> Iterator[Run]:
    """Yield the parts of a group that are in no run."""
    first = group.first
    for run in kept:
        if group.first <= run.first < group.stop:
            if first < run.first:
                yield Run(first, run.first)
            first = run.stop
    if first < group.stop:
        yield Run(first, group.stop)


def _cut(runs: Sequence[Run], share: range) -> Iterator[Run]:
    """Yield the parts of a share, which is a range of indices into all runs together."""
    begin = 0
    for run in runs:
        end = begin + run.stop - run.first
        first, stop = max(begin, share.start), min(end, share.stop)
        if first < stop:
            yield Run(run.first + first - begin, run.first + stop - begin)
        begin = end


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
