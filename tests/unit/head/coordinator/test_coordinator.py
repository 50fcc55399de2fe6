"""The coordinator between its supervisors: silence, fences, hangs and faults on purpose."""

from __future__ import annotations

import asyncio
import shutil
from types import SimpleNamespace

import pytest

from etrain_jupyter.head.coordinator import coordinator as coordinator_module
from etrain_jupyter.head.coordinator import kernel_requests
from etrain_jupyter.head.coordinator.coordinator import MANY_WORKERS, Coordinator
from etrain_jupyter.head.coordinator.requests import RequestError
from etrain_jupyter.head.jobs import job_log
from etrain_jupyter.log import events
from etrain_jupyter.log.event_log import read_events
from etrain_jupyter.rules.chaos import FAULT_KINDS
from etrain_jupyter.wire import codec
from etrain_jupyter.wire import messages as m
from etrain_jupyter.wire import requests as q
from etrain_jupyter.wire.rank_values import unpack_values
from tests.unit.head.coordinator.rig import HELLO, PLAN, Nodes, Rig


def ticks(rig: Rig, seconds: float, *alive: str, **page) -> None:
    """Let time pass with beats of these workers each second."""
    for number in range(int(seconds * 4)):
        if number % 4 == 0:
            for worker in alive:
                rig.beat(worker, **page)
        rig.tick()


# --- telling ---


async def test_progress_of_active_jobs_is_available_to_the_pool(rig):
    assert rig.coordinator.progress() == []
    await rig.start("w1", "w2")
    rig.commit("w1", 1, 2)

    [progress] = rig.coordinator.progress()

    assert (progress.step, progress.total_steps, progress.first_step) == (2, 8, 0)
    assert (progress.num_workers, progress.max_workers, progress.is_paused) == (2, 2, False)
    assert (progress.gradient_bytes, progress.type_rates) == (40.0, {})  # 10 parameters
    assert progress.attempt_at == rig.events(events.JobSubmitted)[0].time


async def test_first_event_after_a_pause_is_sent_immediately_and_later_ones_together(
    rig, monkeypatch
):
    monkeypatch.setattr(kernel_requests, "COALESCE_S", 3600.0)
    await rig.start("w1")
    known = (await rig.fetch(wait_s=0)).events[-1]["seq"]
    first = asyncio.ensure_future(rig.fetch(known))
    await asyncio.sleep(0)
    rig.commit("w1", 1)
    steps = [event["step"] for event in (await first).events]
    assert steps == [1]

    second = asyncio.ensure_future(rig.fetch(known + 1))
    for number in (2, 3):
        await asyncio.sleep(0.01)
        rig.commit("w1", number)
        assert not second.done()
    monkeypatch.setattr(kernel_requests, "COALESCE_S", 0.0)
    second.cancel()
    told = (await rig.fetch(known + 1)).events
    assert [event["step"] for event in told] == [2, 3]


async def test_joined_workers_are_logged_with_their_machine_and_price(rig):
    machine = {"type": "g5.xlarge", "zone": "us-east-1a", "lifecycle": "spot"}
    rig.nodes.records = [{"worker": "w1", "price_usd_per_h": 0.25, "device": "cuda:0", **machine}]

    await rig.start("w1", "w2")

    joined = [e for e in (await rig.fetch()).events if e["event"] == "WorkerJoined"]
    facts = [(e["machine"], e["zone"], e["lifecycle"], e["usd_per_h"]) for e in joined]
    assert [e["address"] for e in joined] == ["tls://w1", "tls://w2"]
    known = ("g5.xlarge", "us-east-1a", "spot", 0.25)
    assert facts == [known, ("", "", "", None)]
    records = (
        await rig.coordinator._kernel_requests.list_workers(q.ListWorkers(job_id="j"))
    ).workers
    assert [record.get("machine") for record in records] == ["g5.xlarge", None]
    assert records[0]["usd_per_h"] == 0.25


# --- silence ---


async def test_worker_without_heartbeats_is_evicted_and_killed(rig):
    await rig.start("w1", "w2")
    ticks(rig, 10.5, "w1")
    assert rig.nodes.killed == ["w2"]
    [lost] = rig.events(events.WorkerLost)
    assert (lost.worker, lost.cause) == ("w2", "no heartbeat for 10.2 s")
    assert lost.detected_s == 10.25
    assert rig.told("w1", m.BreakGeneration)
    rig.report("w1", 5)
    assert rig.events(events.GenerationFormed)[-1].ranks == ["w1"]


async def test_no_worker_is_evicted_after_the_head_itself_was_suspended(rig):
    await rig.start("w1", "w2")
    ticks(rig, 5, "w1", "w2")
    rig.tick(600.0)
    ticks(rig, 3)  # what they said meanwhile takes its time to arrive
    assert rig.nodes.killed == []
    assert rig.events(events.WorkerLost) == []


async def test_limits_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("ETRAIN_SILENCE_S", "3")
    monkeypatch.setenv("ETRAIN_HANG_S", "4.5")
    coordinator = Coordinator(Nodes(), cluster_id="c", on_shutdown=lambda: None)
    assert coordinator._workers._heartbeats.limit_s == 3.0
    assert coordinator._hang_s == 4.5


async def test_messages_of_an_evicted_worker_are_dropped_and_it_is_reset(rig):
    await rig.start("w1", "w2")
    old = rig.trainer("w2")
    ticks(rig, 10.5, "w1")
    rig.report("w1", 5)
    rig.tell("w1", m.GenerationJoined)
    generation = rig.job.state.generation

    # The partition heals: what it said meanwhile arrives at last.
    report = {"progress": (9, 0), "why": "failed", "undone": False}
    rig.say("w2", m.GenerationLeft(trainer=old, generation=generation, **report))
    rig.say("w2", m.StepsTrained(trainer=old, generation=generation, records=()))
    rig.say("w2", m.SupervisorHello(**HELLO))
    assert rig.job.state.of_worker("w2") is None
    assert rig.job.state.step == 5
    assert rig.orders("w2", m.ResetSupervisor) == [m.ResetSupervisor(incarnation=0)] * 2

    rig.hello("w2", incarnation=1)
    assert rig.trainer("w2") != old
    assert rig.orders("w2", m.LaunchTrainer)[-1].trainer == rig.trainer("w2")
    rig.warm("w2")
    assert rig.told("w1", m.LeaveGeneration)
    rig.report("w1", 6, why="planned")
    assert rig.events(events.GenerationFormed)[-1].ranks == ["w1", "w2"]


async def test_evicted_worker_that_then_disconnects_is_lost_once(rig):
    await rig.start("w1", "w2")
    ticks(rig, 10.5, "w1")
    rig.coordinator.remove_worker(None, "tls://w2")
    assert len(rig.events(events.WorkerLost)) == 1


# --- many workers ---


async def test_keys_of_all_ranks_are_sent_to_each_in_one_message(rig):
    await rig.start("w1", "w2", "w3")
    for worker in ("w3", "w1", "w2"):
        assert not rig.told("w1", m.RankKeys)
        rig.tell(worker, m.RankKey, topic="0", value=worker.encode())
    for worker in ("w1", "w2", "w3"):
        [keys] = rig.told(worker, m.RankKeys)
        assert (keys.trainer, keys.generation, keys.topic) == (rig.trainer(worker), 1, "0")
        assert unpack_values(keys.values) == [b"w1", b"w2", b"w3"]


async def test_rank_gets_only_the_starts_that_it_does_not_know(rig):
    await rig.start("w1", "w2")
    [first] = rig.told("w1", m.JoinGeneration)
    assert (first.starts, first.num_starts, len(first.secret)) == ((), 0, 16)
    for step in (2, 4):
        rig.commit("w1", step - 1, step)
        rig.report("w1", step)
        rig.report("w2", step)
        rig.tell("w1", m.GenerationJoined, step=step)
    # w2 has joined generation 1 but not generation 2, so it may not know the second start.
    assert [(j.starts, j.num_starts) for j in rig.told("w1", m.JoinGeneration)[1:]] == [
        ((0,), 0),
        ((2,), 1),
    ]
    assert [(j.starts, j.num_starts) for j in rig.told("w2", m.JoinGeneration)[1:]] == [
        ((0,), 0),
        ((0, 2), 0),
    ]
    secrets = {join.secret for join in rig.told("w1", m.JoinGeneration)}
    assert len(secrets) == 3


def test_supervisors_of_a_large_cluster_send_fewer_heartbeats(rig):
    names = [f"w{number}" for number in range(500)]
    rig.hello(*names)
    assert not rig.orders("w0", m.SetHeartbeatInterval)
    rig.tick()
    assert [x.interval_s for x in rig.orders("w0", m.SetHeartbeatInterval)] == [2.0]
    rig.hello("late")
    assert [x.interval_s for x in rig.orders("late", m.SetHeartbeatInterval)] == [2.0]
    rig.tick()
    assert len(rig.orders("w0", m.SetHeartbeatInterval)) == 1
    for name in names[10:]:
        rig.coordinator.remove_worker(None, f"tls://{name}")
    rig.tick()
    assert [x.interval_s for x in rig.orders("w0", m.SetHeartbeatInterval)] == [2.0, 1.0]


@pytest.mark.parametrize("num_workers", [MANY_WORKERS, MANY_WORKERS + 2])
async def test_dask_announces_a_lost_worker_of_a_large_cluster_after_the_survivors_formed(
    rig, monkeypatch, num_workers
):
    monkeypatch.setattr(coordinator_module, "REMOVAL_DELAY_S", 0.0)
    names = [f"w{number}" for number in range(num_workers)]
    rig.hello(*names)
    await rig.submit(max_workers=num_workers - 1)
    rig.hello("unused")
    is_large = num_workers > MANY_WORKERS
    waits = rig.coordinator.remove_worker(None, "tls://w1")
    assert rig.events(events.WorkerLost)[-1].worker == "w1"
    assert (waits is not None) == is_large
    if is_large:
        await waits
    assert rig.coordinator.remove_worker(None, "tls://unused") is None


async def test_workers_that_join_a_large_cluster_are_shared_together_at_the_next_tick(rig):
    rig.hello(*(f"w{number}" for number in range(64)))
    await rig.submit(max_workers=100)
    assert len(rig.job.state.members) == 64
    rig.hello("w64", "w65")
    assert len(rig.job.state.members) == 64
    rig.tick()
    assert len(rig.job.state.members) == 66


async def test_reports_of_many_workers_are_acknowledged_together(rig):
    names = [f"w{number}" for number in range(100)]
    await rig.start(*names)
    rig.tick()
    seen = len(rig.orders("w0", m.AcknowledgeReports))
    for number in (1, 2):
        rig.tell("w0", m.StepsTrained, records=(rig.step_record(number),), number=number)
        rig.tick(0.15)
    assert len(rig.orders("w0", m.AcknowledgeReports)) == seen
    rig.tick(0.15)
    [ack] = rig.orders("w0", m.AcknowledgeReports)[seen:]
    assert ack.number == 2


async def test_nodes_are_listed_once_for_all_trainers_that_start(rig, monkeypatch):
    names = ["w1", "w2", "w3"]
    facts = {"type": "m5", "zone": "a", "lifecycle": "spot", "price_usd_per_h": 0.1}
    rig.nodes.records = [{"worker": name, **facts} for name in names]
    listed = []
    monkeypatch.setattr(rig.nodes, "nodes", lambda: listed.append(1) or rig.nodes.records)
    rig.hello(*names)
    before = len(listed)
    await rig.submit(max_workers=3)
    assert len(listed) - before <= 1
    assert [event.zone for event in rig.events(events.WorkerJoined)] == ["a", "a", "a"]


# --- fences ---


EVALUATION = {"step": 3, "epoch": 0, "samples": 8, "loss": 1.0, "duration_s": 0.1}


async def test_reports_of_an_older_generation_are_dropped(rig):
    await rig.start("w1", "w2")
    rig.commit("w1", 1, 2)
    rig.report("w1", 2)
    rig.report("w2", 2)
    assert rig.job.state.generation == 2
    before = rig.job.state, rig.job.job_log.last_seq
    old = {"generation": 1}
    rig.tell("w1", m.StepsTrained, records=(rig.step_record(3),), **old)
    rig.tell("w1", m.EvalFinished, record=EVALUATION, **old)
    rig.tell("w1", m.WeightsFingerprinted, step=2, rank=0, digest="x", **old)
    rig.tell("w1", m.StoreEntry, key="k", value=b"", **old)
    rig.tell("w1", m.RankKey, topic="k", value=b"", **old)
    rig.tell("w2", m.RankKey, topic="k", value=b"", **old)
    rig.tell("w1", m.GenerationJoined, **old)
    rig.tell("w1", m.GenerationLeft, progress=(9, 0), why="done", undone=False, **old)
    rig.tell("w1", m.UserCodeFailed, progress=(2, 0), error="ValueError", traceback="", **old)
    assert (rig.job.state, rig.job.job_log.last_seq) == before
    assert not rig.told("w2", m.StoreEntry)
    assert not rig.told("w2", m.RankKeys)


async def test_messages_of_a_lost_trainer_are_dropped_while_its_generation_is_current(rig):
    await rig.start("w1", "w2")
    lost = rig.trainer("w2")
    rig.tell("w2", m.TrainerExited, cause="SIGKILL")
    generation = rig.job.state.generation
    before = rig.job.state, rig.job.job_log.last_seq
    steps = (rig.step_record(9),)
    rig.say("w2", m.StepsTrained(trainer=lost, generation=generation, records=steps))
    rig.say("w2", m.TrainerHello(trainer=lost, pid=7, warm_s=1.0, device="cpu", plan=PLAN))
    assert (rig.job.state, rig.job.job_log.last_seq) == before


async def test_log_has_the_first_trainer_that_begins_each_phase_of_the_warm_up(rig):
    rig.hello("w1", "w2")
    await rig.submit(min_workers=2, max_workers=2, pool_s=1.5, notes=["optimizer: adam is ours"])
    for worker, phase in (("w2", "build"), ("w1", "build"), ("w1", "trial"), ("w2", "trial")):
        rig.tell(worker, m.WarmUpBegun, phase=phase)

    reached = [(event.worker, event.phase) for event in rig.events(events.WarmUpReached)]
    assert reached == [("w2", "build"), ("w1", "trial")]
    assert rig.events(events.JobSubmitted)[0].pool_s == 1.5
    assert rig.events(events.LogLine)[0].text == "optimizer: adam is ours"


async def test_checkpoint_of_a_released_trainer_counts(rig):
    await rig.start("w1", "w2")
    released = rig.trainer("w2")
    rig.coordinator._requests.do(rig.job, "scale", {"min": 1, "max": 1})
    rig.report("w1", 3, why="planned")
    rig.report("w2", 3, why="planned")
    assert rig.job.state.of_worker("w2") is None
    rig.save("w2", 3, trainer=released, generation=1)
    assert [event.step for event in rig.events(events.CheckpointCommitted)] == [3]
    assert rig.job.state.saved_step == 3


async def test_shutdown_waits_for_the_jobs_checkpoint_and_logs_its_author(rig):
    await rig.start("w1")
    trainer = rig.trainer("w1")
    down = q.ShutDownCluster(drain_s=30.0, by="maria in notebook a.ipynb")
    reply = asyncio.create_task(rig.coordinator._kernel_requests.shut_down(down))
    await asyncio.sleep(0)
    assert rig.job.state.status == "running"

    rig.report("w1", 3, why="planned")
    assert rig.orders("w1", m.SaveState)
    rig.save("w1", 3, trainer=trainer)
    await reply

    assert rig.job.state.saved_step == 3
    end = rig.events(events.JobStatusChanged)[-1]
    assert end.status == "stopped"
    assert end.reason == "the cluster was shut down by maria in notebook a.ipynb"


async def test_shutdown_ends_a_job_that_cannot_save_after_the_timeout(rig):
    await rig.start("w1")
    await rig.coordinator._kernel_requests.shut_down(q.ShutDownCluster(drain_s=0.01, by="maria"))
    end = rig.events(events.JobStatusChanged)[-1]
    assert end.status == "stopped"
    assert end.reason.endswith("by maria; no checkpoint was saved within 0.01 s")


async def test_job_saves_and_ends_normally_after_its_run_folder_was_deleted(rig, monkeypatch):
    monkeypatch.setattr(job_log, "LOOK_S", 0.0)
    await rig.start("w1")
    shutil.rmtree(rig.folder / "j")
    rig.tick()

    assert rig.orders("w1", m.RequestCheckpoint)
    batch = await rig.fetch(wait_s=0)
    assert batch.trouble.startswith(f"The run folder {rig.folder / 'j'} was deleted or moved.")
    await rig.control("stop", {"now": True})
    assert read_events(rig.folder / "j" / "events.jsonl")[-1].status == "stopped"


async def test_message_of_a_trainer_from_another_worker_is_dropped(rig):
    await rig.start("w1", "w2")
    before = rig.job.state
    rig.say("w1", m.TrainerExited(trainer=rig.trainer("w2"), cause="?"))
    assert rig.job.state == before


# --- hangs ---


async def test_rank_that_blocks_the_others_is_killed_with_a_stack_dump(rig):
    await rig.start("w1", "w2", "w3")
    for _ in range(32):
        rig.beat("w1", collectives=9)
        rig.beat("w2", collectives=8)
        rig.beat("w3", collectives=9)
        rig.tick(1.0)
    [order] = rig.orders("w2", m.TerminateTrainer)
    assert order.dumps_stacks is True
    assert order.why.startswith("no progress for 3")
    assert order.why.endswith("at step 1 while 2 ranks waited")
    assert not rig.orders("w1", m.TerminateTrainer)
    assert not rig.orders("w3", m.TerminateTrainer)


async def test_progress_of_a_lost_trainer_is_dropped(rig):
    await rig.start("w1", "w2")
    old = rig.trainer("w2")
    rig.tell("w2", m.TrainerExited, cause="SIGKILL")
    page = m.PageCopy(
        generation=1, step=0, collectives=0, beats=0, phase="computing", alive_age_s=0.1
    )
    rig.say("w2", m.Heartbeat(trainers={old: page}))
    assert old not in rig.job.state.members


# --- forming ---


async def test_slowest_duration_of_each_phase_is_logged_when_all_ranks_have_formed(rig):
    rig.hello("w1", "w2")
    await rig.submit(max_workers=2)
    rig.warm("w1", "w2")
    rig.tell("w1", m.GenerationJoined, connect_s=0.03, sync_s=0.0, wrap_s=0.002)
    assert rig.events(events.GenerationReady) == []
    rig.tell("w2", m.GenerationJoined, connect_s=0.02, sync_s=0.5, wrap_s=0.001)
    [ready] = rig.events(events.GenerationReady)
    assert (ready.world_size, ready.connect_s, ready.sync_s, ready.wrap_s) == (2, 0.03, 0.5, 0.002)


@pytest.mark.parametrize(("gpus", "backend"), [(("a", "b"), "nccl"), (("a", "a"), "gloo")])
async def test_ranks_with_separate_gpus_use_nccl(rig, gpus, backend):
    rig.hello("w1", "w2")
    await rig.submit(max_workers=2)
    for worker, gpu in zip(("w1", "w2"), gpus, strict=True):
        rig.warm(worker, device="cuda:0", gpu=gpu)
    assert [form.backend for form in rig.told("w1", m.JoinGeneration)] == [backend]


# --- faults on purpose ---


KILL = {"id": 1, "kind": "kill", "rank": 0, "step": 2, "at": "forward"}
NOTICE = {"id": 2, "kind": "notice", "rank": 1, "step": 2, "at": "forward", "notice_s": 30.0}
POWER = {"id": 3, "kind": "kill_worker", "rank": None, "step": 3, "at": "forward"}


async def test_planned_faults_go_to_trainers_until_they_have_fired(rig):
    await rig.start("w1", "w2", faults=[KILL, NOTICE])
    assert rig.orders("w1", m.LaunchTrainer)[0].faults == (KILL,)
    assert rig.told("w1", m.JoinGeneration)[0].faults == (KILL,)
    rig.tell("w1", m.FaultFired, fault_id=1)
    [fact] = rig.events(events.FaultInjected)
    assert (fact.worker, fact.fault) == ("w1", "kill")
    rig.tell("w1", m.TrainerExited, cause="SIGKILL")
    rig.report("w2", 1)
    assert rig.told("w2", m.JoinGeneration)[-1].faults == ()
    assert rig.job.state.faults.at_step == (-1, ())  # on purpose, so no budget counts it
    assert rig.job.state.faults.health == {}


async def test_fault_reported_by_two_trainers_is_logged_once(rig):
    await rig.start("w1", "w2", faults=[KILL])
    rig.tell("w1", m.FaultFired, fault_id=1)
    rig.tell("w2", m.FaultFired, fault_id=1)
    assert len(rig.events(events.FaultInjected)) == 1


async def test_coordinator_gives_the_planned_notice_when_the_step_is_committed(rig):
    await rig.start("w1", "w2", faults=[NOTICE])
    rig.commit("w1", 1)
    assert rig.events(events.PreemptionNoticed) == []
    rig.commit("w1", 2)
    [notice] = rig.events(events.PreemptionNoticed)
    assert (notice.worker, notice.deadline) == ("w2", rig.now + 30.0)
    rig.commit("w1", 3)
    assert len(rig.events(events.PreemptionNoticed)) == 1


async def test_coordinator_kills_the_worker_named_in_the_fault_plan(rig):
    await rig.start("w1", "w2", faults=[POWER])
    rig.commit("w1", 1, 2, 3)
    assert rig.nodes.killed == ["w1"]
    assert rig.orders("w1", m.InjectFault)[0].kind_of_fault == "kill_worker"
    [fact] = rig.events(events.FaultInjected)
    assert (fact.worker, fact.fault, fact.step) == ("w1", "kill_worker", 3)


async def test_fault_for_a_missing_rank_is_not_injected(rig):
    late = {**POWER, "rank": 2}
    await rig.start("w1", "w2", faults=[late])
    rig.commit("w1", 1, 2, 3)
    assert rig.nodes.killed == []


async def test_requested_fault_is_sent_to_the_supervisor_and_described(rig):
    await rig.start("w1", "w2")
    words = rig.coordinator._requests.do(rig.job, "fault", {"kind": "hang"})
    assert words.startswith("w2 has its trainer hang forever; that trainer is detected when")
    [order] = rig.orders("w2", m.InjectFault)
    assert (order.trainer, order.kind_of_fault) == (rig.trainer("w2"), "hang")
    rig.tell("w2", m.TrainerExited, cause="no progress")
    assert rig.job.state.faults.at_step == (-1, ())


async def test_unknown_fault_is_refused(rig):
    await rig.start("w1")
    with pytest.raises(RequestError, match="unknown fault 'flood'; known: kill, segfault"):
        rig.coordinator._requests.do(rig.job, "fault", {"kind": "flood"})


async def test_chaos_injects_faults_until_it_is_switched_off(rig):
    await rig.start("w1", "w2")
    do = rig.coordinator._requests.do
    words = do(rig.job, "chaos", {"mtbf_s": 2.0, "mode": "stop", "seed": 4})
    assert words == (
        "random faults: stop every 2 s on average until the job ends, seed 4. "
        "To stop them, use %etrain chaos --off"
    )
    ticks(rig, 60, "w1", "w2")
    num_strikes = len(rig.events(events.FaultInjected))
    assert num_strikes > 10
    sent = rig.orders("w1", m.InjectFault) + rig.orders("w2", m.InjectFault)
    assert len(sent) == num_strikes
    assert do(rig.job, "chaos", {"off": True}) == "no more random faults"
    ticks(rig, 60, "w1", "w2")
    assert len(rig.events(events.FaultInjected)) == num_strikes
    assert do(rig.job, "chaos", {"off": True}) == "no random faults were active"
    told = [e.text for e in rig.events(events.LogLine) if e.text.startswith("chaos")]
    assert told == [
        "chaos: stop every 2 s on average until the job ends, seed 4",
        "chaos: over",
    ]


async def test_second_chaos_request_reports_that_it_replaces_the_first(rig):
    await rig.start("w1")
    do = rig.coordinator._requests.do
    do(rig.job, "chaos", {"seed": 4})
    assert "they replace the previous ones" in do(rig.job, "chaos", {"seed": 5})


async def test_chaos_gives_a_leaving_worker_no_second_notice(rig):
    await rig.start("w1")
    rig.coordinator._requests.do(rig.job, "chaos", {"mtbf_s": 1.0, "mode": "notice", "seed": 4})
    ticks(rig, 30, "w1")
    assert len(rig.events(events.PreemptionNoticed)) == 1


async def test_every_fault_kind_has_a_description(rig):
    await rig.start("w1", "w2")
    for kind in (*FAULT_KINDS, "error", "disconnect"):
        words = rig.coordinator._requests.do(rig.job, "fault", {"kind": kind, "worker": "w1"})
        assert words.startswith("w1 "), kind


async def test_unknown_chaos_mode_is_refused(rig):
    await rig.start("w1")
    with pytest.raises(RequestError, match="unknown chaos mode 'flood'"):
        rig.coordinator._requests.do(rig.job, "chaos", {"mode": "flood"})


async def test_requested_kill_is_logged_as_an_injected_fault(rig):
    await rig.start("w1", "w2")
    rig.coordinator._requests.do(rig.job, "kill", {"worker": "w1"})
    assert rig.nodes.killed == ["w1"]
    assert [(e.worker, e.fault) for e in rig.events(events.FaultInjected)] == [("w1", "worker")]


async def test_noticed_worker_is_killed_at_its_deadline(rig):
    await rig.start("w1", "w2")
    rig.coordinator._requests.do(rig.job, "preempt", {"worker": "w2", "notice_s": 5.0})
    ticks(rig, 4, "w1", "w2")
    assert rig.nodes.killed == []
    ticks(rig, 2, "w1", "w2")
    assert "w2" in rig.nodes.killed


async def test_later_notice_does_not_extend_an_earlier_deadline(rig):
    await rig.start("w1", "w2")
    for notice_s in (5.0, 60.0, 2.0):
        args = {"worker": "w2", "notice_s": notice_s}
        rig.coordinator._requests.do(rig.job, "preempt", args)
    deadlines = [e.deadline for e in rig.events(events.PreemptionNoticed)]
    assert deadlines == [rig.now + 5.0, rig.now + 2.0]


async def test_noticed_worker_is_replaced_when_the_others_train_without_it(rig):
    await rig.start("w1", "w2")
    rig.coordinator._requests.do(rig.job, "preempt", {"worker": "w2", "notice_s": 60.0})
    for worker in ("w1", "w2"):
        rig.report(worker, 5, "planned")
    ticks(rig, 1, "w1")
    assert (rig.nodes.released, rig.nodes.wanted) == ([], 2)
    rig.tell("w1", m.GenerationJoined, step=5)
    ticks(rig, 1, "w1")
    assert (set(rig.nodes.released), rig.nodes.wanted) == ({"w2"}, 2)


async def test_noticed_worker_is_released_in_time_even_if_the_others_do_not_form(rig):
    await rig.start("w1", "w2")
    rig.coordinator._requests.do(rig.job, "preempt", {"worker": "w2", "notice_s": 10.0})
    for worker in ("w1", "w2"):
        rig.report(worker, 5, "planned")
    ticks(rig, 7, "w1")
    assert rig.nodes.released == []
    ticks(rig, 2, "w1")
    assert "w2" in rig.nodes.released


async def test_last_noticed_worker_is_replaced_immediately_and_only_once(rig):
    await rig.start("w1")
    assert rig.nodes.wanted == 1
    rig.coordinator._requests.do(rig.job, "preempt", {"worker": "w1", "notice_s": 60.0})
    assert rig.nodes.wanted == 2
    rig.hello("w2")
    rig.warm("w2")
    rig.report("w1", 5, "planned")
    for worker in ("w1", "w2"):
        rig.tell(worker, m.GenerationJoined, step=5)
    for worker in ("w1", "w2"):
        rig.report(worker, 6, "planned")
    assert [m.worker for m in rig.job.state.members.values()] == ["w2"]
    rig.tell("w2", m.GenerationJoined, step=6)
    ticks(rig, 1, "w2")
    assert (set(rig.nodes.released), rig.nodes.wanted) == ({"w1"}, 1)


# --- requests ---


async def test_scaling_beyond_the_pool_reports_its_limit(rig):
    await rig.start("w1")
    rig.nodes.most = 8
    words = rig.coordinator._requests.do(rig.job, "scale", {"max": 1000})
    assert words == (
        "trains on 1 to 8 workers from now on; max=1000 exceeds this pool's limit of 8"
    )
    assert rig.job.state.max_workers == 8


async def test_pause_and_resume_report_when_there_is_nothing_to_do(rig):
    await rig.start("w1")
    rig.commit("w1", 1)
    do = rig.coordinator._requests.do
    assert do(rig.job, "resume", {}) == "is not paused; it is running at step 1"
    assert do(rig.job, "pause", {}).startswith("pauses at the next step boundary")
    assert do(rig.job, "pause", {}) == "is already paused, at step 1; continue with %etrain resume"


async def test_stop_of_a_stalled_job_suggests_stopping_immediately(rig):
    await rig.start("w1")
    rig.commit("w1", 1)
    rig.now += 25.0
    words = rig.coordinator._requests.do(rig.job, "stop", {})
    assert words.endswith("No step has ended for 25 s; %etrain stop --now does not wait for one")


async def test_reproducible_job_is_not_scaled_beyond_its_shards(rig):
    await rig.start("w1", "w2")
    rig.job.spec.config = {
        "model": "Net",
        "data": {"train": "d"},
        "loss": "f",
        "batch": {"global": 64},
        "reproducible": {"shards": 4},
    }
    before = rig.job.state
    with pytest.raises(RequestError, match=r"workers max=5 exceeds the 4 shards"):
        rig.coordinator._requests.do(rig.job, "scale", {"max": 5})
    assert rig.job.state is before
    rig.coordinator._requests.do(rig.job, "scale", {"max": 4})
    assert rig.job.state.max_workers == 4


async def test_reported_nccl_failures_are_logged_and_the_next_generation_uses_gloo(rig):
    # Review G2
    rig.hello("w1", "w2")
    await rig.submit(max_workers=2, config={"backend": "auto"})
    for worker in ("w1", "w2"):
        rig.warm(worker, device="cuda:0", gpu=worker)
    for _ in range(2):
        failed = {"progress": (-1, 0), "why": "failed", "undone": False}
        broken = {"error": "ncclSystemError: /dev/shm", "backend": "nccl"}
        rig.tell("w1", m.GenerationLeft, **failed, **broken)
        rig.tell("w2", m.GenerationLeft, **failed)
        rig.now += 2
        rig.coordinator.tick()
    assert [form.backend for form in rig.told("w1", m.JoinGeneration)] == ["nccl", "nccl", "gloo"]
    assert any("ncclSystemError" in line.text for line in rig.events(events.LogLine))
    assert "gloo" in rig.job.state.reason


# --- versions of the wire ---


async def test_worker_of_another_wire_version_is_excluded_with_a_logged_reason(rig):
    hello = {"kind": "SupervisorHello", "wire_version": 99, "is_new": True}
    await rig.start("w1")
    rig.coordinator._scheduler.workers["tls://w2"] = SimpleNamespace(name="w2")

    for _ in range(2):
        rig.coordinator._receive(hello, "tls://w2")

    assert [facts.name for facts in rig.coordinator._workers] == ["w1"]
    [warning] = [e.text for e in rig.events(events.LogLine) if e.level == "warning"]
    assert warning.startswith("worker w2 cannot train: it uses wire version ")
    assert "Training continues on the other workers. Install etrain-jupyter" in warning
    assert warning.endswith("there and restart that worker")


async def test_malformed_messages_of_a_worker_are_logged_and_change_nothing(rig, caplog):
    await rig.start("w1")
    rig.survive_defects()
    before = rig.job.state, rig.job.job_log.last_seq
    for garbage in (None, 3, {}, {"kind": "Heartbeat"}, {"kind": ["a"]}, {"kind": "RunCode"}):
        rig.coordinator._receive(garbage, "tls://w1")
    assert (rig.job.state, rig.job.job_log.last_seq) == before
    assert "reading a message of tls://w1 failed: MalformedMessageError" in caplog.text


async def test_malformed_report_kills_its_trainer_and_its_later_reports_are_dropped(rig, caplog):
    await rig.start("w1", "w2")
    trainer = rig.trainer("w1")
    name = {"trainer": trainer, "generation": rig.job.state.generation}
    malformed = codec.encode(m.StepsTrained(**name, number=1, records=({"step": "1"},)))
    rig.coordinator._receive(malformed, "tls://w1")
    rig.say("w1", m.StepsTrained(**name, number=2, records=(rig.step_record(2),)))
    rig.say("w1", m.TrainerExited(trainer=trainer, number=3, cause="killed"))
    rig.tick()

    [order] = rig.orders("w1", m.TerminateTrainer)
    why = "its message cannot be decoded: MalformedMessageError: StepsTrained.records has missing"
    assert (order.trainer, order.why[: len(why)]) == (trainer, why)
    [lost] = rig.events(events.WorkerLost)
    assert (lost.worker, lost.cause) == ("w1", order.why)
    assert rig.events(events.StepCompleted) == []
    assert rig.orders("w1", m.AcknowledgeReports) == [m.AcknowledgeReports(number=3)]
    assert trainer in caplog.text


async def test_malformed_report_about_another_workers_trainer_does_not_end_it(rig):
    await rig.start("w1", "w2")
    before = rig.job.state
    forged = {"kind": "StepsTrained", "trainer": rig.trainer("w2"), "number": 1, "records": 7}
    rig.coordinator._receive(forged, "tls://w1")
    assert rig.job.state == before
    assert rig.orders("w2", m.TerminateTrainer) == []


# --- sharing with a job that ends ---


async def test_new_job_waits_for_the_workers_of_a_job_that_saves_and_takes_none_of_the_others(rig):
    await rig.start("w1")
    rig.hello("w2", "w3")
    other = {"job_id": "k", "run_dir": str(rig.folder / "k")}
    await rig.submit(**other, max_workers=2)
    assert rig.coordinator._jobs["k"].state.assigned == ("w2", "w3")
    rig.commit("w1", 1)
    await rig.control("stop")  # it reports at its next step boundary, and then saves

    await rig.submit(job_id="l", run_dir=str(rig.folder / "l"), max_workers=1)
    assert rig.coordinator._jobs["k"].state.assigned == ("w2", "w3")
    assert rig.coordinator._jobs["l"].state.assigned == ()

    rig.report("w1", 1, "planned")
    rig.save("w1", 1)
    assert rig.job.state.is_ended
    assert rig.coordinator._jobs["l"].state.assigned == ("w1",)


async def test_new_job_takes_other_workers_if_the_last_checkpoint_fails(rig):
    await rig.start("w1")
    rig.hello("w2", "w3")
    await rig.submit(job_id="k", run_dir=str(rig.folder / "k"), max_workers=2)
    rig.commit("w1", 1)
    await rig.control("stop")
    rig.report("w1", 1, "planned")
    rig.tell("w1", m.CheckpointNotWritten, step=1, error="no space")

    await rig.submit(job_id="l", run_dir=str(rig.folder / "l"), max_workers=1)

    assert rig.coordinator._jobs["k"].state.assigned == ("w2",)
    assert rig.coordinator._jobs["l"].state.assigned == ("w3",)
