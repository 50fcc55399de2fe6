from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etrain_jupyter.plugins.ec2.deadline import (
    DeadlineTerms,
    DeadlineView,
    derate_of,
    least_workers,
    on_demand_workers,
)
from etrain_jupyter.rules.sizing.goodput import rates_of_efficiency

HOUR = 3600.0
# 8 workers, one sample per second each; 8 h of work in 10 h.
TERMS = DeadlineTerms(
    rates=rates_of_efficiency(8), samples=8 * 8 * HOUR, time_s=10 * HOUR, boot_s=300.0, keep=0.5
)


def look(
    *, done_h: float, at_h: float, spot: int, owned: int = 0, terms: DeadlineTerms = TERMS
) -> int:
    """Return the on-demand workers after ``done_h`` hours of work of all workers."""
    view = DeadlineView(
        samples_left=terms.samples - done_h * HOUR * terms.rates[-1],
        remaining_s=terms.time_s - at_h * HOUR,
        num_spot=spot,
        num_on_demand=owned,
    )
    return on_demand_workers(terms, view)


def test_slack_is_the_time_beyond_work_replacements_and_margin() -> None:
    assert TERMS.margin_s == 390.0
    assert TERMS.slack_s == pytest.approx(10 * HOUR - 390.0 - 8 * HOUR / 0.95)


def test_job_at_its_start_waits_for_spot_workers() -> None:
    # At the start, the slack is 1.47 h, and the line is at half of it.
    assert look(done_h=0.0, at_h=0.0, spot=0) == 0


def test_job_below_the_line_gets_as_many_workers_as_follow_the_line() -> None:
    roomy = dataclasses.replace(TERMS, time_s=16 * HOUR)

    # 5.8 h of work in the 7.89 h that are usable require 5.9 of 8 workers.
    assert look(done_h=2.2, at_h=8.0, spot=3, terms=roomy) == 3
    assert look(done_h=2.2, at_h=8.0, spot=6, terms=roomy) == 0


def test_job_without_slack_gets_all_workers() -> None:
    assert look(done_h=6.2, at_h=8.0, spot=5) == 3


def test_job_after_its_deadline_gets_all_workers() -> None:
    assert look(done_h=7.0, at_h=10.5, spot=0) == 8


def test_job_ahead_of_its_line_releases_its_on_demand_workers() -> None:
    assert look(done_h=6.0, at_h=6.0, spot=5, owned=3) == 0


def test_finished_job_needs_no_workers() -> None:
    assert look(done_h=8.0, at_h=9.0, spot=0, owned=8) == 0


def test_job_slightly_above_its_line_keeps_its_workers_but_gets_no_more() -> None:
    # 8 h in, the line is at 0.15 h of slack, and this job has 0.21 h.
    assert look(done_h=6.4, at_h=8.0, spot=5, owned=0) == 0
    assert look(done_h=6.4, at_h=8.0, spot=5, owned=1) == 1


def test_lazy_policy_uses_the_whole_slack_first() -> None:
    lazy = dataclasses.replace(TERMS, keep=0.0)
    uniform = dataclasses.replace(TERMS, keep=1.0)

    assert look(done_h=4.0, at_h=5.2, spot=2, terms=lazy) == 0
    assert look(done_h=4.0, at_h=5.2, spot=2, terms=uniform) == 5


def test_least_workers_names_a_number_that_meets_the_deadline() -> None:
    tight = dataclasses.replace(TERMS, time_s=7 * HOUR)

    assert tight.slack_s < 0
    # 64 h of work of one worker in 6.89 usable hours at 95 %: 9.78.
    assert least_workers(tight, rates_of_efficiency(40)) == 10
    assert least_workers(tight, rates_of_efficiency(8)) is None
    assert least_workers(dataclasses.replace(TERMS, time_s=100.0), rates_of_efficiency(40)) is None


def test_derate_never_reaches_the_whole_rate() -> None:
    assert derate_of(boot_s=1e6, stall_s=0.0) == 0.9


TERMS_OF_ANY_JOB = st.builds(
    DeadlineTerms,
    rates=st.builds(rates_of_efficiency, st.integers(1, 40), st.just(1.0)),
    samples=st.floats(1.0, 1e6),
    time_s=st.floats(600.0, 1e5),
    boot_s=st.floats(0.0, 600.0),
    derate=st.floats(0.0, 0.5),
    keep=st.floats(0.0, 1.0),
)


@given(
    terms=TERMS_OF_ANY_JOB,
    left=st.floats(0.0, 1.0),
    remaining=st.floats(-0.2, 1.0),
    spot=st.integers(0, 40),
    owned=st.integers(0, 40),
)
def test_number_is_bounded_and_falls_with_spot_workers(
    terms: DeadlineTerms, left: float, remaining: float, spot: int, owned: int
) -> None:
    view = DeadlineView(
        samples_left=left * terms.samples,
        remaining_s=remaining * terms.time_s,
        num_spot=spot,
        num_on_demand=owned,
    )

    number = on_demand_workers(terms, view)
    with_more = on_demand_workers(terms, dataclasses.replace(view, num_spot=spot + 1))

    assert 0 <= number <= max(0, terms.max_workers - spot)
    assert with_more <= number


@settings(max_examples=60, deadline=None)
@given(
    spot=st.lists(st.integers(0, 8), min_size=1, max_size=30),
    keep=st.floats(0.0, 1.0),
    efficiency=st.floats(0.5, 1.0),
    share=st.floats(0.3, 0.9),
)
def test_no_history_of_spot_capacity_misses_a_feasible_deadline(
    spot: list[int], keep: float, efficiency: float, share: float
) -> None:
    """On-demand workers start at once here; boots are covered by the simulation's tests."""
    rates = rates_of_efficiency(8, efficiency)
    terms = DeadlineTerms(
        rates=rates, samples=rates[-1] * share * 4 * HOUR, time_s=4 * HOUR, boot_s=0.0, keep=keep
    )
    left, now, owned = terms.samples, 0.0, 0
    assert terms.slack_s > 0
    while left > 0:
        here = spot[int(now / 600) % len(spot)]
        view = DeadlineView(
            samples_left=left, remaining_s=terms.time_s - now, num_spot=here, num_on_demand=owned
        )
        owned = on_demand_workers(terms, view)
        left -= rates[min(8, here + owned)] * terms.period_s
        now += terms.period_s

        assert now <= terms.time_s
