"""Current prices of a pool's machine types."""

from __future__ import annotations

import time

import pytest

from etrain_jupyter.errors import PoolError
from etrain_jupyter.plugins.ec2.client import live_prices
from etrain_jupyter.plugins.ec2.client.live_prices import read_live_prices
from etrain_jupyter.plugins.ec2.ec2_api import Clients
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
