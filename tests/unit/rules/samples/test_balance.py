"""Shares by measured speed: convergence, noise, and ranks that are not measured yet."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from etrain_jupyter.rules.samples.balance import (
    CHANGE_LIMIT,
    MIN_MEASURED,
    NUM_SETTLING,
    Balance,
    ChangeDetector,
    SampleCost,
)
from etrain_jupyter.rules.samples.batch_plan import plan_step

Times = Callable[[int, int], float]
"""Seconds that a rank takes for its share, by rank and number of samples."""


class Ranks:
    """Ranks of given speeds that train with one balance, in virtual time."""

    def __init__(self, times_s: Times, world_size: int, *, batch_size: int = 256) -> None:
        self.times_s = times_s
        self.balance = Balance(world_size, batch_size=batch_size, min_share=2)
        self.costs = [SampleCost() for _ in range(world_size)]
        self.num_steps = 0
        self.changed_at: list[int] = []
        """Number of steps before each change of the shares."""

    @property
    def num_changes(self) -> int:
        return len(self.changed_at)

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            # The header of a step is sent before the step has been measured.
            sent = [cost.seconds for cost in self.costs]
            errors = [cost.error for cost in self.costs]
            for rank, cost in enumerate(self.costs):
                count = self.balance.counts[rank]
                cost.add(self.times_s(rank, count), count)
            self.num_steps += 1
            if self.balance.observe(sent, errors):
                self.changed_at.append(self.num_steps)
                for cost in self.costs:
                    cost.begin()

    @property
    def step_s(self) -> float:
        return max(self.times_s(rank, n) for rank, n in enumerate(self.balance.counts))


def in_proportion(speeds: Sequence[float], fixed_s: float = 0.0) -> Times:
    return lambda rank, count: (fixed_s + 1e-3 * count) / speeds[rank]


@pytest.mark.parametrize("speeds", [(1, 0.5), (1, 1, 0.5, 0.25), (0.25, 1, 1), (1, 10)])
def test_steps_become_as_fast_as_the_sum_of_the_speeds(speeds: tuple[float, ...]) -> None:
    ranks = Ranks(in_proportion(speeds), len(speeds))
    ranks.train(60)
    assert ranks.step_s == pytest.approx(256e-3 / sum(speeds), rel=0.05)
    assert sum(ranks.balance.counts) == 256


@example(speeds=[3.0, 5.0, 6.0, 6.0, 6.0], fixed_s=0.046875)  # settles after 400 steps
@settings(max_examples=25)
@given(
    speeds=st.lists(st.floats(0.1, 10.0), min_size=2, max_size=8),
    fixed_s=st.floats(0.0, 0.05),
)
def test_shares_settle_with_costs_that_do_not_depend_on_the_share(
    speeds: list[float], fixed_s: float
) -> None:
    ranks = Ranks(in_proportion(speeds, fixed_s), len(speeds))
    ranks.train(600)
    changes, times_s = ranks.num_changes, ranks.step_s
    ranks.train(300)
    assert ranks.num_changes == changes
    assert times_s <= max(
        in_proportion(speeds, fixed_s)(rank, 256 // len(speeds) + 1) for rank in range(len(speeds))
    )


def test_noise_of_equal_ranks_does_not_change_the_shares() -> None:
    noise = random.Random(0)
    ranks = Ranks(lambda rank, count: 1e-3 * count * noise.uniform(0.97, 1.03), 4)
    ranks.train(1000)
    assert ranks.num_changes == 0


def noisy(times_s: Times, noise: float, rng: random.Random) -> Times:
    return lambda rank, count: times_s(rank, count) * math.exp(rng.gauss(0, noise))


@settings(max_examples=25)
@given(
    world_size=st.integers(2, 5),
    noise=st.floats(0.0, 0.2),
    seed=st.integers(0, 10_000),
)
def test_noise_of_a_fifth_does_not_move_the_shares_of_equal_ranks(
    world_size: int, noise: float, seed: int
) -> None:
    """Rarely, the first steps are far off: then the shares change and change back."""
    times_s = noisy(in_proportion([1.0] * world_size), noise, random.Random(seed))
    ranks = Ranks(times_s, world_size)
    ranks.train(250)
    assert ranks.num_changes <= 2


@settings(max_examples=25)
@given(
    speeds=st.lists(st.floats(0.2, 1.0), min_size=2, max_size=4),
    noise=st.floats(0.0, 0.2),
    seed=st.integers(0, 10_000),
)
def test_noise_does_not_keep_the_shares_of_unequal_ranks_moving(
    speeds: list[float], noise: float, seed: int
) -> None:
    exact = in_proportion(speeds)
    ranks = Ranks(noisy(exact, noise, random.Random(seed)), len(speeds))
    ranks.train(250)
    assert ranks.num_changes <= 5
    ranks.times_s = exact
    assert ranks.step_s <= 1.2 * 256e-3 / sum(speeds)


@settings(max_examples=25)
@given(
    speeds=st.lists(st.floats(0.5, 1.0), min_size=2, max_size=4),
    factor=st.sampled_from([0.25, 0.5, 2.0, 4.0]),
    noise=st.floats(0.0, 0.2),
    seed=st.integers(0, 10_000),
)
def test_step_change_is_followed_within_fifteen_steps(
    speeds: list[float], factor: float, noise: float, seed: int
) -> None:
    exact = in_proportion(speeds)
    ranks = Ranks(noisy(exact, noise, random.Random(seed)), len(speeds))
    ranks.train(100)
    if ranks.changed_at and ranks.changed_at[-1] > 85:
        ranks.train(15)  # two changes must be apart
    before = ranks.num_changes
    speeds[0] *= factor
    lost = max(exact(rank, n) for rank, n in enumerate(ranks.balance.counts))
    ideal = 256e-3 / sum(speeds)
    if lost < 1.3 * ideal:
        return  # too small a gain to be certain of within a few steps
    ranks.train(15)
    assert ranks.num_changes > before
    ranks.train(60)
    assert max(exact(rank, n) for rank, n in enumerate(ranks.balance.counts)) <= 1.2 * ideal


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_exact_step_change_is_followed_after_five_steps(factor: float) -> None:
    speeds = [1.0, 1.0]
    ranks = Ranks(in_proportion(speeds), 2)
    ranks.train(200)
    speeds[1] = factor
    ranks.train(10)
    # Three steps to detect it, a fourth for the median, which the header of the fifth contains.
    assert ranks.changed_at == [205]
    assert ranks.step_s == pytest.approx(256e-3 / sum(speeds), rel=0.05)


def test_hiccup_of_three_steps_does_not_move_the_shares() -> None:
    speeds = [1.0, 1.0]
    ranks = Ranks(in_proportion(speeds), 2)
    ranks.train(100)
    for _ in range(5):
        speeds[1] = 0.1
        ranks.train(3)
        speeds[1] = 1.0
        ranks.train(40)
    assert ranks.num_changes == 0


def test_uncertain_times_do_not_change_the_shares() -> None:
    balance = Balance(2, batch_size=256, min_share=2)
    assert not balance.observe([0.002, 0.003], [0.2, 0.2])
    assert balance.observe([0.002, 0.003], [0.02, 0.02])


@given(
    costs=st.lists(st.floats(1e-6, 10.0), min_size=1, max_size=8),
    errors=st.lists(st.floats(0.0, 1.0), min_size=8, max_size=8),
    batch_size=st.integers(1, 600),
    min_share=st.integers(1, 2),
    count=st.integers(1, 600),
)
def test_shares_cover_every_step_exactly(
    costs: list[float], errors: list[float], batch_size: int, min_share: int, count: int
) -> None:
    """The mean over a step stays exact, because each sample has the same weight in any share."""
    world_size = len(costs)
    balance = Balance(world_size, batch_size=batch_size, min_share=min_share)
    for noise in (1.0, 2.0, 0.5):
        balance.observe([noise * costs[0], *costs[1:]], errors[:world_size])
        assert sum(balance.counts) == batch_size
    for size in (batch_size, min(count, batch_size)):
        plan = plan_step(
            count=size,
            world_size=world_size,
            micro_batch_size=None,
            min_share=min_share,
            speeds=balance.speeds,
        )
        assert sum(plan.counts) == size
        ends = [start + n for start, n in zip(plan.starts, plan.counts, strict=True)]
        assert [0, *ends[:-1]] == list(plan.starts)
        if size == batch_size and balance.speeds is not None:
            assert plan.counts == balance.counts


def test_speed_that_changes_later_changes_the_shares() -> None:
    speeds = [1.0, 1.0]
    ranks = Ranks(in_proportion(speeds), 2)
    ranks.train(50)
    assert ranks.balance.counts == (128, 128)
    speeds[1] = 0.5
    ranks.train(60)
    assert ranks.step_s == pytest.approx(256e-3 / 1.5, rel=0.05)
    speeds[1] = 1.0
    ranks.train(60)
    assert ranks.step_s == pytest.approx(128e-3, rel=0.05)


def test_ranks_bring_their_measurements_into_the_next_generation() -> None:
    balance = Balance(3, batch_size=256, min_share=2)
    # The third rank is new: until it is measured, its share is that of an average rank.
    assert balance.observe([0.002, 0.004, 0.0])
    assert balance.counts == (118, 59, 79)


def test_nothing_is_decided_before_the_first_measurement() -> None:
    balance = Balance(2, batch_size=256, min_share=2)
    assert not any(balance.observe([0.0, 0.0]) for _ in range(300))
    assert balance.counts == (128, 128)


def test_batch_smaller_than_the_ranks_stays_even() -> None:
    balance = Balance(4, batch_size=3, min_share=1)
    assert not balance.observe([0.1, 0.2, 0.3, 0.4])
    assert balance.speeds is None


def test_one_slow_step_does_not_count_and_steps_after_a_change_are_skipped() -> None:
    cost = SampleCost()
    for _ in range(NUM_SETTLING):
        cost.add(99.0, 1)
    for seconds in (1.0, 1.0, 50.0, 1.0, 1.0):
        cost.add(seconds, 10)
    assert cost.seconds == pytest.approx(0.1)
    cost.begin()
    assert cost.seconds == pytest.approx(0.1)


def test_error_falls_with_the_number_of_steps() -> None:
    rng, cost = random.Random(0), SampleCost()
    errors = []
    for _ in range(NUM_SETTLING + 100):
        cost.add(0.2 * math.exp(rng.gauss(0, 0.1)), 10)
        errors.append(cost.error)
    assert not any(errors[: NUM_SETTLING + MIN_MEASURED - 1])
    assert errors[NUM_SETTLING + MIN_MEASURED] > 3 * errors[-1] > 0.02
    assert cost.seconds == pytest.approx(0.02, rel=0.05)


def test_short_steps_are_measured_for_a_tenth_of_a_second() -> None:
    cost = SampleCost()
    for _ in range(NUM_SETTLING + 49):
        cost.add(0.002, 1)
    assert cost.seconds == 0.0
    for _ in range(2):
        cost.add(0.002, 1)
    assert cost.seconds == pytest.approx(0.002)


def test_step_without_samples_is_not_measured() -> None:
    cost = SampleCost()
    for _ in range(20):
        cost.add(1.0, 0)
    assert cost.seconds == 0.0


def feed(detector: ChangeDetector, values: list[float]) -> list[int]:
    return [detector.add(value) for value in values]


@given(sign=st.sampled_from([1, -1]), size=st.floats(3.0, 1e9), num_before=st.integers(0, 50))
def test_large_change_is_found_after_three_values_and_dated(
    sign: int, size: float, num_before: int
) -> None:
    detector = ChangeDetector()

    found = feed(detector, [0.0] * num_before + [sign * size] * 3)

    assert found == [0] * (num_before + 2) + [3]


@pytest.mark.parametrize("spike", [5.0, -5.0, 1e6])
def test_single_outliers_are_no_change(spike: float) -> None:
    detector = ChangeDetector()

    assert not any(feed(detector, [0.0, 0.0, 0.0, spike] * 50))
    assert not any(feed(detector, [0.0, 0.0, spike, spike, 0.0, 0.0] * 5))


def test_noise_rarely_looks_like_a_change() -> None:
    rng, detector, num_found = random.Random(1), ChangeDetector(), 0
    for _ in range(20_000):
        if detector.add(rng.gauss(0, 1)):
            num_found += 1
            detector.reset()

    assert num_found <= 1


@given(st.lists(st.floats(-10, 10), max_size=60))
def test_detector_treats_both_directions_alike(values: list[float]) -> None:
    one, other = ChangeDetector(), ChangeDetector()

    assert feed(one, values) == feed(other, [-value for value in values])


@given(st.lists(st.floats(-0.9, 0.9), max_size=200))
def test_values_within_the_allowance_raise_no_suspicion(values: list[float]) -> None:
    detector = ChangeDetector()

    assert not any(feed(detector, values))
    assert detector.num_suspect == 0


def test_slow_drift_is_found() -> None:
    detector = ChangeDetector()

    found = feed(detector, [0.05 * n for n in range(100)])

    # The drift exceeds the allowance from value 21 on, and the excess adds up to the limit.
    assert next(n for n, count in enumerate(found) if count) == pytest.approx(36, abs=2)
    assert CHANGE_LIMIT == 6.0


def test_reset_forgets_the_previous_values() -> None:
    detector = ChangeDetector()
    feed(detector, [3.0, 3.0])
    detector.reset()

    assert detector.num_suspect == 0
    assert feed(detector, [3.0, 3.0, 3.0]) == [0, 0, 3]
