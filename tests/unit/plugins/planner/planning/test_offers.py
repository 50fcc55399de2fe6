"""Machine types and prices: of a pool, of the job's log, and of the built-in table."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from etrain_jupyter.errors import ConfigError, PoolError
from etrain_jupyter.plugins.planner.planning.line import plan_job
from etrain_jupyter.plugins.planner.planning.measured import MeasuredJob, read_measured
from etrain_jupyter.plugins.planner.planning.offers import MachineOffer, market_of
from tests.unit.plugins.planner.planning.measured_jobs import CPU, GPUS, measured_job

POOLS = """
spot:
  kind: aws-spot
  region: us-east-1
  bucket: my-bucket
  workers: {max: 3}
  capacity: {types: [g5.xlarge, g6.xlarge]}
  head: on-demand
unknown:
  kind: aws-spot
  region: us-east-1
  bucket: my-bucket
  capacity: {types: [p9.xlarge]}
lab:
  kind: address
  address: tcp://10.0.0.1:8786
"""


@pytest.fixture(autouse=True)
def _pools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Define three pools, and provide no access to AWS."""
    (tmp_path / "pools.yaml").write_text(POOLS)
    monkeypatch.setenv("ETRAIN_POOLS", str(tmp_path / "pools.yaml"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))


def on_cpu() -> MeasuredJob:
    return read_measured(measured_job(CPU, [(1, 64), (2, 64)]))


def on_gpus() -> MeasuredJob:
    return read_measured(
        measured_job(GPUS, [(1, 64)], machine="g5.xlarge", lifecycle="spot", usd_per_h=0.41)
    )


def test_local_pool_offers_the_measured_machine_without_a_price() -> None:
    market = market_of(on_cpu(), "local")

    [offer] = market.offers
    assert (offer.machine, offer.workers, offer.boot_s) == ("cpu", 1, 0.0)
    assert not offer.has_prices
    assert "cpu: no price is known" in market.notes[0]


def test_pool_of_other_machines_uses_the_prices_in_the_log() -> None:
    market = market_of(on_gpus(), "lab")

    [offer] = market.offers
    assert (offer.machine, offer.spot_usd) == ("g5.xlarge", 0.41)
    assert market.notes == ("Prices: those that the pool reported while the job ran.",)


def test_named_types_have_the_prices_of_the_table_and_a_guess_for_spot() -> None:
    market = market_of(on_gpus(), "local", ["g5.xlarge", "g4dn.12xlarge"])

    logged, tabled = market.offers
    assert (logged.on_demand_usd, logged.spot_usd) == (1.006, 0.41)
    assert not logged.is_spot_guessed
    assert (tabled.workers, tabled.on_demand_usd) == (4, 3.912)
    assert tabled.spot_usd == pytest.approx(0.3 * 3.912)
    assert tabled.is_spot_guessed
    assert market.notes[0].startswith("On-demand prices: built-in table, us-east-1, ")


def test_unknown_type_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"--types p9\.xlarge: the built-in table") as e:
        market_of(on_gpus(), "local", ["p9.xlarge"])

    assert "g5.xlarge" in "\n".join(e.value.render())


def test_pool_on_ec2_without_access_uses_log_and_table_and_says_so() -> None:
    market = market_of(on_gpus(), "spot")

    assert [(one.machine, one.spot_usd) for one in market.offers] == [
        ("g5.xlarge", 0.41),
        ("g6.xlarge", pytest.approx(0.3 * 0.8048)),
    ]
    assert (market.max_workers, market.pool) == (3, "spot")
    assert market.head_usd > 0
    assert market.notes[0].startswith("EC2 was not reached, so these are not its current prices")
    assert "credentials" in market.notes[0]


def test_pool_without_prices_is_refused() -> None:
    with pytest.raises(PoolError, match=r"pool 'unknown' has no prices.*--types"):
        market_of(on_gpus(), "unknown")


def test_pool_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(PoolError, match=r"'moon'. It defines spot, unknown, lab"):
        market_of(on_cpu(), "moon")


def test_offer_without_any_price_has_no_guessed_spot_price() -> None:
    offer = MachineOffer(machine="cpu").with_guessed_spot()

    assert math.isnan(offer.spot_usd)


def test_pool_on_ec2_is_simulated_with_its_own_rules(tmp_path: Path) -> None:
    trace = tmp_path / "market.csv"
    trace.write_text("seconds,capacity\n0,3\n36000,3\n")
    at = [(1, 512), (1, 64), (2, 512)]
    job = measured_job(
        GPUS, at, machine="g5.xlarge", lifecycle="spot", usd_per_h=0.41, total_samples=200_000
    )

    plan = plan_job(job, trace=str(trace), pool="spot", cores=2)

    assert max(one.workers for one in plan.options) == 3  # workers.max of the pool
    assert {one.policy for one in plan.traced} == {"spot", "deadline"}
    assert all(0 < one.median_hours < 2 * one.option.hours for one in plan.traced)
