"""Prices of a pool's machine types: the current ones, and what a cluster costs at most."""

from __future__ import annotations

import time
from typing import Any

import pytest

from etrain_jupyter.errors import PoolError
from etrain_jupyter.plugins.ec2.client import live_prices
from etrain_jupyter.plugins.ec2.client.live_prices import read_live_prices, worst_of
from etrain_jupyter.plugins.ec2.ec2_api import Clients
from etrain_jupyter.plugins.ec2.ledger import PriceBook
from etrain_jupyter.plugins.ec2.placement import Offer
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec


def test_prices_of_all_types_are_read_and_nothing_is_launched(
    clients: Clients, spec: AwsSpotSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    # moto has no placement scores.
    monkeypatch.setattr(live_prices, "placement_scores", lambda *_: {"us-east-1a": 3, "b": 7})
    live = read_live_prices(spec, since=time.time() - 3600, now=time.time(), clients=clients)

    assert live.workers == {"g5.xlarge": 1, "g6.xlarge": 1}
    assert live.on_demand["g5.xlarge"] == pytest.approx(1.006)
    assert live.scores == {"g5.xlarge": 7, "g6.xlarge": 7}
    assert live.head_usd == 0.0
    assert "on-demand rates: built-in table, us-east-1" in live.source
    assert all(usd > 0 for zones in live.spot.values() for usd in zones.values())
    assert clients.ec2.describe_instances()["Reservations"] == []


def test_without_credentials_the_error_says_so(
    monkeypatch: pytest.MonkeyPatch, spec: AwsSpotSpec
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")

    with pytest.raises(PoolError, match="credentials"):
        read_live_prices(spec, since=0.0, now=1.0)


BIG = Offer(type="g5.12xlarge", zone="a", workers=4, spot_usd=2.4, on_demand_usd=5.6)
SMALL = Offer(type="g5.xlarge", zone="a", workers=1, spot_usd=0.4, on_demand_usd=1.0)
BOOK = PriceBook(on_demand={"t3.medium": 0.04}, volume_gib_month=0.0)


def change(spec: AwsSpotSpec, **keys: Any) -> AwsSpotSpec:
    return AwsSpotSpec.parse(spec.to_dict() | keys)


@pytest.mark.parametrize(
    ("keys", "offers", "hourly"),
    [
        ({}, (SMALL,), 8 * 0.4),
        ({}, (BIG,), 2 * 2.4),
        ({}, (BIG, SMALL), 8 * 0.6),
        ({"capacity": {"on_demand": {"max": 1}}}, (BIG, SMALL), 8 * 1.4),
        ({"head": "on-demand"}, (SMALL,), 8 * 0.4 + 0.04),
        ({"budget": {"max_hourly": 2}}, (SMALL,), 2.0),
    ],
)
def test_worst_case_uses_the_most_expensive_worker(
    spec: AwsSpotSpec, keys: dict[str, Any], offers: tuple[Offer, ...], hourly: float
) -> None:
    per_hour, total = worst_of(change(spec, **keys), offers, BOOK, 8)

    assert per_hour == pytest.approx(hourly)
    assert total == pytest.approx(12 * hourly)


def test_total_is_bounded_by_the_budget(spec: AwsSpotSpec) -> None:
    _, total = worst_of(change(spec, budget={"max_total": 5}), (SMALL,), BOOK, 8)

    assert total == 5.0
