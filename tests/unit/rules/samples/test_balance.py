"""Shares by measured speed: convergence, noise, and ranks that are not measured yet."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.rules.samples.balance import NUM_SETTLING, Balance, SampleCost

Times = Callable[[int, int], float]
"""Seconds that a rank takes for its share, by rank and number of samples."""


class Ranks:
    """Ranks of given speeds that train with one balance, in virtual time."""

    def __init__(self, times_s: Times, world_size: int, *, batch_size: int = 256) -> None:
        self.times_s = times_s
        self.balance = Balance(world_size, batch_size=batch_size, min_share=2)
        self.costs = [SampleCost() for _ in range(world_size)]
        self.num_changes = 0

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            # The header of a step is sent before the step has been measured.
            sent = [cost.seconds for cost in self.costs]
            for rank, cost in enumerate(self.costs):
                count = self.balance.counts[rank]
                cost.add(self.times_s(rank, count), count)
            if self.balance.observe(sent):
                self.num_changes += 1
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
    ranks.train(600)
    assert ranks.num_changes == changes
    assert times_s <= max(
        in_proportion(speeds, fixed_s)(rank, 256 // len(speeds) + 1) for rank in range(len(speeds))
    )


def test_noise_of_equal_ranks_does_not_change_the_shares() -> None:
    noise = random.Random(0)
    ranks = Ranks(lambda rank, count: 1e-3 * count * noise.uniform(0.97, 1.03), 4)
    ranks.train(1000)
    assert ranks.num_changes == 0


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


def test_step_without_samples_is_not_measured() -> None:
    cost = SampleCost()
    for _ in range(20):
        cost.add(1.0, 0)
    assert cost.seconds == 0.0
