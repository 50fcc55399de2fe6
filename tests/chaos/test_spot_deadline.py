"""``capacity.policy: deadline`` on a real cluster, whose head reports progress to the pool."""

from __future__ import annotations

import pytest

from etrain_jupyter.log.events import WorkerJoined
from tests.capabilities import long
from tests.chaos.spot import Spot, events

pytestmark = [pytest.mark.aws, pytest.mark.timeout(240)]


@long
def test_job_without_spot_capacity_starts_on_demand_and_continues_on_spot(spot: Spot) -> None:
    spot.cloud.set_capacity(0)
    spot.configure(
        capacity={"policy": "deadline", "finish_by": "12 h", "on_demand": {"after": "1 s"}}
    )
    job = spot.submit(workers=2)
    spot.until(lambda: job.step >= 3, "the first steps", job)
    first = events(job, WorkerJoined)
    spot.cloud.set_capacity(2)
    spot.until(lambda: len(events(job, WorkerJoined)) >= 2, "a spot worker", job)

    assert [one.lifecycle for one in first] == ["on-demand"]
    assert events(job, WorkerJoined)[1].lifecycle == "spot"
