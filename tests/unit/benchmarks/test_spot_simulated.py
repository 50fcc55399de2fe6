"""Test the trace and the simulation of a day of the benchmark ``spot``."""

from __future__ import annotations

import statistics

import pytest

from benchmarks.cloud.spot_simulated import MINUTES, Pace, simulate_day, trace_of
from benchmarks.cloud.spot_trace import Change, make_day
from etrain_jupyter.plugins.planner.simulation.trace import SpotTrace

DAY = (
    Change(at_s=6000.0, zone="a", capacity=1, way="rebalance"),
    Change(at_s=12_000.0, zone="a", capacity=2),
    Change(at_s=18_000.0, zone="a", capacity=0, way="silent"),
)


PACE = Pace(day_s=400.0, scale=100.0, notice_s=8.0, risk_s=4.0, boots_s=(10.0,))


def trace(*day: Change) -> SpotTrace:
    return trace_of(day, zones=["a"], num_nodes=2, spot_usd=0.3, pace=PACE)


def simulated(*day: Change) -> dict[str, float]:
    return simulate_day(trace(*day), num_nodes=2, on_demand_usd=1.0, pace=PACE)


def test_interruptions_become_slots_that_end_with_their_warnings() -> None:
    ends = sorted(
        (slot.until_s - PACE.prelude_s, slot.notice_s, slot.risk_s) for slot in trace(*DAY).slots
    )
    assert ends == [(72.0, 8.0, 4.0), (180.0, 0.0, 0.0), (180.0, 0.0, 0.0)]


def test_undisturbed_day_has_full_goodput_and_the_price_of_its_machines() -> None:
    found = simulated()
    assert found["goodput"] == pytest.approx(1.0)
    assert found["mean_world_size"] == 2.0
    assert found["day_spent_usd"] == pytest.approx(2 * 0.3 * 400 * 100 / 3600)


def test_lost_capacity_lowers_goodput_and_cost() -> None:
    found = simulated(*DAY)
    # Both machines until 64 s, one until a replacement has booted after 120 s, none after 180 s.
    assert 0.3 < found["goodput"] < 0.43
    assert found["mean_world_size"] == pytest.approx(2 * found["goodput"], rel=0.05)
    assert found["day_spent_usd"] < 2 * 0.3 * 400 * 100 / 3600 / 2


def test_simulated_days_use_most_of_the_capacity_that_the_market_allows() -> None:
    found = []
    for seed in range(1, 9):
        day = make_day(seed=seed, zones=["a", "b"], num_nodes=4)
        window = trace_of(day, zones=["a", "b"], num_nodes=4, spot_usd=0.3, pace=MINUTES)
        found.append(simulate_day(window, num_nodes=4, on_demand_usd=1.0, pace=MINUTES, num_runs=1))
    mean = {name: statistics.mean(one[name] for one in found) for name in found[0]}
    # 0.88 with workers that left at their notice, and back-offs of up to five minutes.
    assert mean["goodput_by_allowed"] > 0.92
    assert mean["lost_draining"] < 0.03
    assert mean["lost_back_off"] < 0.015
    lost = sum(value for name, value in mean.items() if name.startswith("lost_"))
    assert mean["goodput"] + lost == pytest.approx(mean["allowed_goodput"])
