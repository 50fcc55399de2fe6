"""Test the cost of a simulated day in the day's own time."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.cloud.spot_money import day_usd
from etrain_jupyter.plugins.ec2.simulator.bill import Bill, BillRow


def row(name: str, seconds: float, **values: Any) -> BillRow:
    """Bill of a machine: 3.6 USD per hour, 36 USD on demand, charged for at least one minute."""
    usd = max(60.0, seconds) * 0.001
    usual: dict[str, Any] = {"compute_usd": usd, "waived_usd": 0.0, "is_alive": True, "reason": ""}
    return BillRow(
        instance_id=name,
        instance_type="g6.xlarge",
        zone="us-east-1a",
        lifecycle="spot",
        seconds=seconds,
        disk_usd=1.0,
        on_demand_usd=10 * usd,
        **usual | values,
    )


def interrupted(name: str, seconds: float) -> BillRow:
    usd = max(60.0, seconds) * 0.001
    reason = "Server.SpotInstanceTermination"
    return row(name, seconds, compute_usd=0.0, waived_usd=usd, is_alive=False, reason=reason)


def test_cost_is_scaled_to_the_day_without_the_minimum_charge() -> None:
    spot, on_demand = day_usd(Bill(rows=()), Bill(rows=(row("i-1", 30.0),)), 100)

    assert (spot, on_demand) == (pytest.approx(3.0), pytest.approx(30.0))


def test_time_before_the_day_is_not_charged() -> None:
    before = Bill(rows=(row("i-1", 20.0),))

    assert day_usd(before, Bill(rows=(row("i-1", 120.0),)), 100)[0] == pytest.approx(10.0)


def test_only_machines_interrupted_in_their_first_hour_are_free() -> None:
    after = Bill(rows=(interrupted("i-1", 35.9), interrupted("i-2", 36.1)))

    assert day_usd(Bill(rows=()), after, 100)[0] == pytest.approx(3.61)
