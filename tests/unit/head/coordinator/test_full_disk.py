"""A disk that does not accept a job's log: nothing ends, and nothing is missing afterwards.

Review R1: a full disk ended every trainer, and started workers for ever.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from etrain_jupyter.head.coordinator.requests import RequestError
from etrain_jupyter.log import event_log as log_module
from etrain_jupyter.log import events
from etrain_jupyter.log.event_log import EventLog, read_events
from etrain_jupyter.wire import messages as m
from etrain_jupyter.wire.codec import encode
from etrain_jupyter.worker.outbox import Outbox
from tests.unit.head.coordinator.rig import PLAN, Disk, Rig


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def on_disk(rig: Rig) -> list[events.Event]:
    return list(read_events(rig.job.spec.log_path))


def steps_of(found: list[events.Event]) -> list[int]:
    return [event.step for event in found if isinstance(event, events.StepCompleted)]


def numbered(rig: Rig, worker: str, number: int, **values: Any) -> None:
    rig.tell(worker, m.TextLogged, number=number, **values)


def acks(rig: Rig, worker: str) -> list[int]:
    return [order.number for order in rig.orders(worker, m.AcknowledgeReports)]


async def test_events_are_kept_in_memory_and_written_in_order_once_there_is_space(
    rig: Rig, disk: Disk
) -> None:
    await rig.start("w1")
    rig.commit("w1", 1)
    disk.is_full = True
    for step in (2, 3, 4):
        rig.commit("w1", step)
        rig.tick()
    assert steps_of(on_disk(rig)) == [1]

    disk.is_full = False
    rig.tick()

    found = on_disk(rig)
    assert steps_of(found) == [1, 2, 3, 4]
    assert [event.seq for event in found] == list(range(1, len(found) + 1))
    last = found[-1]
    assert isinstance(last, events.LogLine)
    assert "could not be written for 0 s: No space left on device. 3 events were kept" in last.text


async def test_events_kept_in_memory_are_not_served_but_the_reason_is(rig: Rig, disk: Disk) -> None:
    await rig.start("w1")
    known = rig.job.job_log.last_seq
    disk.is_full = True
    rig.commit("w1", 1)

    answer = await rig.fetch(since=known, wait_s=0)

    assert answer.events == ()
    assert answer.trouble.startswith("the log cannot be written: No space left on device (")
    assert answer.trouble.endswith(
        " bytes free); 1 event is kept in memory; free space there, and writing continues"
    )
    disk.is_full = False
    rig.tick()
    answer = await rig.fetch(since=known, wait_s=0)
    assert [event["event"] for event in answer.events] == ["StepCompleted", "LogLine"]
    assert answer.trouble == ""


async def test_message_is_acknowledged_only_after_its_events_are_on_disk(
    rig: Rig, disk: Disk, tmp_path: Path
) -> None:
    rig.coordinator.replay(tmp_path / "jobs", died_at=0.0)
    await rig.start("w1")
    line = {"level": "info", "text": "hi"}
    numbered(rig, "w1", 1, **line)
    rig.tick()
    disk.is_full = True
    numbered(rig, "w1", 2, **line)
    numbered(rig, "w1", 3, **line)
    rig.tick()
    numbered(rig, "w1", 3, **line)  # it connected again, and repeats what it kept
    rig.tick()
    assert acks(rig, "w1") == [1]
    assert (tmp_path / "jobs" / "heard" / "w1").read_bytes()[0] == 1

    disk.is_full = False
    rig.tick()

    assert acks(rig, "w1") == [1, 3]
    assert (tmp_path / "jobs" / "heard" / "w1").read_bytes()[0] == 3
    texts = [event.text for event in on_disk(rig) if isinstance(event, events.LogLine)]
    assert texts.count("hi") == 3


async def test_job_continues_without_a_lost_rank_while_the_disk_is_full(
    rig: Rig, disk: Disk
) -> None:
    """The state machine's decision and what it says are one, whatever the disk does."""
    await rig.start("w1", "w2")
    disk.is_full = True

    rig.tell("w2", m.TrainerExited, cause="killed")
    rig.report("w1", 3)
    rig.tell("w1", m.GenerationJoined)

    assert rig.told("w1", m.BreakGeneration)
    assert len(rig.told("w1", m.JoinGeneration)) == 2
    assert rig.job.ranks() == ["w1"]
    disk.is_full = False
    rig.tick()
    kinds = [event.kind for event in on_disk(rig)]
    assert kinds.count("WorkerLost") == 1
    assert kinds.count("GenerationFormed") == 2


async def test_end_of_a_job_is_announced_only_after_it_is_on_disk(
    rig: Rig, disk: Disk, tmp_path: Path
) -> None:
    rig.coordinator.replay(tmp_path / "jobs", died_at=0.0)
    await rig.start("w1")
    disk.is_full = True

    await rig.control("stop", {"now": True})
    rig.tick()

    assert rig.job.state.is_ended
    assert not rig.job.has_reported_end
    assert rig.coordinator.idle_s() == 0.0
    assert (tmp_path / "jobs" / "j").exists()
    disk.is_full = False
    rig.tick()
    assert rig.job.has_reported_end
    assert not (tmp_path / "jobs" / "j").exists()
    statuses = [e.status for e in on_disk(rig) if isinstance(e, events.JobStatusChanged)]
    assert statuses[-1] == "stopped"
    assert "could not be written" in getattr(on_disk(rig)[-1], "text", "")
    EventLog(rig.job.spec.log_path).close()  # nobody holds it any more


async def test_job_is_refused_while_its_log_cannot_be_created(
    rig: Rig, disk: Disk, tmp_path: Path
) -> None:
    disk.is_full = True
    rig.hello("w1")
    with pytest.raises(RequestError, match=r"No space left on device\. Nothing was submitted"):
        await rig.submit()
    assert not (tmp_path / "j" / "events.jsonl").exists()  # whoever asked removes the rest
    disk.is_full = False
    await rig.submit()
    assert rig.job.state.status == "submitted"


async def test_trainers_waiting_for_the_disk_do_not_count_as_hanging(rig: Rig, disk: Disk) -> None:
    await rig.start("w1", "w2")
    disk.is_full = True
    page = m.PageCopy(
        generation=1, step=0, collectives=5, beats=5, phase="computing", alive_age_s=0.1
    )
    for number in range(4 * 100):
        if number % 4 == 0:
            for worker in ("w1", "w2"):
                trainers = {rig.trainer(worker): page}
                rig.say(worker, m.Heartbeat(trainers=trainers, is_stuck=worker == "w1"))
        rig.tick()
    answer = await rig.fetch(since=rig.job.job_log.last_seq, wait_s=0)

    assert not rig.told("w1", m.BreakGeneration)
    assert not rig.orders("w1", m.TerminateTrainer) + rig.orders("w2", m.TerminateTrainer)
    assert answer.trouble == ""  # nothing had to be written
    rig.commit("w1", 1)
    answer = await rig.fetch(since=rig.job.job_log.last_seq, wait_s=0)
    assert answer.trouble.endswith("training is blocked until then")


async def test_next_scheduler_gets_unwritten_events_from_the_supervisors(
    rig: Rig, disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.coordinator.replay(tmp_path / "jobs", died_at=0.0)
    await rig.start("w1")
    numbered(rig, "w1", 1, level="info", text="before")
    trainer, generation = rig.trainer("w1"), rig.job.state.generation
    disk.is_full = True
    numbered(rig, "w1", 2, level="info", text="meanwhile")
    rig.tick()
    rig.job.job_log.abandon()  # the process is killed
    disk.is_full = False

    after = Rig(tmp_path, monkeypatch)
    after.coordinator.replay(tmp_path / "jobs", died_at=1000.0)
    hello = m.TrainerHello(plan=PLAN, pid=7, device="cpu", warm_s=1.0)
    known = m.TrainerSummary(started_at=1000.0, pid=7, generation=generation, hello=hello)
    after.hello("w1", trainers={trainer: known})
    line = m.TextLogged(
        level="info", trainer=trainer, generation=generation, number=2, text="meanwhile"
    )
    after.say("w1", line)
    after.tick()

    texts = [event.text for event in on_disk(after) if isinstance(event, events.LogLine)]
    assert texts == ["before", "meanwhile"]


async def test_event_that_is_not_json_does_not_block_others(rig: Rig, disk: Disk) -> None:
    await rig.start("w1")
    disk.is_full = True
    rig.commit("w1", 1)
    rig.job.log(events.LogLine, level="info", worker="", text=object())
    rig.commit("w1", 2)
    disk.is_full = False
    rig.tick()
    assert steps_of(on_disk(rig)) == [1, 2]


def test_supervisor_keeps_a_bounded_number_of_step_records() -> None:
    outbox = Outbox(most=100, most_records=10)
    for _ in range(3):
        outbox.put(encode(m.StepsTrained(records=({},) * 3)), trainer="j/w1/1")
    assert not outbox.is_full
    outbox.put(encode(m.StepsTrained(records=({},))), trainer="j/w1/1")
    assert outbox.is_full
    outbox.acknowledge(1)
    assert not outbox.is_full


def line(text: str) -> events.LogLine:
    return events.LogLine(job_id="j", time=1.0, level="info", worker="", text=text)


def test_lines_whose_sync_failed_are_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.append([line("a")])
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", fail)
    running = events.JobStatusChanged(job_id="j", time=1.0, status="running")
    with pytest.raises(OSError, match="Input/output error"):
        log.append([running])
    assert log.last_seq == 1
    monkeypatch.setattr(os, "fsync", fsync)
    log.append([running])
    log.close()
    assert [event.seq for event in read_events(log.path)] == [1, 2]


def test_partial_line_that_cannot_be_removed_is_removed_before_the_next_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.append([line("a")])
    write, truncate = os.write, os.ftruncate
    calls: list[int] = []

    def write_half(file: int, data: bytes) -> int:
        calls.append(1)
        return write(file, data[:9]) if len(calls) == 1 else fail()

    monkeypatch.setattr(log_module.os, "write", write_half)
    monkeypatch.setattr(log_module.os, "ftruncate", fail)
    with pytest.raises(OSError, match="Input/output error"):
        log.append([line("b")])
    monkeypatch.setattr(log_module.os, "write", write)
    with pytest.raises(OSError, match="Input/output error"):
        log.append([line("b")])
    monkeypatch.setattr(log_module.os, "ftruncate", truncate)
    log.append([line("b")])
    log.close()
    assert [event.text for event in read_events(log.path)] == ["a", "b"]  # type: ignore[attr-defined]


def fail(*_: Any) -> Any:
    raise OSError(errno.EIO, os.strerror(errno.EIO))
