"""Test how many spare workers pay."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.plugins.ec2.spares import loss_rate_per_h, mean_missing, spare_workers

MISSING = st.floats(0.0, 20.0)


def at_least(number: int, mean: float) -> float:
    """Return the probability of ``number`` or more, computed from the other side of the sum."""
    terms = (math.exp(-mean) * mean**k / math.factorial(k) for k in range(number, 120))
    return math.fsum(terms)


@given(missing=MISSING, stake=st.floats(1.0, 500.0), most=st.integers(0, 30))
def test_each_spare_avoids_a_larger_loss_than_it_costs(
    missing: float, stake: float, most: int
) -> None:
    number = spare_workers(missing=missing, stake=stake, most=most)

    assert 0 <= number <= most
    if number:
        assert stake * at_least(number, missing) > 1.0 - 1e-6
    if number < most:
        assert stake * at_least(number + 1, missing) <= 1.0 + 1e-6


@given(missing=MISSING, most=st.integers(0, 30))
def test_no_spare_pays_for_an_elastic_job(missing: float, most: int) -> None:
    assert spare_workers(missing=missing, stake=1.0, most=most) == 0


@given(missing=MISSING, more=st.floats(0.0, 5.0), stake=st.floats(1.0, 100.0))
def test_spares_grow_with_the_losses(missing: float, more: float, stake: float) -> None:
    few = spare_workers(missing=missing, stake=stake, most=50)
    assert few <= spare_workers(missing=missing + more, stake=stake, most=50)


def test_boots_that_end_before_the_interruption_leave_no_worker_missing() -> None:
    assert mean_missing(workers=64, losses_per_h=1.0, boot_s=100.0) == 0.0
    assert mean_missing(workers=60, losses_per_h=1.0, boot_s=170.0) == pytest.approx(1.0)


def test_loss_rate_starts_at_the_prior_and_follows_the_observations() -> None:
    assert loss_rate_per_h(0, 0.0) == pytest.approx(0.05)
    assert loss_rate_per_h(1000, 10_000.0) == pytest.approx(0.1, rel=0.01)
