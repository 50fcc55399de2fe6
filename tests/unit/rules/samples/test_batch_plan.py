"""How a step's samples are shared over ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.rules.samples.batch_plan import (
    StepPlan,
    plan_step,
    share_by_speed,
    share_range,
    share_samples,
)

WORLD_SIZES = st.integers(1, 64)


def test_uneven_batch_is_shared_as_evenly_as_possible() -> None:
    plan = plan_step(count=256, world_size=3, micro_batch_size=32)
    assert (plan.counts, plan.num_micro_steps) == ((86, 85, 85), 3)


def test_last_step_of_an_epoch_may_leave_ranks_without_samples() -> None:
    plan = plan_step(count=2, world_size=4, micro_batch_size=8)
    assert plan == StepPlan(starts=(0, 1, 2, 2), counts=(1, 1, 0, 0), num_micro_steps=1)


@pytest.mark.parametrize(
    ("micro", "expected"), [(None, 1), (1, 11), (5, 3), (10, 2), (11, 1), (99, 1)]
)
def test_micro_steps_are_what_the_largest_share_needs(micro: int | None, expected: int) -> None:
    plan = plan_step(count=32, world_size=3, micro_batch_size=micro)
    assert plan.counts == (11, 11, 10)
    assert plan.num_micro_steps == expected


@given(count=st.integers(0, 5000), world_size=WORLD_SIZES)
def test_shares_sum_to_the_step_and_differ_by_one_at_most(count: int, world_size: int) -> None:
    shares = share_samples(count, world_size)
    assert len(shares) == world_size
    assert sum(shares) == count
    assert max(shares) - min(shares) <= 1
    assert list(shares) == sorted(shares, reverse=True)


@given(count=st.integers(1, 500), world_size=WORLD_SIZES, micro=st.integers(1, 64))
def test_plan_covers_the_step_once_in_passes_of_limited_size(
    count: int, world_size: int, micro: int
) -> None:
    plan = plan_step(count=count, world_size=world_size, micro_batch_size=micro)
    covered = [
        position
        for start, share in zip(plan.starts, plan.counts, strict=True)
        for position in range(start, start + share)
    ]
    assert covered == list(range(count))
    assert (plan.num_micro_steps - 1) * micro < max(plan.counts) <= plan.num_micro_steps * micro


@given(num_samples=st.integers(0, 500), world_size=WORLD_SIZES)
def test_evaluation_takes_each_sample_once(num_samples: int, world_size: int) -> None:
    ranges = [share_range(num_samples, rank, world_size) for rank in range(world_size)]
    assert [index for part in ranges for index in part] == list(range(num_samples))
    assert tuple(map(len, ranges)) == share_samples(num_samples, world_size)


@given(count=st.integers(1, 40), world_size=st.integers(1, 9), min_share=st.integers(1, 3))
def test_non_empty_shares_have_the_minimum_size_unless_the_step_is_smaller(
    count: int, world_size: int, min_share: int
) -> None:
    plan = plan_step(count=count, world_size=world_size, micro_batch_size=None, min_share=min_share)
    assert sum(plan.counts) == count
    assert len(plan.counts) == len(plan.starts) == world_size
    assert all(n == 0 or n >= min(min_share, count) for n in plan.counts)


@given(
    count=st.integers(1, 300),
    world_size=st.integers(1, 9),
    num_passes=st.integers(1, 12),
    min_share=st.sampled_from([1, 2]),
)
def test_requested_passes_are_made_unless_the_share_is_too_small(
    count: int, world_size: int, num_passes: int, min_share: int
) -> None:
    sizes = {"count": count, "world_size": world_size, "micro_batch_size": None}
    plan = plan_step(**sizes, min_share=min_share, num_passes=num_passes)
    largest = plan.counts[0]
    assert plan.counts == plan_step(**sizes, min_share=min_share).counts
    assert plan.num_micro_steps <= num_passes
    if largest >= num_passes * min_share:
        assert plan.num_micro_steps == num_passes
    assert largest // plan.num_micro_steps >= min(largest, min_share)


def test_memory_limit_may_require_more_passes_than_requested() -> None:
    plan = plan_step(count=64, world_size=1, micro_batch_size=8, num_passes=4)
    assert plan.num_micro_steps == 8


SPEEDS = st.lists(st.floats(1e-4, 1e4), min_size=1, max_size=16)


@given(
    speeds=SPEEDS, per_rank=st.integers(0, 60), more=st.integers(0, 15), min_share=st.integers(1, 3)
)
def test_shares_by_speed_are_in_proportion_and_have_the_minimum_size(
    speeds: list[float], per_rank: int, more: int, min_share: int
) -> None:
    count = len(speeds) * (min_share + per_rank) + more
    shares = share_by_speed(count, speeds, min_share=min_share)
    assert sum(shares) == count
    assert min(shares) >= min_share
    # Above the minimum, shares are in proportion, up to the rounding of less than a sample each.
    for share, speed in zip(shares, speeds, strict=True):
        for other, its_speed in zip(shares, speeds, strict=True):
            if share > min_share + 1 and other > min_share + 1:
                ratio = speed / its_speed
                assert (share - 1) <= ratio * (other + 1) * (1 + 1e-9)


@given(count=st.integers(1, 500), world_size=WORLD_SIZES)
def test_shares_by_equal_speeds_are_even(count: int, world_size: int) -> None:
    plan = plan_step(count=count, world_size=world_size, micro_batch_size=None)
    speeds = [0.7] * world_size
    by_speed = plan_step(count=count, world_size=world_size, micro_batch_size=None, speeds=speeds)
    assert by_speed == plan


def test_small_step_is_not_shared_by_speed() -> None:
    sizes = {"count": 5, "world_size": 3, "micro_batch_size": None, "min_share": 2}
    assert plan_step(**sizes, speeds=[1.0, 5.0, 9.0]).counts == (3, 2, 0)


def test_passes_follow_from_the_largest_share_of_any_rank() -> None:
    plan = plan_step(count=256, world_size=2, micro_batch_size=32, speeds=[0.5, 1.0])
    assert (plan.counts, plan.starts, plan.num_micro_steps) == ((85, 171), (0, 85), 6)
