"""The order of sums depends on the number of shards alone, and few sums travel or are kept."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.errors import ConfigError
from etrain_jupyter.rules.samples.shard_plan import (
    Subtree,
    num_slots,
    plan_passes,
    plan_shards,
    shard_merges,
    subtrees_within,
)

sizes = st.integers(1, 70).flatmap(lambda v: st.tuples(st.just(v), st.integers(1, v)))


def added(values: list[str], merges) -> str:
    """Add up texts in place, so that the brackets tell the order."""
    values = list(values)
    for into, other in merges:
        values[into] = f"({values[into]}+{values[other]})"
    return values[0]


def passed_through(plan, rank: int, *, adds_in_place: bool) -> list[str]:
    """Return a rank's partial sums, made as its passes say."""
    subtrees = plan.subtrees[rank]
    passes = plan_passes(subtrees, adds_in_place=adds_in_place)
    slots = ["?"] * num_slots(passes)
    for p in passes:
        shard = str(p.shard)
        slots[p.slot] = shard if p.is_fresh else f"({slots[p.slot]}+{shard})"
        for into, other in p.merges:
            slots[into] = f"({slots[into]}+{slots[other]})"
    return slots[: len(subtrees)]


@given(sizes)
def test_ranks_share_the_shards_without_gap_or_overlap(size):
    num_shards, world_size = size
    plan = plan_shards(num_shards=num_shards, world_size=world_size)
    assert [s for own in plan.shards for s in own] == list(range(num_shards))
    assert max(map(len, plan.shards)) - min(map(len, plan.shards)) <= 1
    for own, subtrees in zip(plan.shards, plan.subtrees, strict=True):
        assert [s for tree in subtrees for s in range(*tree)] == list(own)


@given(sizes, st.booleans())
def test_order_of_the_sum_depends_on_the_number_of_shards_alone(size, adds_in_place):
    num_shards, world_size = size
    plan = plan_shards(num_shards=num_shards, world_size=world_size)
    partials = [
        partial
        for rank in range(world_size)
        for partial in passed_through(plan, rank, adds_in_place=adds_in_place)
    ]
    expected = added([str(s) for s in range(num_shards)], shard_merges(Subtree(0, num_shards)))
    assert added(partials, plan.merges) == expected


@given(sizes)
def test_number_of_sent_and_stored_sums_is_bounded(size):
    num_shards, world_size = size
    depth = math.ceil(math.log2(num_shards))
    plan = plan_shards(num_shards=num_shards, world_size=world_size)
    assert sum(map(len, plan.subtrees)) <= max(1, world_size * depth)
    for subtrees in plan.subtrees:
        passes = plan_passes(subtrees, adds_in_place=False)
        assert num_slots(passes) <= len(subtrees) + depth


@given(sizes)
def test_no_two_partial_sums_of_a_rank_can_be_merged(size):
    num_shards, world_size = size
    plan = plan_shards(num_shards=num_shards, world_size=world_size)
    for subtrees in plan.subtrees:
        together = range(subtrees[0].first, subtrees[-1].stop)
        assert subtrees_within(together, num_shards) == subtrees


def test_four_shards_are_added_in_pairs():
    assert added(list("0123"), shard_merges(Subtree(0, 4))) == "((0+1)+(2+3))"
    assert added(list("012"), shard_merges(Subtree(0, 3))) == "(0+(1+2))"


def test_rank_without_a_shard_is_refused_with_the_numbers():
    with pytest.raises(ConfigError, match=r"2 shards leave 1 of 3 workers.*\{shards: 3\}"):
        plan_shards(num_shards=2, world_size=3)
