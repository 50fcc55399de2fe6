"""How many workers a job takes with ``workers.target: goodput``."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.rules.sizing.goodput import (
    MIN_GAIN,
    GoodputTerms,
    RateMeter,
    choose_size,
    describe_size,
    fit_rates,
    rates_of_efficiency,
)


def terms(*rates: float, measured: set[int], **values: object) -> GoodputTerms:
    known = {"min_workers": 1, "max_workers": len(rates), **values}
    return GoodputTerms(rates=(0.0, *rates), measured=frozenset(measured), **known)  # type: ignore[arg-type]


@st.composite
def any_terms(draw: st.DrawFn) -> GoodputTerms:
    high = draw(st.integers(1, 20))
    rates = draw(st.lists(st.floats(0.1, 1e4), min_size=high, max_size=high))
    return GoodputTerms(
        min_workers=draw(st.integers(1, high)),
        max_workers=high,
        rates=(0.0, *rates),
        measured=draw(st.frozensets(st.integers(1, high))),
        is_exchange_known=draw(st.booleans()),
        progress=draw(st.none() | st.just((0.0, *(1 / w for w in range(1, high + 1))))),
        usd_per_worker_h=draw(st.none() | st.floats(0.01, 50.0)),
        usd_per_h=draw(st.floats(0.0, 5.0)),
        needed_rate=draw(st.just(0.0) | st.floats(0.1, 1e4)),
    )


@given(any_terms(), st.integers(0, 20))
def test_size_is_within_the_bounds_and_has_a_reason(given_terms, current):
    size = choose_size(given_terms, current)
    assert given_terms.min_workers <= size.workers <= given_terms.max_workers
    assert describe_size(given_terms, size).startswith(
        (f"{size.workers} of {given_terms.max_workers} workers", f"all {size.workers} workers")
    )
    assert len(size.goodputs) in (0, size.workers + 1)


@given(any_terms())
def test_size_does_not_change_while_nothing_new_is_measured(given_terms):
    size = choose_size(given_terms)
    assert choose_size(given_terms, size.workers).workers == size.workers


@given(any_terms(), st.integers(1, 20))
def test_size_changes_only_for_a_gain_unless_the_deadline_requires_it(given_terms, current):
    size = choose_size(given_terms, current)
    trusted = 2 * max(given_terms.measured, default=0)
    is_possible = given_terms.min_workers <= current <= min(trusted, given_terms.max_workers)
    if is_possible and size.limit not in ("deadline", "measuring") and size.workers != current:
        assert given_terms.value(size.workers) >= MIN_GAIN * given_terms.value(current)


@given(any_terms())
def test_size_never_exceeds_twice_the_workers_that_were_measured(given_terms):
    size = choose_size(given_terms)
    limit = 2 * max(given_terms.measured, default=0)
    assert size.workers <= max(given_terms.min_workers, limit)


@pytest.mark.parametrize(
    ("efficiency_at_16", "workers"), [(1.0, 16), (0.5, 14), (0.25, 4), (0.125, 1)]
)
def test_worse_scaling_takes_fewer_workers(efficiency_at_16, workers):
    # w / (1 + c (w - 1)) has its largest value at 1 / c - 1, with half the efficiency.
    rates = rates_of_efficiency(16, efficiency_at_16)
    all_measured = GoodputTerms(
        min_workers=1, max_workers=16, rates=rates, measured=frozenset(range(1, 17))
    )
    assert choose_size(all_measured).workers == workers


def test_nothing_measured_takes_the_minimum():
    size = choose_size(GoodputTerms(min_workers=2, max_workers=8))
    assert (size.workers, size.limit, size.goodputs) == (2, "unmeasured", ())


def test_job_measures_two_workers_before_it_judges_the_exchange():
    alone = terms(10.0, 4.0, 3.0, measured={1}, is_exchange_known=False)
    size = choose_size(alone)
    assert (size.workers, size.limit) == (2, "measuring")
    assert "to measure the exchange" in describe_size(alone, size)


def test_job_at_most_doubles_its_workers_at_once():
    linear = terms(*(10.0 * w for w in range(1, 17)), measured={1, 2})
    assert (choose_size(linear).workers, choose_size(linear).limit) == (4, "measuring")
    assert choose_size(replace(linear, measured=frozenset({1, 2, 4, 8}))).workers == 16


def test_gradient_without_noise_makes_more_samples_worthless():
    # A batch that is W times as large makes no more progress than one of a single worker.
    rates = (10.0, 20.0, 30.0, 40.0)
    no_noise = terms(*rates, measured={1, 2, 4}, progress=(0.0, 1.0, 1 / 2, 1 / 3, 1 / 4))
    assert choose_size(no_noise).workers == 1
    assert choose_size(replace(no_noise, progress=None)).workers == 4


def test_price_of_the_scheduler_makes_more_workers_worth_it():
    saturated = terms(10.0, 13.0, 15.0, 16.0, measured={1, 2, 4}, usd_per_worker_h=0.1)
    assert choose_size(saturated).workers == 1
    assert choose_size(replace(saturated, usd_per_h=0.5)).workers == 4


def test_deadline_takes_the_fewest_workers_that_meet_it():
    saturated = terms(10.0, 13.0, 15.0, 16.0, measured={1, 2, 4}, needed_rate=14.0)
    size = choose_size(saturated)
    assert (size.workers, size.limit) == (3, "deadline")
    late = replace(saturated, needed_rate=20.0)
    assert choose_size(late).workers == 4
    assert describe_size(late, choose_size(late)) == (
        "all 4 workers for the deadline, which requires 20 samples/s (at most 16 are predicted, so "
        "it will be late). Assumed: the pool has no price, so the cost is worker-seconds; the "
        "gradient noise is not measured, so progress is throughput, whatever the batch"
    )


def test_reason_compares_with_the_next_worker():
    priced = terms(
        10.0, 19.0, 20.0, measured={1, 2}, usd_per_worker_h=0.5, progress=(0.0, 1.0, 1.0, 1.0)
    )
    assert describe_size(priced, choose_size(priced)) == (
        "2 of 3 workers: 3 are predicted to make 5 % more progress per second at 50 % more cost"
    )


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
