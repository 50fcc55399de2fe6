"""The recommendation of a plan, and what it says if a goal cannot be met."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.plugins.planner.planning.advice import Goal, advise
from etrain_jupyter.plugins.planner.planning.options import Option, mark_front
from tests.unit.plugins.planner.planning.measured_jobs import option

OPTIONS = mark_front([option(1, 8.0, 4.0), option(2, 4.2, 5.0), option(4, 2.5, 8.0),
                      option(8, 2.4, 20.0)])  # fmt: skip


def workers_for(goal: Goal) -> int | None:
    """Return the number of workers that is recommended."""
    best = advise(OPTIONS, goal).option
    return best.workers if best else None


@pytest.mark.parametrize(
    ("goal", "workers"),
    [
        (Goal(), 4),
        (Goal(deadline_h=5.0), 2),
        (Goal(deadline_h=2.8), 4),
        (Goal(budget_usd=6.0), 2),
        (Goal(budget_usd=100.0), 8),
        (Goal(deadline_h=5.0, budget_usd=6.0), 2),
        (Goal(deadline_h=3.0, budget_usd=6.0), None),
        (Goal(deadline_h=1.0), None),
        (Goal(budget_usd=3.0), None),
    ],
)
def test_recommended_number_of_workers(goal: Goal, workers: int | None) -> None:
    assert workers_for(goal) == workers


def test_deadline_is_met_even_if_steps_take_a_standard_error_longer() -> None:
    # 4.2 h would do for 4.5 h, but not 4.2 h and 10 %.
    advice = advise(OPTIONS, Goal(deadline_h=4.5))

    assert advice.option is not None
    assert advice.option.workers == 4
    assert advice.reason == (
        "the cheapest that meets the deadline of 4.5 h even if steps are 10% slower, with 2.0 h to "
        "spare"
    )


def test_risk_is_stated_where_no_option_is_safe() -> None:
    advice = advise(OPTIONS, Goal(deadline_h=2.45))

    assert advice.reason == (
        "the cheapest that meets the deadline of 2.5 h, but only if the prediction holds: "
        "10% slower steps would take 2.6 h"
    )


def test_missed_deadline_says_by_how_much_and_what_would_do() -> None:
    larger = [option(16, 1.2, 30.0), option(32, 0.9, 50.0), option(64, 0.8, 90.0)]

    advice = advise(OPTIONS, Goal(deadline_h=1.0), larger)

    assert advice.option is None
    assert advice.reason == (
        "no option finishes in 1.0 h. The fastest, 8 workers on g5.xlarge spot, takes 2.4 h, "
        "1.4 h too long. Alternatives: --deadline 2.5h; "
        "--workers 32 (32 workers on g5.xlarge spot, $50.00); 42% of the samples"
    )


def test_deadline_that_only_the_budget_prevents_names_the_budget() -> None:
    advice = advise(OPTIONS, Goal(deadline_h=3.0, budget_usd=6.0))

    assert "no option finishes in 3.0 h within $6.00" in advice.reason
    assert "--budget 8 (4 workers on g5.xlarge spot)" in advice.reason


def test_missed_budget_says_by_how_much_and_what_would_do() -> None:
    assert advise(OPTIONS, Goal(budget_usd=3.0)).reason == (
        "no option costs at most $3.00. The cheapest, 1 worker on g5.xlarge spot, costs $4.00, "
        "$1.00 more. Alternatives: --budget 4, or 75% of the samples"
    )


def test_budget_without_prices_cannot_be_checked() -> None:
    advice = advise(mark_front([option(1, 8.0, math.nan)]), Goal(budget_usd=3.0))

    assert advice.option is None
    assert "cannot be checked, because no option has a price" in advice.reason


def test_without_a_goal_the_alternatives_are_named() -> None:
    assert advise(OPTIONS, Goal()).reason == (
        "the smallest product of time and cost; 8 workers on g5.xlarge spot would be 6.0 min "
        "faster for $20.00, and 1 worker on g5.xlarge spot would cost $4.00 and take 8.0 h"
    )


@pytest.mark.parametrize(("usd", "what"), [(4.0, "cheapest"), (math.nan, "fewest worker hours")])
def test_best_in_both_is_cheapest_only_if_it_has_a_price(usd: float, what: str) -> None:
    advice = advise(mark_front([option(1, 8.0, usd)]), Goal())

    assert advice.reason == f"the fastest and the {what}"


amounts = st.floats(0.1, 1e3)
goals = st.none() | amounts


@given(st.lists(st.tuples(amounts, amounts), min_size=1, max_size=12), goals, goals)
def test_recommended_option_meets_the_goal_and_no_cheaper_safe_one_does(
    values: list[tuple[float, float]], deadline_h: float | None, budget_usd: float | None
) -> None:
    options = mark_front([option(n, *value) for n, value in enumerate(values, 1)])

    best = advise(options, Goal(deadline_h=deadline_h, budget_usd=budget_usd)).option

    def is_met(one: Option, *, slower: bool = False) -> bool:
        hours = one.late_hours if slower else one.hours
        return hours <= (deadline_h or math.inf) and one.usd <= (budget_usd or math.inf)

    if best is None:
        assert not any(map(is_met, options))
        return
    assert is_met(best)
    if deadline_h is not None:
        safe = [one for one in options if is_met(one, slower=True)]
        assert best.usd <= min((one.usd for one in safe), default=math.inf)
