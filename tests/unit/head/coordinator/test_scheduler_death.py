"""A coordinator dies at the worst moments; the next one is told what the supervisors know."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from etrain_jupyter.head.coordinator import modes
from etrain_jupyter.head.coordinator.requests import RequestError
from etrain_jupyter.log.events import (
    CheckpointCommitted,
    GenerationFormed,
    JobStatusChanged,
    LogLine,
    SchedulerRestarted,
    StepCompleted,
    WorkerLost,
)
from etrain_jupyter.wire import messages as m
from tests.unit.head.coordinator.rig import HELLO as WORKER_HELLO
from tests.unit.head.coordinator.rig import PLAN, Rig
from tests.unit.log.spent import PLAIN_STEP

HELLO = m.TrainerHello(pid=7, device="cpu", warm_s=1.0, plan=PLAN)
RUNNING = m.TrainerSummary(started_at=1000.0, pid=7, generation=1, hello=HELLO)


class Lives:
    """One cluster's coordinators, one after the other."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._patch = folder, monkeypatch
        self.rig = self._next()
        self.numbers: dict[str, int] = {}

    def _next(self, died_at: float = 0.0) -> Rig:
        rig = Rig(self.folder, self._patch)
        rig.coordinator.replay(self.folder / "jobs", died_at=died_at)
        return rig

    def die(self) -> Rig:
        """Kill the coordinator, and start the next one, which nobody has come back to yet."""
        self.rig.coordinator._jobs["j"].job_log.close()  # the system does it when a process dies
        now = self.rig.now
        self.rig = self._next(now)
        self.rig.now = now + 3.0
        return self.rig

    def back(self, worker: str, **standings: dict[str, Any]) -> None:
        """Let a worker come back with trainers, by the numbers in their names."""
        self.rig.coordinator._scheduler.workers[f"tls://{worker}"] = _Named(worker)
        self.rig.hello(worker)
        trainers = {
            f"j/{worker}/{number[1:]}": replace(RUNNING, **known)
            for number, known in standings.items()
        }
        self.rig.say(worker, m.SupervisorHello(**WORKER_HELLO | {"trainers": trainers}))

    def numbered(self, worker: str, kind: type[m.TrainerReport], **values: Any) -> m.TrainerReport:
        """Have a trainer send a report, which its supervisor keeps."""
        self.numbers[worker] = self.numbers.get(worker, 0) + 1
        number = {"w1": 1, "w2": 2}[worker]
        report = kind(
            generation=1,
            trainer=f"j/{worker}/{number}",
            number=self.numbers[worker],
            **values,
        )
        self.rig.say(worker, report)
        return report


class _Named:
    def __init__(self, name: str) -> None:
        self.name = name


@pytest.fixture
def lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lives:
    return Lives(tmp_path, monkeypatch)


def records(*steps: int) -> tuple[dict[str, Any], ...]:
    return tuple(
        {
            **{"generation": 1, "time": 1000.0, "step": step, "epoch": 0, "first": 0},
            **{"samples": 16, "sample_checksum": 1, "loss": 1.0, "lr": 0.1, "world_size": 2},
            **{"samples_per_s": 160.0, **PLAIN_STEP},
        }
        for step in steps
    )


def steps_of(rig: Rig) -> list[int]:
    return [event.step for event in rig.events(StepCompleted)]


async def test_generation_continues_and_missed_events_are_logged_once(lives: Lives) -> None:
    await lives.rig.start("w1", "w2")
    told = [lives.numbered("w1", m.StepsTrained, records=records(1, 2))]
    line = lives.numbered("w1", m.TextLogged, level="info", text="hello")
    lives.die()
    lives.back("w1", n1={})
    for message in (*told, line):
        lives.rig.say("w1", message)
    lives.numbered("w1", m.StepsTrained, records=records(3))
    assert lives.rig.events(SchedulerRestarted) == [], "the other worker is waited for"
    lives.back("w2", n2={})
    lives.rig.tick()

    rig = lives.rig
    [event] = rig.events(SchedulerRestarted)
    assert (event.workers, event.lost, event.step) == (["w1", "w2"], [], 2)
    assert event.away_s == 3.25
    assert steps_of(rig) == [1, 2, 3]
    assert len(rig.events(LogLine)) == 1
    assert (rig.job.state.phase, rig.job.state.current.is_ready) == ("running", True)
    assert [e.generation for e in rig.events(GenerationFormed)] == [1]
    assert rig.told("w1", m.BreakGeneration) == rig.told("w1", m.LeaveGeneration) == []
    rig.tick()
    assert rig.orders("w1", m.AcknowledgeReports)[-1].number == 3


async def test_generation_that_was_forming_is_aborted_and_formed_again(lives: Lives) -> None:
    rig = lives.rig
    rig.hello("w1", "w2")
    await rig.submit(max_workers=2)
    rig.warm("w1", "w2")
    assert len(rig.events(GenerationFormed)) == 1
    rig = lives.die()
    lives.back("w1", n1={})
    lives.back("w2", n2={"generation": 0})  # it was never told
    rig.tick()
    assert len(rig.told("w1", m.BreakGeneration)) == 1
    rig.report("w1", 0)

    formed = rig.events(GenerationFormed)
    assert [(e.generation, e.why, e.ranks) for e in formed][1:] == [(2, "restart", ["w1", "w2"])]
    assert rig.job.state.faults.at_step == (-1, ())


async def test_job_continues_without_a_worker_that_does_not_return(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    await lives.rig.start("w1", "w2")
    lives.numbered("w1", m.StepsTrained, records=records(1))
    monkeypatch.setattr(modes, "RETURN_S", 0.0)
    rig = lives.die()
    lives.back("w1", n1={})
    rig.tick()

    [lost] = rig.events(WorkerLost)
    assert lost.worker == "w2"
    assert len(rig.told("w1", m.BreakGeneration)) == 1
    rig.report("w1", 1)
    assert rig.events(GenerationFormed)[-1].ranks == ["w1"]
    assert rig.told("w1", m.JoinGeneration)[-1].logged_step == 1


async def test_trainer_lost_before_the_restart_is_released(lives: Lives) -> None:
    await lives.rig.start("w1", "w2")
    lives.rig.coordinator.remove_worker(None, "tls://w2")
    assert len(lives.rig.events(WorkerLost)) == 1
    rig = lives.die()
    lives.back("w1", n1={})
    lives.back("w2", n2={})
    rig.tick()

    assert rig.told("w2", m.ShutDownTrainer)
    assert "j/w2/2" not in rig.job.state.members


async def test_job_whose_ranks_are_done_is_finished_with_a_checkpoint(lives: Lives) -> None:
    rig = lives.rig
    await rig.start("w1", "w2")
    lives.numbered("w1", m.StepsTrained, records=records(1, 2))
    done = m.GenerationLeft(generation=1, progress=(2, 0), why="done", undone=False)
    rig = lives.die()
    lives.back("w1", n1={"left": done, "progress": (2, 0)})
    lives.back("w2", n2={"left": done, "progress": (2, 0)})
    rig.tick()
    saver = next(worker for worker in ("w1", "w2") if rig.told(worker, m.SaveState))
    rig.save(saver, 2)

    assert rig.events(JobStatusChanged)[-1].status == "finished"
    assert len(rig.events(CheckpointCommitted)) == 1
    rig.tick()
    assert not (lives.folder / "jobs" / "j").exists(), "no scheduler has to replay it any more"


async def test_pool_that_halts_during_the_recovery_stops_the_job_with_a_checkpoint(
    lives: Lives,
) -> None:
    await lives.rig.start("w1", "w2")
    lives.numbered("w1", m.StepsTrained, records=records(1))
    rig = lives.die()
    lives.back("w1", n1={})
    rig.coordinator.halt("the budget is spent")
    assert not rig.job.state.is_ended, "its trainers still train"
    lives.back("w2", n2={})
    rig.tick()
    for worker in ("w1", "w2"):
        assert rig.told(worker, m.LeaveGeneration), "both leave after their step"
        rig.report(worker, 1)
    [saver] = [worker for worker in ("w1", "w2") if rig.told(worker, m.SaveState)]
    rig.save(saver, 1)

    assert rig.events(JobStatusChanged)[-1].status == "stopped"
    assert [event.step for event in rig.events(CheckpointCommitted)] == [1]


async def test_pending_pause_is_carried_out(lives: Lives) -> None:
    await lives.rig.start("w1", "w2")
    lives.numbered("w1", m.StepsTrained, records=records(1))
    await lives.rig.control("pause")
    rig = lives.die()
    lives.back("w1", n1={})
    lives.back("w2", n2={})
    rig.tick()
    assert len(rig.told("w1", m.LeaveGeneration)) == 1
    for worker in ("w1", "w2"):
        rig.report(worker, 2, "planned")

    assert (rig.job.state.status, rig.job.state.phase) == ("paused", "gathering")


async def test_request_during_the_recovery_is_refused_with_a_retry_hint(lives: Lives) -> None:
    await lives.rig.start("w1")
    rig = lives.die()

    with pytest.raises(RequestError, match="Retry in a few seconds"):
        await rig.control("stop")

    rig.tick()
    assert rig.events(JobStatusChanged)[-1].status == "running"


async def test_ended_job_is_not_recovered(lives: Lives) -> None:
    await lives.rig.start("w1")
    await lives.rig.control("stop", {"now": True})
    assert not (lives.folder / "jobs" / "j").exists()


async def test_job_that_waits_for_workers_keeps_waiting(lives: Lives) -> None:
    rig = lives.rig
    rig.hello("w1")
    await rig.submit(min_workers=2, max_workers=2)
    rig.warm("w1")
    rig = lives.die()
    lives.back("w1", n1={"generation": 0})
    rig.tick()
    assert (rig.job.state.status, rig.job.state.phase) == ("waiting", "gathering")

    rig.hello("w2")
    rig.warm("w2")

    assert rig.events(GenerationFormed)[-1].ranks == ["w1", "w2"]
    assert rig.told("w1", m.JoinGeneration)[-1].restore is False


async def test_ranks_that_had_left_for_a_newcomer_continue_with_it(lives: Lives) -> None:
    await lives.rig.start("w1", "w2")
    lives.numbered("w1", m.StepsTrained, records=records(1))
    left = m.GenerationLeft(generation=1, progress=(1, 0), why="planned", undone=False)
    lives.rig.report("w1", 1, "planned")
    rig = lives.die()
    lives.back("w1", n1={"left": left, "progress": (1, 0)})
    lives.back("w2", n2={})
    rig.tick()
    rig.report("w2", 1, "planned")

    formed = rig.events(GenerationFormed)[-1]
    assert (formed.generation, formed.step, formed.ranks) == (2, 1, ["w1", "w2"])
    assert rig.told("w1", m.BreakGeneration) == []


async def test_second_death_during_the_recovery_loses_nothing(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    await lives.rig.start("w1", "w2")
    lives.die()
    lives.back("w1", n1={})
    message = lives.numbered("w1", m.StepsTrained, records=records(1))
    assert steps_of(lives.rig) == []
    rig = lives.die()
    lives.back("w1", n1={})
    lives.rig.say("w1", message)
    lives.back("w2", n2={})
    rig.tick()

    assert steps_of(rig) == [1]
    assert len(rig.events(SchedulerRestarted)) == 1


async def test_checkpoint_saved_during_the_recovery_counts(lives: Lives) -> None:
    await lives.rig.start("w1", "w2")
    rig = lives.die()
    lives.back("w1", n1={})
    lives.numbered("w1", m.StepsTrained, records=records(1, 2, 3))
    record = {"step": 2, "manifest": "m", "size_bytes": 1, "stall_s": 0.0, "duration_s": 0.1}
    lives.numbered("w1", m.CheckpointWritten, record=record)
    lives.back("w2", n2={})
    rig.tick()

    assert [event.step for event in rig.events(CheckpointCommitted)] == [2]
    assert rig.job.state.saved_step == 2
