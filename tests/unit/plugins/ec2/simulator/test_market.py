"""The market of the fake cloud: what a fleet request gets, and what a machine costs."""

from __future__ import annotations

import math

import pytest

from etrain_jupyter.plugins.ec2.simulator.market import (
    BEFORE,
    NO_CAPACITY,
    PRICE_TOO_LOW,
    UNFULFILLABLE,
    Candidate,
    CapacityPool,
    Demand,
    FleetPlan,
    Market,
)

A5, A6, B5 = CapacityPool("g5", "z-a"), CapacityPool("g6", "z-a"), CapacityPool("g5", "z-b")


def market(**pools: tuple[int, float]) -> Market:
    """``a5=(capacity, price)`` and so on."""
    made = Market()
    for name, (capacity, usd) in pools.items():
        pool = {"a5": A5, "a6": A6, "b5": B5}[name]
        made.set_pool(pool, at=0.0, capacity=capacity, price_usd=usd)
    return made


def spot(num: float, **words: object) -> Demand:
    return Demand(lifecycle="spot", target=num, **words)  # type: ignore[arg-type]


def plan(made: Market, demand: Demand, *candidates: Candidate) -> FleetPlan:
    wanted = candidates or [Candidate(pool=pool, place=n) for n, pool in enumerate((A5, A6, B5))]
    return made.plan(list(wanted), demand, at=10.0)


def pools(got: FleetPlan) -> list[CapacityPool]:
    return [candidate.pool for candidate in got.launches]


def test_lowest_price_takes_the_cheapest_pool_with_capacity_and_then_the_next() -> None:
    made = market(a5=(1, 0.3), a6=(5, 0.5), b5=(1, 0.4))

    got = plan(made, spot(3))

    assert (pools(got), got.refusals) == ([A5, B5, A6], ())


def test_lowest_price_spreads_over_the_requested_number_of_pools() -> None:
    got = plan(market(a5=(9, 0.3), a6=(9, 0.5), b5=(9, 0.4)), spot(4, num_pools=2))

    assert sorted(pools(got)) == [A5, A5, B5, B5]


def test_price_capacity_optimized_avoids_a_cheap_pool_that_is_nearly_empty() -> None:
    made = market(a5=(1, 0.30), a6=(9, 0.40), b5=(9, 0.50))

    assert pools(plan(made, spot(1, strategy="price-capacity-optimized"))) == [A6]
    assert pools(plan(made, spot(1))) == [A5]


def test_capacity_optimized_takes_the_deepest_pool() -> None:
    made = market(a5=(3, 0.30), a6=(4, 0.40), b5=(9, 0.90))

    assert pools(plan(made, spot(1, strategy="capacity-optimized"))) == [B5]


def test_prioritized_follows_the_priorities() -> None:
    made = market(a5=(9, 0.1), a6=(1, 0.9))
    wanted = [Candidate(pool=A5, priority=2), Candidate(pool=A6, priority=1)]

    assert pools(plan(made, spot(2, strategy="capacity-optimized-prioritized"), *wanted)) == [
        A6,
        A5,
    ]


def test_diversified_takes_from_all_pools_in_turn() -> None:
    made = market(a5=(9, 0.3), a6=(9, 0.5), b5=(9, 0.4))

    assert sorted(pools(plan(made, spot(6, strategy="diversified")))) == sorted([A5, A6, B5] * 2)


def test_too_little_capacity_launches_what_is_available_and_names_empty_pools() -> None:
    got = plan(market(a5=(1, 0.3), a6=(0, 0.5)), spot(3))

    assert pools(got) == [A5]
    assert [(one.candidate.pool, one.code) for one in got.refusals if one.candidate] == [
        (A5, NO_CAPACITY),
        (A6, NO_CAPACITY),
        (B5, NO_CAPACITY),
    ]
    assert "sufficient g6 capacity" in got.refusals[1].message


def test_single_zone_is_the_one_that_provides_the_most() -> None:
    made = market(a5=(1, 0.1), a6=(1, 0.1), b5=(4, 0.9))

    assert pools(plan(made, spot(4, is_single_zone=True))) == [B5] * 4
    assert pools(plan(made, spot(2, is_single_zone=True))) == [A5, A6]
    assert pools(plan(made, spot(2, is_single_zone=True, is_single_type=True))) == [B5] * 2


def test_below_the_minimum_target_nothing_is_launched() -> None:
    got = plan(market(a5=(2, 0.3)), spot(4, min_target=3))

    assert (pools(got), got.refusals[0].code) == ([], UNFULFILLABLE)
    assert "request configuration" in got.refusals[0].message
    assert pools(plan(market(a5=(2, 0.3)), spot(4, min_target=2))) == [A5, A5]


def test_machine_counts_as_its_weight_in_units() -> None:
    made = market(a5=(9, 1.0), a6=(9, 1.5))
    wanted = [Candidate(pool=A5, weight=1), Candidate(pool=A6, weight=4)]

    # 1.5 / 4 a unit is cheaper than 1; the second machine exceeds the target, as on EC2.
    assert pools(plan(made, spot(5), *wanted)) == [A6, A6]


def test_a_price_above_the_bid_is_refused() -> None:
    got = plan(market(a5=(9, 0.3)), spot(1), Candidate(pool=A5, max_price_usd=0.2))

    assert [one.code for one in got.refusals] == [PRICE_TOO_LOW]
    assert "lower than the minimum" in got.refusals[0].message


def test_on_demand_machines_are_counted_by_type() -> None:
    made = Market()
    made.set_on_demand("g5", price_usd=1.0, capacity=2)
    made.take("i-1", A5, "on-demand")

    got = plan(made, Demand(lifecycle="on-demand", target=2))

    assert len(got.launches) == 1
    assert {one.code for one in got.refusals} == {NO_CAPACITY}


def test_taken_capacity_is_not_free_and_reclaimed_capacity_is_lost() -> None:
    made = market(a5=(2, 0.3))
    made.take("i-1", A5, "spot")
    made.take("i-2", A5, "spot")
    assert made.free(A5, "spot") == 0

    made.release("i-1")
    assert made.free(A5, "spot") == 1

    made.release("i-2", is_lost=True)
    assert made.free(A5, "spot") == 1


def test_a_charge_follows_the_price_in_force() -> None:
    made = market(a5=(9, 1.0))
    made.set_pool(A5, at=3600.0, price_usd=2.0)
    made.set_on_demand("g5", price_usd=4.0)

    assert made.charge_usd(A5, "spot", 1800.0, 5400.0) == pytest.approx(0.5 * 1.0 + 0.5 * 2.0)
    assert made.charge_usd(A5, "on-demand", 0.0, 1800.0) == pytest.approx(2.0)
    assert made.periods(A5) == [(BEFORE, 3600.0, 1.0), (3600.0, math.inf, 2.0)]
    assert made.charge_usd(B5, "spot", 0.0, 1800.0) == 0.0
    assert (made.spot_usd(A5, 3599.0), made.spot_usd(A5, 3600.0)) == (1.0, 2.0)


def test_changes_in_the_past_and_negative_values_are_refused() -> None:
    made = market(a5=(9, 1.0))
    made.set_pool(A5, at=100.0, price_usd=2.0)

    with pytest.raises(ValueError, match="later time"):
        made.set_pool(A5, at=99.0, price_usd=3.0)
    with pytest.raises(ValueError, match="must be >= 0"):
        made.set_pool(A5, at=101.0, capacity=-1)


def test_the_score_falls_with_the_target() -> None:
    made = market(a5=(5, 0.3), b5=(5, 0.3))

    assert [made.score([A5, B5], units) for units in (1, 10, 1000)] == [10, 5, 1]


def test_the_default_market_has_all_types_in_all_zones() -> None:
    made = Market.default(["z-a", "z-b"])

    assert made.free(CapacityPool("g5.xlarge", "z-b"), "spot") > 0
    assert made.free(CapacityPool("t3.medium", "z-a"), "on-demand") > 0
    assert made.free(CapacityPool("x9.huge", "z-a"), "on-demand") == 0
