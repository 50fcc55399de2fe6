"""What a job has cost, from its events."""

from __future__ import annotations

from typing import Any

import pytest

from etrain_jupyter.log import events as t
from etrain_jupyter.notebook.job.history import JobCost, LatestValues, cost_of
from tests.unit.log.spent import made

COMMON = {"job_id": "j", "time": 1.0, "generation": 1}


def view_of(*events: t.Event) -> LatestValues:
    view = LatestValues()
    view.add(events)
    return view


def step(number: int, epoch: int, first: int) -> t.StepCompleted:
    return made(t.StepCompleted, **COMMON, step=number, epoch=epoch, first=first, samples=10)


def test_job_in_a_pool_without_prices_has_no_cost() -> None:
    cost = cost_of(view_of(step(1, 0, 0)))

    assert not cost.is_known
    assert str(cost) == "no cost: the machines of this job's pool have no prices"


def test_cost_is_the_last_reported_one_with_interruptions_and_samples() -> None:
    told = {"on_demand_usd": 4.0, "wasted_usd": 0.2}
    cost = cost_of(
        view_of(
            made(t.JobPlanned, **COMMON),
            t.CostUpdated(**COMMON, spent_usd=0.5, on_demand_usd=1.0),
            t.PreemptionNoticed(**COMMON, worker="i-1", deadline=9.0),
            t.WorkerLeft(**COMMON, worker="i-1", reason="preempted"),
            t.WorkerLost(**COMMON, worker="i-2", cause="gone", detected_s=1.0),
            step(15, 1, 40),
            t.CostUpdated(**COMMON, spent_usd=1.0, **told),
        )
    )

    assert cost == JobCost(spent_usd=1.0, num_interruptions=2, num_samples=150, **told)
    assert str(cost).splitlines() == [
        "spent    $1.00",
        "saved    $3.00 of $4.00 on demand (75%)",
        "wasted   $0.20, $0.10 on average over 2 interruptions",
        "samples  $6.67 per 1,000",
    ]


def test_cost_per_thousand_samples_is_shown_by_type_if_there_are_several() -> None:
    values: dict[str, Any] = {
        "usd_by_type": {"g6.xlarge": 0.6, "g5.2xlarge": 0.4, "g4dn.xlarge": 0.01},
        "samples_by_type": {"g6.xlarge": 120.0, "g5.2xlarge": 30.0},
    }
    cost = cost_of(view_of(t.CostUpdated(**COMMON, spent_usd=1.01, on_demand_usd=2.0, **values)))

    assert cost.usd_per_1k_samples_by_type == {
        "g5.2xlarge": pytest.approx(13.333, rel=1e-4),
        "g6.xlarge": pytest.approx(5.0),
    }
    assert str(cost).splitlines()[-3:] == [
        "g4dn.xlarge  $0.01, 0 samples",
        "g5.2xlarge   $0.40, 30 samples, $13.33 per 1,000",
        "g6.xlarge    $0.60, 120 samples, $5.00 per 1,000",
    ]
