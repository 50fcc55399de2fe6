"""EC2 reclaims machines with a notice while a job trains on them: no step is lost."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from etrain_jupyter.log.events import (
    CheckpointCommitted,
    GenerationFormed,
    JobRestored,
    PreemptionNoticed,
    RebalanceRecommended,
    StepCompleted,
    StepUndone,
    WorkerLeft,
    WorkerLost,
)
from etrain_jupyter.notebook.job.training_job import TrainingJob
from etrain_jupyter.plugins.ec2.simulator import FakeAws
from etrain_jupyter.testing.s3_faults import S3Fault
from tests.capabilities import long
from tests.chaos.spot import PATIENCE_S, Spot, events, open_spot, trainers

pytestmark = [pytest.mark.aws, pytest.mark.timeout(240)]


def assert_nothing_lost(job: TrainingJob) -> None:
    assert events(job, WorkerLost, StepUndone, JobRestored) == []


def ride_out_a_notice(spot: Spot) -> None:
    """Recommend a rebalance, then interrupt one of two machines; wait for its replacement."""
    spot.configure()
    job = spot.train()
    [victim, other] = spot.living()
    kept = trainers(job)[other.instance_id]
    began = time.time()
    spot.cloud.preempt(victim.instance_id, rebalance_s=3, notice_s=12)
    spot.until(lambda: len(spot.cloud.instances()) == 3, "a replacement", job)
    replacement = spot.cloud.instances()[2]
    assert victim.instance_id in {one.instance_id for one in spot.living()}
    spot.until(lambda: events(job, WorkerLeft), "the departure of the victim", job)
    whole = {other.instance_id, replacement.instance_id}
    spot.until(lambda: set(trainers(job)) == whole, "two workers again", job)
    spot.await_steps(job)

    assert [event.worker for event in events(job, RebalanceRecommended)] == [victim.instance_id]
    assert [event.worker for event in events(job, WorkerLeft)] == [victim.instance_id]
    assert trainers(job)[other.instance_id] == kept
    assert_nothing_lost(job)
    [reported] = events(job, PreemptionNoticed)
    ended = spot.cloud.instances()[0]
    assert ended.ended_at is None or ended.ended_at > events(job, WorkerLeft)[0].time
    spot.figures |= {
        "rebalance to replacement launched": replacement.launched_at - began,
        "notice to left": events(job, WorkerLeft)[0].time - (began + 3),
        "notice to report": reported.time - (began + 3),
        "rebalance to whole": events(job, GenerationFormed)[-1].time - began,
    }
    spot.until(lambda: spot.cloud.instances("terminated"), "the victim's end", job)


def test_machine_is_replaced_before_its_interruption_and_no_step_is_lost(spot: Spot) -> None:
    ride_out_a_notice(spot)
    spot.settle()


@long
def test_no_step_is_lost_without_network_namespaces(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    with FakeAws("loopback", minute_s=1.0) as cloud:
        for spot in open_spot(cloud, monkeypatch, tmp_path, request.node.name):
            ride_out_a_notice(spot)
            spot.settle()


@long
def test_two_simultaneous_notices_keep_the_third_worker_and_launch_two_machines(spot: Spot) -> None:
    spot.configure(workers={"max": 3})
    job = spot.train(3)
    victims = [one.instance_id for one in spot.living()[:2]]
    survivor = spot.living()[2].instance_id
    kept = trainers(job)[survivor]
    for victim in victims:
        spot.cloud.preempt(victim, notice_s=12)
    spot.until(lambda: len(events(job, WorkerLeft)) == 2, "two departures", job)
    spot.until(lambda: job.world_size == 3, "three workers again", job)

    assert {event.worker for event in events(job, WorkerLeft)} == set(victims)
    assert len(spot.cloud.instances()) == 5
    assert trainers(job)[survivor] == kept
    assert_nothing_lost(job)
    spot.settle()


@long
def test_notice_for_a_booting_replacement_launches_another_one(spot: Spot) -> None:
    spot.configure()
    job = spot.train()
    first, second = (one.instance_id for one in spot.living())
    kept = trainers(job)[second]
    spot.cloud.preempt(first, notice_s=12)
    spot.until(lambda: len(spot.cloud.instances()) == 3, "a replacement", job)
    replacement = spot.cloud.instances()[2].instance_id
    spot.until(lambda: spot.cloud.instances()[2].state == "running", "its boot", job)
    spot.cloud.preempt(replacement, notice_s=3)
    spot.until(lambda: len(spot.cloud.instances()) == 4, "another replacement", job)
    last = spot.cloud.instances()[3].instance_id
    spot.until(lambda: set(trainers(job)) == {second, last}, "two workers again", job)

    assert trainers(job)[second] == kept
    assert events(job, StepUndone, JobRestored) == []
    assert {event.worker for event in events(job, WorkerLost)} <= {replacement}
    assert len(spot.cloud.instances()) == 4
    spot.settle()


@long
def test_notice_during_a_checkpoint_loses_neither_step_nor_checkpoint(
    spot: Spot, monkeypatch: pytest.MonkeyPatch
) -> None:
    spot.configure()
    runs = f"s3://{spot.account.bucket}/runs"
    monkeypatch.setenv("ETRAIN_RUNS", runs)
    job = spot.train(checkpoint={"every": "1 h"})
    saver = events(job, GenerationFormed)[-1].ranks[0]
    # Its next checkpoint takes seconds to write.
    spot.cloud.set_faults(S3Fault(kind="slow", match="/data/", seconds=2.0))
    job.checkpoint()
    asked_at = job.step
    spot.cloud.preempt(saver, notice_s=12)
    spot.until(lambda: events(job, WorkerLeft), "the departure of the victim", job)
    spot.until(lambda: job.world_size == 2, "two workers again", job)
    saved = spot.until(lambda: events(job, CheckpointCommitted), "a checkpoint", job)

    assert events(job, WorkerLeft)[0].worker == saver
    assert saved[0].step >= asked_at
    assert_nothing_lost(job)
    spot.cloud.set_faults()
    job.stop()
    assert job.wait(timeout=PATIENCE_S) == "stopped"
    last = events(job, StepCompleted)[-1].step
    assert [one.step for one in events(job, CheckpointCommitted)][-1] == last
    spot.settle()


@long
def test_notices_arrive_despite_a_failing_metadata_service(spot: Spot) -> None:
    spot.configure(workers={"max": 3})
    job = spot.train(3)
    for how, heals_s in (("expire-tokens", 0.0), ("500", 4.0), ("hang", 6.0)):
        ranks = events(job, GenerationFormed)[-1].ranks
        victim = ranks[-1]
        spot.cloud.break_imds(victim, how)
        began = time.time()
        spot.cloud.preempt(victim, notice_s=20)
        if heals_s:
            time.sleep(heals_s)  # the service fails for this time, while the notice is pending
            assert victim not in {event.worker for event in events(job, PreemptionNoticed)}
            spot.cloud.break_imds(victim, "")
        spot.until(
            lambda victim=victim: [e for e in events(job, WorkerLeft) if e.worker == victim],
            "the departure of the victim",
            job,
        )
        [reported] = [one for one in events(job, PreemptionNoticed) if one.worker == victim]
        spot.figures[f"{how}: notice to report"] = reported.time - began
        spot.until(lambda: job.world_size >= 2, "two workers", job)

    assert_nothing_lost(job)
    spot.settle()
