from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from etrain_jupyter.errors import ConfigError, PoolError
from etrain_jupyter.plugins.planner.simulation.line import run_simulation, simulate_text

Options = dict[str, Any]

POOLS = """
spot:
  kind: aws-spot
  region: us-east-1
  bucket: my-bucket
  workers: {max: 3}
  capacity: {types: [p9.xlarge, g5.xlarge], policy: deadline, finish_by: 2 h, keep: 0.2}
unknown:
  kind: aws-spot
  region: us-east-1
  bucket: my-bucket
  capacity: {types: [p9.xlarge]}
lab:
  kind: address
  address: tcp://10.0.0.1:8786
"""


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Options:
    monkeypatch.setenv("ETRAIN_POOLS", str(tmp_path / "pools.yaml"))
    (tmp_path / "pools.yaml").write_text(POOLS)
    (tmp_path / "market.csv").write_text("seconds,capacity\n0,2\n36000,2\n")
    trace = str(tmp_path / "market.csv")
    return {"trace": trace, "work_s": 3600.0, "policies": ("spot",), "starts": 1}


def test_pool_gives_workers_deadline_keep_and_price(options: Options) -> None:
    done, notes = run_simulation(**options, pool="spot")

    job = done.job
    assert (job.workers, job.deadline_s, job.keep) == (3, 7200.0, 0.2)
    assert job.on_demand_usd == 1.006
    assert job.spot_usd == pytest.approx(0.3018)
    assert "1.006 US dollars an hour for g5.xlarge (built-in table, us-east-1, 2025-06)" in notes[0]


def test_other_policies_of_a_pool_with_a_deadline_ignore_it(options: Options) -> None:
    options["policies"] = ("spot", "on-demand", "deadline")

    done, _ = run_simulation(**options, pool="spot")

    # The trace has two machines for three workers.
    assert done["spot"].mean(lambda run: run.on_demand_hours) == 0.0
    assert done["on-demand"].mean(lambda run: run.spot_hours) == 0.0
    assert done["deadline"].late_share == 0.0


def test_options_take_precedence_over_the_pool(options: Options) -> None:
    given: Options = {
        "workers": 2,
        "deadline_s": 5400.0,
        "on_demand_usd": 2.0,
        "spot_usd": 0.5,
        "keep": 1.0,
    }

    done, notes = run_simulation(**options, **given, pool="spot")

    job = done.job
    assert (job.workers, job.deadline_s, job.keep) == (2, 5400.0, 1.0)
    assert (job.on_demand_usd, job.spot_usd, notes) == (2.0, 0.5, [])


def test_pool_without_a_known_price_needs_one_on_the_line(options: Options) -> None:
    with pytest.raises(PoolError, match="is not in the built-in table"):
        run_simulation(**options, pool="unknown")

    done, _ = run_simulation(**options, pool="unknown", on_demand_usd=9.0)
    assert done.job.on_demand_usd == 9.0


@pytest.mark.parametrize(
    ("pool", "message"),
    [("lab", "is of kind 'address', which has no spot machines"), ("sopt", "It defines spot,")],
)
def test_pool_that_cannot_be_simulated_is_refused(
    options: Options, pool: str, message: str
) -> None:
    with pytest.raises(PoolError, match=message):
        run_simulation(**options, pool=pool)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workers": 1001}, "--workers 1001 is not between 1 and 1000"),
        ({"efficiency": 0.01}, "--efficiency 0.01 is not between 0.0625 and 1"),
        ({"shortage": 2.0}, "--shortage 2 is not between 0 and 1"),
        ({"keep": float("nan")}, "--keep nan is not between 0 and 1"),
        ({"spot_usd": -1.0}, "--spot-usd -1 is not between"),
        ({"scale": 5000}, "--scale 5000 is not between"),
    ],
)
def test_value_outside_its_range_is_refused(
    options: Options, changes: Options, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run_simulation(**options, **changes)


def test_a_thousand_workers_are_simulated_on_a_scaled_trace(options: Options) -> None:
    options["policies"] = ("deadline",)

    done, _ = run_simulation(**options, workers=1000, scale=500, deadline_s=5400.0)

    assert done.results[0].outcomes[0].mean_workers > 900


def test_text_names_the_assumptions(options: Options) -> None:
    shown = simulate_text(**options)

    assert "Costs are in hours of an on-demand machine" in shown
    assert "Assumed: a spot machine costs 30% of one on demand" in shown
