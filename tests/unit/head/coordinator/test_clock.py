"""The wall clock is set forward or back by an hour: nothing is decided differently.

Review R8: deadlines and retries were wall time.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from etrain_jupyter.log import events
from etrain_jupyter.wire import messages as m
from tests.unit.head.coordinator.rig import PLAN, Rig

HOUR_S = 3600.0


jumps = pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S], ids=["forward", "back"])


def pass_time(rig: Rig, seconds: float, *alive: str) -> None:
    """Let time pass with beats of workers that make progress."""
    for number in range(int(seconds * 4)):
        if number % 4 == 0:
            for worker in alive:
                if rig.job.state.of_worker(worker) is not None:
                    rig.beat(worker, beats=int(rig.now))
        rig.tick()


@jumps
async def test_no_worker_is_evicted_after_a_clock_jump(rig: Rig, jump_s: float) -> None:
    await rig.start("w1", "w2")
    pass_time(rig, 5, "w1", "w2")
    rig.wall_ahead_s = jump_s
    pass_time(rig, 5, "w1", "w2")

    assert rig.nodes.killed == []
    assert not rig.events(events.WorkerLost)
    assert not rig.orders("w1", m.TerminateTrainer) + rig.told("w1", m.BreakGeneration)


@jumps
async def test_silent_worker_is_detected_on_time_despite_a_clock_jump(
    rig: Rig, jump_s: float
) -> None:
    await rig.start("w1", "w2")
    rig.wall_ahead_s = jump_s
    pass_time(rig, 10.5, "w1")
    assert [event.worker for event in rig.events(events.WorkerLost)] == ["w2"]


@jumps
async def test_retry_is_on_time_despite_a_clock_jump(rig: Rig, jump_s: float) -> None:
    await rig.start("w1", "w2")
    for _ in range(2):  # the second fault in a row makes its next trainer wait for a second
        rig.tell("w2", m.TrainerExited, cause="killed")
        if rig.job.state.of_worker("w2"):
            rig.warm("w2")
        if rig.job.state.in_phase("ranked"):
            rig.report("w1", 1)
            rig.tell("w1", m.GenerationJoined)
            rig.job.state.of_worker("w2") and rig.tell("w2", m.GenerationJoined)
    assert rig.job.state.of_worker("w2") is None
    num_started = len(rig.orders("w2", m.LaunchTrainer))

    rig.wall_ahead_s = jump_s
    pass_time(rig, 0.5, "w1")
    assert len(rig.orders("w2", m.LaunchTrainer)) == num_started
    pass_time(rig, 1.0, "w1")
    assert len(rig.orders("w2", m.LaunchTrainer)) == num_started + 1


@jumps
async def test_state_of_a_noticed_machine_is_saved_in_time_despite_a_clock_jump(
    rig: Rig, jump_s: float
) -> None:
    await rig.start("w1")
    rig.nodes.most = 1
    rig.commit("w1", 1)
    deadline = rig.now + 60.0
    rig.say("w1", m.MachineNotice(notice="interruption", left_s=60.0))
    assert rig.events(events.PreemptionNoticed)[0].deadline == deadline

    rig.wall_ahead_s = jump_s
    pass_time(rig, 29, "w1")
    assert not rig.told("w1", m.LeaveGeneration)
    pass_time(rig, 2, "w1")
    assert rig.told("w1", m.LeaveGeneration)
    rig.report("w1", 1, why="planned")
    assert rig.told("w1", m.SaveState)


@jumps
async def test_next_scheduler_counts_from_the_clock_as_it_is_set_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rig: Rig, jump_s: float
) -> None:
    """The log has wall time: that of the next scheduler's start converts it, once."""
    rig.coordinator.replay(tmp_path / "jobs", died_at=0.0)
    await rig.start("w1", "w2")
    rig.commit("w1", 1)
    rig.say("w2", m.MachineNotice(notice="interruption", left_s=100.0))
    trainers = {worker: rig.trainer(worker) for worker in ("w1", "w2")}
    rig.job.job_log.close()

    after = Rig(tmp_path, monkeypatch)
    after.now = rig.now + 10.0
    after.coordinator.replay(tmp_path / "jobs", died_at=rig.now)
    hello = {"plan": PLAN, "pid": 7, "device": "cpu", "warm_s": 1.0}
    known = {"started_at": rig.now - 5.0, "pid": 7, "generation": 1, "hello": hello}
    known |= {"left": None, "progress": [-1, 0], "ended_with": 0}
    for worker, trainer in trainers.items():
        after.hello(worker, trainers={trainer: known})
    after.tick()
    after.wall_ahead_s = jump_s
    after.tick()

    state = after.job.state
    clock_now = after.now + 500_000.0
    assert clock_now - state.timings.last_step_at == pytest.approx(10.5)
    facts = after.coordinator._workers.get("w2")
    assert facts is not None
    assert facts.leaves_at - clock_now == pytest.approx(89.5)
    assert clock_now - after.job.trainers[trainers["w1"]].started_at == pytest.approx(15.5)


@jumps
async def test_events_have_the_current_wall_clock_time(rig: Rig, jump_s: float) -> None:
    await rig.start("w1", "w2")
    rig.wall_ahead_s = jump_s
    rig.tell("w2", m.TrainerExited, cause="killed")
    [lost] = rig.events(events.WorkerLost)
    assert lost.time == rig.now + jump_s
