"""Failures of a spot cluster without a notice, while a job trains on it."""

from __future__ import annotations

import re
import time

import pytest

import etrain_jupyter
from etrain_jupyter.log.events import (
    CheckpointCommitted,
    GenerationFormed,
    JobRestored,
    LogLine,
    SchedulerRestarted,
    StepCompleted,
    StepUndone,
    WorkerJoined,
    WorkerLost,
)
from etrain_jupyter.notebook.job.training_job import TrainingJob
from etrain_jupyter.plugins.ec2.simulator import ApiFault, FakeAws
from etrain_jupyter.pools.base import Leftovers
from tests.capabilities import long
from tests.chaos.spot import PATIENCE_S, SLOW, Spot, check, events, trainers

pytestmark = [pytest.mark.aws, pytest.mark.timeout(240)]


def max_machines(cloud: FakeAws) -> int:
    """Return the maximum number of machines at one time."""
    ones = cloud.instances()
    ends = {one.instance_id: one.ended_at or time.time() for one in ones}
    return max(
        sum(one.launched_at <= at.launched_at < ends[one.instance_id] for one in ones)
        for at in ones
    )


def num_undone(job: TrainingJob) -> int:
    """Return the number of steps that were repeated."""
    return len(events(job, StepUndone)) + sum(one.num_undone for one in events(job, JobRestored))


def lose_a_machine(spot: Spot, job: TrainingJob) -> None:
    """Terminate one of two machines without a notice; wait until two workers train again."""
    victim, other = spot.living()
    kept = trainers(job)[other.instance_id]
    began = time.time()
    spot.cloud.preempt(victim.instance_id, silent=True)
    spot.until(lambda: events(job, WorkerLost), "the loss", job)
    spot.until(lambda: len(spot.cloud.instances()) == 3, "a replacement", job)
    replacement = spot.cloud.instances()[2]
    whole = {other.instance_id, replacement.instance_id}
    spot.until(lambda: set(trainers(job)) == whole, "two workers again", job)
    spot.await_steps(job)

    assert [one.worker for one in events(job, WorkerLost)] == [victim.instance_id]
    # In one line, which the list of rerun tests shows.
    assert num_undone(job) <= 1, "; ".join(
        str(event) for event in job.events() if not isinstance(event, StepCompleted)
    )
    assert trainers(job)[other.instance_id] == kept
    spot.figures |= {
        "death to report": events(job, WorkerLost)[0].time - began,
        "death to replacement launched": replacement.launched_at - began,
        "death to whole": events(job, GenerationFormed)[-1].time - began,
        "steps undone": num_undone(job),
    }


@long
def test_machine_lost_without_notice_undoes_at_most_one_step(spot: Spot) -> None:
    spot.configure()
    lose_a_machine(spot, spot.train())
    spot.settle()


@long
def test_throttling_errors_and_lost_replies_launch_no_machine_twice(spot: Spot) -> None:
    spot.configure()
    job = spot.train()
    spot.cloud.set_faults(
        ApiFault(action="CreateFleet", code="RequestLimitExceeded", count=2),
        ApiFault(action="CreateFleet", is_answer_lost=True, skip=2, count=1),
        ApiFault(action="DescribeInstances", code="InternalError", skip=1, count=1),
    )
    lose_a_machine(spot, job)
    asked = spot.cloud.calls()["ec2.CreateFleet"]
    spot.finish()

    assert asked >= 4
    assert len(spot.cloud.instances()) == 3
    assert max_machines(spot.cloud) == 2
    spot.check_costs()


@long
def test_api_lists_with_six_seconds_lag_launch_no_extra_machine(spot: Spot) -> None:
    spot.cloud.set_lag(6)
    spot.configure()
    job = spot.train()
    lose_a_machine(spot, job)
    spot.finish()

    assert len(spot.cloud.instances()) == 3
    assert max_machines(spot.cloud) == 2
    spot.check_costs()


@long
def test_next_up_adopts_machines_and_trainers_of_a_killed_launcher(spot: Spot) -> None:
    spot.configure()
    job = spot.train()
    machines = [one.instance_id for one in spot.living()]
    kept = trainers(job)
    [cluster] = spot.ids()
    spot.kill_heads()
    killed_at = time.time()
    address = spot.pool().up()
    again = etrain_jupyter.attach(job.id)
    spot.until(lambda: events(again, SchedulerRestarted), "the event of the restart", again)
    spot.await_steps(again)

    assert address.cluster_id == cluster
    assert [one.instance_id for one in spot.cloud.instances()] == machines
    assert trainers(again) == kept
    assert num_undone(again) == 0
    assert events(again, WorkerLost) == []
    spot.figures["kill to news"] = events(again, SchedulerRestarted)[0].time - killed_at
    spot.jobs = [again]
    spot.settle()


@long
def test_exhausted_budget_saves_a_checkpoint_and_the_job_resumes_on_another_pool(
    spot: Spot,
) -> None:
    spot.cloud.set_price(360.0)  # $0.10 per second, at least $6.00 per machine
    spot.configure(
        workers={"max": 1}, budget={"max_total": 7.0}, interruption={"drain": "1 s"}, tick="0.5 s"
    )
    job = spot.train(1)
    assert job.wait(timeout=PATIENCE_S) == "stopped"
    last = events(job, StepCompleted)[-1].step
    spot.until(lambda: not spot.living(), "the end of the machines", job)

    assert events(job, CheckpointCommitted)[-1].step == last
    words = " ".join(one.text for one in events(job, LogLine))
    assert "budget.max_total=7" in words
    assert spot.cloud.bill().usd <= 7.0
    check(job)
    spot.figures["spent of $7"] = spot.cloud.bill().usd
    job.resume(pool="local", max=1)
    spot.until(lambda: job.step > last + 3, "steps on this machine", job)

    assert len(spot.cloud.instances()) == 1
    assert num_undone(job) == 0
    spot.settle()


@long
def test_nodes_that_never_boot_stop_launches_and_the_job_logs_their_console(
    spot: Spot,
) -> None:
    spot.configure(image={"setup": ["echo no such driver", "shutdown -h now"]})
    job = spot.submit()
    spot.until(lambda: job.status in ("failed", "stopped"), "the job's end", job)
    words = "\n".join(one.text for one in events(job, LogLine))

    assert "no such driver" in words
    assert re.search("[34] nodes in a row never connected", words)
    # They are requested in pairs.
    assert 3 <= len(spot.cloud.instances()) <= 4
    spot.settle()


@long
def test_two_clusters_in_one_account_do_not_touch_each_other(spot: Spot) -> None:
    spot.configure("one", workers={"max": 1})
    spot.configure("two", workers={"max": 1})
    first = spot.train(1, pool="one")
    mine = {one.instance_id for one in spot.living()}
    second = spot.train(1, pool="two")
    theirs = {one.instance_id for one in spot.living()} - mine
    kept = trainers(second)
    first.stop()
    assert first.wait(timeout=PATIENCE_S) == "stopped"
    [cluster] = {one.tags["etrain:cluster"] for one in spot.living() if one.instance_id in mine}
    assert spot.pool("one").down() == Leftovers()
    spot.await_steps(second)

    assert {one.instance_id for one in spot.living()} == theirs
    assert spot.cloud.leftovers(cluster) == {}
    assert trainers(second) == kept
    assert events(second, WorkerLost, StepUndone, JobRestored) == []
    SLOW.unlink()
    spot.settle()


@long
def test_deadline_job_without_spot_capacity_starts_on_demand_and_continues_on_spot(
    spot: Spot,
) -> None:
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
