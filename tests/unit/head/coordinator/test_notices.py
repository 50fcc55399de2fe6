"""What comes of a notice that a supervisor tells of, and of versions that do not fit."""

from __future__ import annotations

import pytest

from etrain_jupyter.head.coordinator.modes import Recovering
from etrain_jupyter.log import events
from etrain_jupyter.wire import messages as m
from etrain_jupyter.wire.versions import WIRE_VERSION
from tests.unit.head.coordinator.rig import Rig


@pytest.fixture
def cloud(rig):
    """The same where every worker has a machine of its own."""
    rig.nodes.replaces_early = rig.nodes.trains_after_notice = True
    return rig


def interrupt(rig, worker: str, left_s: float) -> None:
    # The machine's own clock is wrong: what counts is how long it has left.
    rig.say(worker, m.MachineNotice(notice="interruption", left_s=left_s))


def recommend(rig, worker: str) -> None:
    rig.say(worker, m.MachineNotice(notice="rebalance", left_s=0.0))


def ticks(rig, seconds: int, *workers: str) -> None:
    """Let time pass while these go on talking."""
    for _ in range(seconds * 4):
        for worker in workers:
            rig.say(worker, m.Heartbeat(trainers={}))
        rig.tick()


# --- interruptions ---


async def test_interrupted_worker_leaves_at_a_step_boundary_and_is_logged_once(rig):
    await rig.start("w1", "w2")
    interrupt(rig, "w2", 110.0)
    rig.now += 3.0
    interrupt(rig, "w2", 107.2)
    [told] = rig.events(events.PreemptionNoticed)
    assert (told.worker, told.deadline) == ("w2", 1110.0)
    assert rig.told("w1", m.LeaveGeneration)
    for worker in ("w1", "w2"):
        rig.report(worker, 5, "planned")
    assert [m.worker for m in rig.job.state.members.values()] == ["w1"]


async def test_interruption_sets_the_deadline_from_the_time_left(rig):
    await rig.start("w1", "w2")
    rig.say("w2", m.MachineNotice(notice="interruption", left_s=60.0))
    assert rig.events(events.PreemptionNoticed)[0].deadline == 1060.0


async def test_unused_worker_with_a_notice_is_assigned_to_no_job(rig):
    rig.hello("w1", "w2")
    interrupt(rig, "w2", 60.0)
    await rig.submit(max_workers=2)
    assert [m.worker for m in rig.job.state.members.values()] == ["w1"]
    assert rig.events(events.PreemptionNoticed) == []


async def test_noticed_worker_counts_until_its_release_if_the_pool_replaces_early(cloud):
    await cloud.start("w1", "w2")
    assert cloud.nodes.wanted == 2
    interrupt(cloud, "w2", 60.0)
    assert cloud.nodes.wanted == 3
    # It trains until its replacement is warm.
    cloud.hello("w3")
    ticks(cloud, 1, "w1", "w2", "w3")
    assert cloud.told("w1", m.LeaveGeneration) == []
    cloud.warm("w3")
    assert cloud.told("w1", m.LeaveGeneration)
    for worker in ("w1", "w2"):
        cloud.report(worker, 5, "planned")
    assert (cloud.nodes.released, cloud.nodes.wanted) == ([], 3)
    for worker in ("w1", "w3"):
        cloud.tell(worker, m.GenerationJoined, step=5)
    ticks(cloud, 1, "w1", "w2", "w3")
    assert (set(cloud.nodes.released), cloud.nodes.wanted) == ({"w2"}, 2)


async def test_noticed_cloud_machine_is_killed_only_some_time_after_its_deadline(cloud):
    await cloud.start("w1")
    interrupt(cloud, "w1", 5.0)
    ticks(cloud, 20, "w1")
    assert cloud.nodes.killed == []
    ticks(cloud, 60, "w1")
    assert "w1" in cloud.nodes.killed


# --- rebalance recommendations ---


async def test_worker_at_risk_keeps_training_with_a_checkpoint_and_a_replacement(cloud):
    await cloud.start("w1", "w2")
    for _ in range(2):
        recommend(cloud, "w2")
    assert [e.worker for e in cloud.events(events.RebalanceRecommended)] == ["w2"]
    assert cloud.nodes.wanted == 3
    assert [len(cloud.told(worker, m.RequestCheckpoint)) for worker in ("w1", "w2")] == [1, 1]
    assert cloud.told("w1", m.LeaveGeneration) == []
    cloud.hello("w3")
    assert {m.worker for m in cloud.job.state.members.values()} == {"w1", "w2"}
    # When it is taken, who came instead gets its place at once, and no fourth one is asked for.
    interrupt(cloud, "w2", 60.0)
    assert {m.worker for m in cloud.job.state.in_phase("starting")} == {"w3"}
    assert cloud.nodes.wanted == 3


async def test_pool_whose_workers_share_a_machine_replaces_no_worker_at_risk(rig):
    await rig.start("w1", "w2")
    recommend(rig, "w2")
    assert rig.nodes.wanted == 2
    assert len(rig.told("w2", m.RequestCheckpoint)) == 1


async def test_worker_at_risk_is_assigned_last_and_not_replaced_without_a_job(cloud):
    cloud.hello("w1", "w2")
    recommend(cloud, "w1")
    assert cloud.nodes.wanted == 0
    await cloud.submit(max_workers=1)
    assert [m.worker for m in cloud.job.state.members.values()] == ["w2"]
    assert cloud.nodes.wanted == 1


async def test_rebalance_after_an_interruption_notice_is_ignored(rig):
    await rig.start("w1", "w2")
    interrupt(rig, "w2", 60.0)
    recommend(rig, "w2")
    assert rig.events(events.RebalanceRecommended) == []


async def test_notice_from_an_evicted_worker_resets_its_supervisor(rig):
    await rig.start("w1", "w2")
    ticks(rig, 11, "w1")
    interrupt(rig, "w2", 60.0)
    assert rig.events(events.PreemptionNoticed) == []
    assert rig.orders("w2", m.ResetSupervisor)


async def test_next_coordinator_knows_the_workers_at_risk_and_logs_each_once(
    cloud, tmp_path, monkeypatch
):
    cloud.coordinator.replay(tmp_path / "jobs", died_at=0.0)
    await cloud.start("w1", "w2")
    recommend(cloud, "w1")
    interrupt(cloud, "w2", 60.0)
    cloud.job.job_log.close()
    after = Rig(tmp_path, monkeypatch)
    after.nodes.replaces_early = after.nodes.trains_after_notice = True
    after.coordinator.replay(tmp_path / "jobs", died_at=1000.0)
    assert isinstance(after.coordinator._mode, Recovering)
    after.hello("w1", "w2")
    recommend(after, "w1")
    interrupt(after, "w2", 60.0)
    after.tick()
    assert len(after.events(events.RebalanceRecommended)) == 1
    assert len(after.events(events.PreemptionNoticed)) == 1
    facts = {w.name: (w.at_risk, w.leaves_at) for w in after.coordinator._workers}
    assert facts == {"w1": (True, 0.0), "w2": (False, 501_060.0)}


# --- versions ---

KERNEL = {"protocol": str(WIRE_VERSION), "etrain": "0.1.0", "python": "3.12.4", "torch": "2.13.0"}


def warnings(rig) -> list[str]:
    return [e.text for e in rig.events(events.LogLine) if e.level == "warning"]


async def test_worker_with_incompatible_versions_is_excluded_with_a_logged_reason(rig):
    await rig.submit(max_workers=2, fingerprint=KERNEL)
    rig.hello("w1", fingerprint={**KERNEL, "torch": "2.12.0+cu130"})
    rig.hello("w2", fingerprint=KERNEL)
    assert [m.worker for m in rig.job.state.members.values()] == ["w2"]
    [text] = warnings(rig)
    assert "torch 2.12.0+cu130 on w1, 2.13.0 in this notebook" in text
    assert "Install torch==2.13.0" in text
    # Each of a hundred machines of a wrong image would say the same.
    rig.hello("w3", fingerprint={**KERNEL, "torch": "2.12.0+cu130"})
    assert len(warnings(rig)) == 1


async def test_other_patch_version_is_accepted_and_logged_once(rig):
    await rig.submit(max_workers=2, fingerprint=KERNEL)
    for worker in ("w1", "w2"):
        rig.hello(worker, fingerprint={**KERNEL, "python": "3.12.1"})
    assert [m.worker for m in rig.job.state.members.values()] == ["w1", "w2"]
    [text] = warnings(rig)
    assert text.startswith("Python 3.12.1 on w1, 3.12.4 in this notebook")


async def test_worker_with_another_protocol_is_refused_for_any_notebook(rig):
    await rig.submit(max_workers=2)
    rig.hello("w1", fingerprint={**KERNEL, "protocol": "99"})
    assert rig.job.state.members == {}
    assert "protocol 99 on w1" in warnings(rig)[0]


async def test_worker_incompatible_with_one_job_trains_another(rig):
    await rig.submit(max_workers=1, fingerprint=KERNEL)
    old = {**KERNEL, "python": "3.11.2"}
    rig.hello("w1", fingerprint=old)
    await rig.submit(job_id="k", name="old", run_dir=str(rig.folder / "k"), fingerprint=old)
    assert rig.job.state.members == {}
    other = rig.coordinator._jobs["k"]
    assert [m.worker for m in other.state.members.values()] == ["w1"]
