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
def test_constant_batch_gives_the_usual_formula(batch, decay):
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
def test_factor_is_between_zero_and_one_for_any_batches(counts, decay):
    schedule = LrSchedule(warmup=sum(counts) // 3, decay=decay, end=sum(counts))
    position, factors = 0, []
    for count in counts:
        factors.append(schedule.factor(position, count))
        position += count
    assert all(0.0 < factor <= 1.0 for factor in factors)
    top = factors.index(max(factors))
    assert factors[: top + 1] == sorted(factors[: top + 1])


def test_without_a_warm_up_the_factor_starts_at_one():
    assert LrSchedule(end=10).factor(0, 1) == 1.0


def test_factor_stays_constant_after_the_end():
    assert LrSchedule(decay="linear", end=10).factor(15, 1) == 0.0
