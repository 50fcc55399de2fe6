"""Every part of an evaluation counts once, whoever leaves, dies or joins meanwhile."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.rules.samples.eval_parts import (
    NUM_KEEPERS,
    Run,
    ScoreStatus,
    choose_receivers,
    choose_scorer,
    cut_parts,
    plan_parts,
    plan_runs,
)

NOTHING, KEEPER = ScoreStatus(), ScoreStatus(has_records=True)
STATUSES = st.builds(ScoreStatus, st.booleans(), st.booleans(), st.booleans())


@given(num_samples=st.integers(0, 300), size=st.integers(1, 40))
def test_parts_cover_every_position_once_in_order(num_samples: int, size: int) -> None:
    parts = cut_parts(num_samples, size)

    assert list(itertools.chain(*parts)) == list(range(num_samples))
    assert all(len(part) == size for part in parts[:-1])


@given(
    held=st.lists(st.sets(st.integers(0, 30)), min_size=1, max_size=6),
    num_parts=st.integers(31, 40),
)
def test_missing_parts_are_shared_evenly_and_held_parts_have_one_owner(
    held: list[set[int]], num_parts: int
) -> None:
    plan = plan_parts(held, num_parts)

    missing = list(itertools.chain(*plan.todo))
    assert sorted([*plan.owners, *missing]) == list(range(num_parts))
    assert all(part in held[rank] for part, rank in plan.owners.items())
    shares = [len(todo) for todo in plan.todo]
    assert max(shares) - min(shares) <= 1


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[set[int], int]]:
    """Generations: their members, and the turns after which each is interrupted."""
    members = st.sets(st.integers(0, 5), min_size=1)
    return draw(st.lists(st.tuples(members, st.integers(0, 5)), max_size=8))


@given(
    history=histories(),
    num_parts=st.integers(1, 25),
    late=st.sets(st.integers(0, 5)),
)
def test_every_part_is_merged_once_after_any_history(
    history: list[tuple[set[int], int]], num_parts: int, late: set[int]
) -> None:
    spools: dict[int, set[int]] = {}
    num_evaluated = 0
    for members, num_turns in [*history, ({0, 1}, 10**6)]:
        # A member that is absent is gone with its spool; a new one begins with an empty spool.
        spools = {member: spools.get(member, set()) for member in sorted(members)}
        ranks = list(spools)
        before = set().union(*spools.values())
        plan = plan_parts(list(spools.values()), num_parts)
        for rank, todo in enumerate(plan.todo):
            # A rank may have one part more than the others when the generation fails.
            done = todo[: num_turns + (ranks[rank] in late)]
            assert before.isdisjoint(done), "a part that a member holds is not evaluated again"
            spools[ranks[rank]] |= set(done)
            num_evaluated += len(done)

    merged = plan_parts(list(spools.values()), num_parts)
    assert list(merged.owners) == list(range(num_parts))
    assert not any(merged.todo)
    assert num_evaluated >= num_parts


def test_without_interruption_every_part_is_evaluated_once() -> None:
    assert plan_parts([(), (), ()], 7).todo == ((0, 3, 6), (1, 4), (2, 5))


def groups_of(sizes: list[int]) -> list[Run]:
    ends = list(itertools.accumulate(sizes))
    return [Run(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def parts_of(runs: Iterable[Run]) -> list[int]:
    return [part for run in runs for part in range(run.first, run.stop)]


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any),
    may_cut=st.booleans(),
    history=st.lists(
        st.tuples(st.sets(st.integers(0, 5), min_size=1), st.integers(0, 5), st.booleans()),
        max_size=8,
    ),
    late=st.sets(st.integers(0, 5)),
)
def test_every_part_is_in_one_run_after_any_history(
    sizes: list[int],
    may_cut: bool,
    history: list[tuple[set[int], int, bool]],
    late: set[int],
) -> None:
    groups = groups_of(sizes)
    everything = parts_of(groups)
    firsts = {group.first for group in groups if group.first < group.stop}
    held: dict[int, set[Run]] = {}
    for members, num_turns, is_shared in [*history, ({0, 1}, 10**6, True)]:
        # A member that is absent is gone with its runs; all others begin with an exchange.
        held = {member: held.get(member, set()) for member in sorted(members)}
        plan = plan_runs(set().union(*held.values()), groups, len(held), may_cut=may_cut)
        assert sorted([*parts_of(plan.kept), *parts_of(itertools.chain(*plan.todo))]) == everything
        for (member, runs), todo in zip(held.items(), plan.todo, strict=True):
            runs |= set(plan.kept)
            left = num_turns + (member in late)
            for run in todo:
                done = min(left, run.stop - run.first)
                left -= done
                before = [kept for kept in plan.kept if kept.stop == run.first]
                is_first = run.first in firsts
                if not may_cut:
                    assert before or is_first, "a shard is added up in order"
                begin = before[0].first if before and not is_first else run.first
                if done:
                    runs.add(Run(begin, run.first + done))
        if is_shared:
            everyones = set().union(*held.values())
            held = {member: set(everyones) for member in held}

    plan = plan_runs(set().union(*held.values()), groups, 1, may_cut=may_cut)
    assert parts_of(plan.kept) == everything
    assert not any(plan.todo)
    if not may_cut:
        assert list(plan.kept) == [group for group in groups if group.first < group.stop]


def test_missing_parts_are_shared_evenly_unless_they_are_added_in_order() -> None:
    kept, groups = [Run(0, 3)], [Run(0, 7), Run(7, 9)]

    assert plan_runs(kept, groups, 2, may_cut=True).todo == ((Run(3, 6),), (Run(6, 7), Run(7, 9)))
    assert plan_runs(kept, groups, 2, may_cut=False).todo == ((Run(3, 7),), (Run(7, 9),))


@pytest.mark.parametrize(
    ("ranks", "scorer", "receivers"),
    [
        ([NOTHING, NOTHING], None, []),
        ([KEEPER], 0, []),
        ([NOTHING, KEEPER, NOTHING], 1, [0]),
        ([KEEPER, NOTHING], 0, [1]),
        ([KEEPER, ScoreStatus(is_scoring=True, has_records=True)], 1, []),
    ],
)
def test_scorer_and_receivers(
    ranks: list[ScoreStatus], scorer: int | None, receivers: list[int]
) -> None:
    assert choose_scorer(ranks) == scorer
    assert choose_receivers(ranks) == receivers


@given(ranks=st.lists(STATUSES, min_size=1, max_size=6))
def test_records_are_copied_only_where_they_are_missing(ranks: list[ScoreStatus]) -> None:
    receivers = choose_receivers(ranks)

    assert not any(ranks[rank].has_records for rank in receivers)
    num_keepers = sum(status.has_records for status in ranks) + len(receivers)
    assert num_keepers >= min(NUM_KEEPERS, len(ranks)) or not any(r.has_records for r in ranks)
