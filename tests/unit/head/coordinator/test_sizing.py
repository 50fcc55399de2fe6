"""``workers.target: goodput`` in the coordinator: what a job takes of the workers that exist."""

from __future__ import annotations

from etrain_jupyter.head.coordinator.coordinator import report_progress
from etrain_jupyter.head.coordinator.sharing import REVIEW_S
from etrain_jupyter.log import events
from etrain_jupyter.wire import messages as m
from tests.unit.head.coordinator.rig import Rig

GOODPUT = {"workers": {"target": "goodput"}}


def train(rig: Rig, *, workers: int, step_s: float, first: int, count: int = 20) -> None:
    """Commit steps that take this long."""
    records = tuple(
        {**rig.step_record(step), "world_size": workers, "samples_per_s": 16 / step_s}
        for step in range(first, first + count)
    )
    rig.tell("w1", m.StepsTrained, records=records)
    rig.tick(REVIEW_S)


def sizes(rig: Rig) -> list[tuple[int, str]]:
    return [(event.workers, event.limit) for event in rig.events(events.WorkersSized)]


async def test_job_takes_the_minimum_until_it_is_measured_and_then_a_second_worker(rig):
    rig.hello("w1", "w2", "w3")
    await rig.submit(max_workers=3, config=GOODPUT)
    assert rig.nodes.wanted == 1
    assert set(rig.job.state.assigned) == {"w1"}
    rig.warm("w1")
    rig.tick(REVIEW_S)
    assert sizes(rig) == [(1, "unmeasured")]

    train(rig, workers=1, step_s=1.0, first=1)

    assert sizes(rig) == [(1, "unmeasured"), (2, "measuring")]
    assert rig.nodes.wanted == 2
    assert set(rig.job.state.assigned) == {"w1", "w2"}
    assert report_progress(rig.job).max_workers == 2
    [_, event] = rig.events(events.WorkersSized)
    assert (event.offered, event.measured) == (3, [1])
    assert event.reason.startswith("2 of 3 workers to measure the exchange of gradients")
    assert rig.job.record.sized is not None
    assert rig.job.record.sized.reason == event.reason


async def test_job_is_sized_within_what_the_pool_can_provide(rig):
    rig.nodes.most = 1
    rig.hello("w1")
    await rig.submit(max_workers=16, config=GOODPUT)
    rig.warm("w1")
    train(rig, workers=1, step_s=1.0, first=1)
    assert sizes(rig) == [(1, "max")]


async def test_price_and_deadline_of_the_pool_are_used(rig):
    rig.nodes.records = [{"worker": "w1", "price_usd_per_h": 0.25, "device": "cpu"}]
    rig.nodes.finish_by_s = 30.0
    rig.hello("w1", "w2")
    await rig.submit(max_workers=2, config=GOODPUT)
    rig.warm("w1")
    train(rig, workers=1, step_s=1.0, first=1)
    view = rig.coordinator._sharing._view_of(rig.job)
    assert view.usd_per_worker_h == 0.25
    assert view.remaining_s is not None
    assert view.remaining_s < 30.0


async def test_job_without_the_target_takes_all_workers_as_before(rig):
    rig.hello("w1", "w2")
    await rig.submit(max_workers=2)
    rig.tick(REVIEW_S)
    assert set(rig.job.state.assigned) == {"w1", "w2"}
    assert not sizes(rig)
