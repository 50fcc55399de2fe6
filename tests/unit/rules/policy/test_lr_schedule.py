"""The learning rate's schedule, in samples."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.rules.policy.lr_schedule import LrSchedule

WARM, TOTAL = 4, 20


@pytest.mark.parametrize("batch", [1, 32])
@pytest.mark.parametrize("decay", ["none", "linear", "cosine"])
def test_at_a_constant_batch_it_is_the_usual_formula(batch, decay):
    schedule = LrSchedule(warmup=WARM * batch, decay=decay, end=TOTAL * batch)
    for step in range(TOTAL):
        passed = (step - WARM) / (TOTAL - WARM)
        usual = {
            "none": 1.0,
            "linear": 1.0 - passed,
            "cosine": 0.5 * (1.0 + math.cos(math.pi * passed)),
        }[decay]
        expected = (step + 1) / WARM if step < WARM else usual
        assert schedule.factor(step * batch, batch) == pytest.approx(expected)


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=40),
    st.sampled_from(["none", "linear", "cosine"]),
)
def test_any_batches_give_a_rate_between_nothing_and_the_optimizers_own(counts, decay):
    schedule = LrSchedule(warmup=sum(counts) // 3, decay=decay, end=sum(counts))
    position, factors = 0, []
    for count in counts:
        factors.append(schedule.factor(position, count))
        position += count
    assert all(0.0 < factor <= 1.0 for factor in factors)
    top = factors.index(max(factors))
    assert factors[: top + 1] == sorted(factors[: top + 1])


def test_warm_up_of_nothing_is_none():
    assert LrSchedule(end=10).factor(0, 1) == 1.0


def test_after_the_end_it_stays_as_it_is_there():
    assert LrSchedule(decay="linear", end=10).factor(15, 1) == 0.0
