from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.rules.policy.worker_rates import RateMeter, fit_rates, rates_of_efficiency


def test_rates_reach_the_given_efficiency() -> None:
    rates = rates_of_efficiency(32, 0.84)

    assert rates[0] == 0.0
    assert rates[1] == 1.0
    assert rates[32] == pytest.approx(0.84 * 32)


def test_rates_continue_beyond_the_workers_of_the_efficiency() -> None:
    rates = rates_of_efficiency(4, 0.8, up_to=8)

    assert rates[:5] == rates_of_efficiency(4, 0.8)
    assert rates[8] == pytest.approx(8 / (1 + 7 / 12))


def test_nothing_measured_gives_no_rates() -> None:
    assert fit_rates({}, 8) == ()


def test_fit_recovers_the_model_from_two_points() -> None:
    true = rates_of_efficiency(16, 0.7)

    assert fit_rates({2: true[2], 6: true[6]}, 16) == pytest.approx(true)


def test_noise_that_looks_better_than_linear_gives_linear_rates() -> None:
    assert fit_rates({1: 1.0, 2: 2.4}, 3) == pytest.approx((0.0, 1.09, 2.18, 3.27), abs=0.01)


@given(
    measured=st.dictionaries(st.integers(1, 20), st.floats(0.01, 1e4), min_size=1, max_size=5),
    most=st.integers(1, 30),
)
def test_fitted_rates_never_decrease(measured: dict[int, float], most: int) -> None:
    rates = fit_rates(measured, most)

    assert len(rates) == most + 1
    assert all(b >= a * (1 - 1e-9) for a, b in pairwise(rates))
    assert rates[1] > 0


def test_meter_measures_each_number_of_workers_separately() -> None:
    meter = RateMeter()
    for now, workers, step in ((0, 2, 0), (20, 2, 40), (40, 2, 80), (45, 3, 82), (85, 3, 202)):
        meter.observe(float(now), workers, step)

    assert meter.measured == {2: 2.0, 3: 3.0}


def test_meter_ignores_repeated_steps_pauses_and_short_times() -> None:
    meter = RateMeter()
    for now, workers, step in ((0, 2, 100), (40, 2, 60), (50, 2, 70), (90, 0, 70), (200, 0, 70)):
        meter.observe(float(now), workers, step)

    assert meter.measured == {}
