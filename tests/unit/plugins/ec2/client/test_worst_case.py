"""What a cluster costs at most: by worker, whatever the size of its machines."""

from __future__ import annotations

import json
from typing import Any

import pytest

from etrain_jupyter.plugins.ec2.client.worst_case import worst_of
from etrain_jupyter.plugins.ec2.ledger import PriceBook
from etrain_jupyter.plugins.ec2.placement import Offer
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec

BIG = Offer(type="g5.12xlarge", zone="a", workers=4, spot_usd=2.4, on_demand_usd=5.6)
SMALL = Offer(type="g5.xlarge", zone="a", workers=1, spot_usd=0.4, on_demand_usd=1.0)
BOOK = PriceBook(on_demand={"t3.medium": 0.04}, volume_gib_month=0.0)


def change(spec: AwsSpotSpec, **keys: Any) -> AwsSpotSpec:
    return AwsSpotSpec.parse(json.loads(spec.to_json()) | keys)


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
    worst = worst_of(change(spec, **keys), offers, BOOK, 8)

    assert worst.hourly == pytest.approx(hourly)
    assert worst.total == pytest.approx(12 * hourly)


def test_total_is_bounded_by_the_budget(spec: AwsSpotSpec) -> None:
    worst = worst_of(change(spec, budget={"max_total": 5}), (SMALL,), BOOK, 8)

    assert worst.total == 5.0
