"""A coordinator takes a job over: from its log, and from nobody who still writes that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from etrain_jupyter.log.event_log import EventLog, read_events
from etrain_jupyter.log.events import (
    GenerationFormed,
    JobPlanned,
    JobResumed,
    JobStatusChanged,
    JobSubmitted,
    UserErrorRaised,
)
from etrain_jupyter.log.job_record import NOT_BEGUN, JobRecord
from etrain_jupyter.storage.checkpoints import LocalStore, Manifest
from etrain_jupyter.wire import messages as m
from tests.unit.head.coordinator.rig import PLAN, Rig

pytestmark = pytest.mark.asyncio
FORMED = {"connect_s": 0.0, "sync_s": 0.0, "wrap_s": 0.0}


def log_of(folder: Path) -> Path:
    return folder / "j" / "events.jsonl"


async def train_and_restore(rig: Rig) -> None:
    """Two generations lose everybody, and the third goes on from the checkpoint of step 2."""
    await rig.start("w0", "w1")
    rig.commit("w0", 1, 2)
    rig.save("w0", 2)
    rig.commit("w0", 3, 4)
    rig.tell("w0", m.BestFound, record={"step": 3, "metric": "loss", "value": 0.5})
    for worker in ("w0", "w1"):
        rig.coordinator.remove_worker(None, f"tls://{worker}")  # type: ignore[arg-type]
    rig.hello("w2", "w3")
    rig.warm("w2", "w3")


async def crash(rig: Rig, folder: Path, monkeypatch: Any) -> Rig:
    """Return another cluster after the death of the first one's scheduler."""
    rig.job.job_log.close()
    return Rig(folder, monkeypatch)


async def test_record_read_from_the_log_equals_that_of_the_coordinator(
    tmp_path: Path, monkeypatch: Any
) -> None:
    rig = Rig(tmp_path, monkeypatch)
    await train_and_restore(rig)
    job = rig.job

    before = JobRecord().apply_all(read_events(log_of(tmp_path)))
    assert before.generation == job.state.generation == 2
    assert before.starts == job.record.starts == [0, NOT_BEGUN], "nobody has told which checkpoint"
    rig.tell("w2", m.GenerationJoined, step=2, **FORMED)
    rig.tell("w3", m.GenerationJoined, step=2, **FORMED)
    rig.commit("w2", 3)

    past = JobRecord().apply_all(read_events(log_of(tmp_path)))
    for name in ("logged_step", "starts", "ranks", "trainers", "evaluated_steps", "restored_in"):
        assert getattr(past, name) == getattr(job.record, name), name
    assert past.starts == [0, 2]
    assert past.logged_step == 3
    assert past.saved_steps == job.state.saved_steps == (2,)
    assert past.num_started == job.state.num_started == 4
    assert past.best_reported is None, "its step was undone"
    assert past.status == "running"
    assert past.plan is not None
    assert past.plan.num_train_samples == PLAN["num_train_samples"]


async def test_resumed_job_continues_its_numbering_and_restores(
    tmp_path: Path, monkeypatch: Any
) -> None:
    first = Rig(tmp_path, monkeypatch)
    await train_and_restore(first)
    rig = await crash(first, tmp_path, monkeypatch)

    rig.hello("x0")
    await rig.submit(resumes=True, differs=["name: a -> b"], min_workers=1, max_workers=1)
    rig.warm("x0")

    [resumed] = rig.events(JobResumed)
    assert (resumed.from_status, resumed.step, resumed.generation) == ("running", 4, 2)
    assert (resumed.max_workers, resumed.differs) == (1, ["name: a -> b"])
    assert len(rig.events(JobSubmitted)) == 1
    assert rig.trainer("x0") == "j/x0/5", "no trainer has the name of an earlier one"
    [form] = rig.told("x0", m.JoinGeneration)
    assert (form.generation, form.restore, form.log_end) == (3, True, 4)
    assert form.starts == (0, NOT_BEGUN)
    [formed] = [e for e in rig.events(GenerationFormed) if e.generation == 3]
    assert (formed.why, formed.step) == ("resume", 2)
    assert len(rig.events(JobPlanned)) == 2, "the plan may be another one"
    seqs = [event.seq for event in read_events(log_of(tmp_path))]
    assert seqs == list(range(1, len(seqs) + 1))


async def test_torn_last_line_is_repaired(tmp_path: Path, monkeypatch: Any) -> None:
    first = Rig(tmp_path, monkeypatch)
    await first.start("w0")
    rig = await crash(first, tmp_path, monkeypatch)
    with log_of(tmp_path).open("ab") as file:
        file.write(b'{"event":"StepCompleted","job_id":"j","st')

    await rig.submit(resumes=True)

    kinds = [event.kind for event in read_events(log_of(tmp_path))]
    assert "StepCompleted" not in kinds
    assert "JobResumed" in kinds


async def test_job_with_a_running_coordinator_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    first, second = Rig(tmp_path, monkeypatch), Rig(tmp_path, monkeypatch)
    await first.start("w0")
    before = log_of(tmp_path).read_bytes()

    with pytest.raises(Exception, match="the job's coordinator still runs"):
        await second.submit(resumes=True)

    assert log_of(tmp_path).read_bytes() == before
    assert second.coordinator._jobs == {}


async def test_damaged_log_is_refused_and_unlocked(tmp_path: Path, monkeypatch: Any) -> None:
    first = Rig(tmp_path, monkeypatch)
    await first.start("w0")
    rig = await crash(first, tmp_path, monkeypatch)
    lines = log_of(tmp_path).read_bytes().splitlines(keepends=True)
    log_of(tmp_path).write_bytes(b"".join([lines[0], b"\0\0\0\n", *lines[2:]]))

    with pytest.raises(Exception, match=r"Line 2 of .* is not an event"):
        await rig.submit(resumes=True)

    EventLog(log_of(tmp_path)).close()  # nobody holds it


async def test_job_that_already_runs_here_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    rig = Rig(tmp_path, monkeypatch)
    await rig.start("w0")

    with pytest.raises(Exception, match=r"it is running at step 0\. Nothing was submitted"):
        await rig.submit(resumes=True)


async def test_ended_job_of_the_same_cluster_is_resumed(tmp_path: Path, monkeypatch: Any) -> None:
    rig = Rig(tmp_path, monkeypatch)
    await rig.start("w0")
    rig.commit("w0", 1)
    await rig.control("stop", {"now": True})
    assert rig.job.state.status == "stopped"

    await rig.submit(resumes=True, max_workers=1)

    statuses = [e.status for e in rig.events(JobStatusChanged)]
    assert statuses[statuses.index("stopped") + 1] == "submitted"
    assert rig.job.state.of_worker("w0") is not None
    assert rig.coordinator.idle_s() == 0.0


async def test_generation_known_only_from_a_checkpoint_still_fences(
    tmp_path: Path, monkeypatch: Any
) -> None:
    first = Rig(tmp_path, monkeypatch)
    await first.start("w0")
    rig = await crash(first, tmp_path, monkeypatch)
    store = LocalStore(tmp_path / "j")
    part = store.put_part(store.begin(9), "state.json", b"{}")
    store.commit(
        Manifest(
            step=9, job_id="j", generation=7, config_digest="", created=1.0, parts={"state": part}
        )
    )

    await rig.submit(resumes=True)

    assert rig.job.state.generation == 7
    assert len(rig.job.record.starts) == 7


async def test_data_of_another_length_is_refused_unless_forced(
    tmp_path: Path, monkeypatch: Any
) -> None:
    first = Rig(tmp_path, monkeypatch)
    await first.start("w0")
    rig = await crash(first, tmp_path, monkeypatch)
    rig.hello("w0")
    await rig.submit(resumes=True, max_workers=1)

    rig.warm("w0", plan=PLAN | {"num_train_samples": 65})

    assert rig.job.state.status == "failed"
    assert "has 65 samples, but had 64" in rig.events(UserErrorRaised)[-1].error
    await rig.submit(resumes=True, max_workers=1, is_forced=True)
    rig.tick()
    rig.warm("w0", plan=PLAN | {"num_train_samples": 65})
    assert rig.job.state.status == "running"


@pytest.mark.parametrize(
    "now",
    [
        {"train_layout": "8:32x2", "train_digest": "b" * 64},  # other content
        {"train_layout": "4:32x2", "train_digest": "a" * 64},  # another window
        {},  # the same rows in memory have another order
    ],
)
async def test_other_shards_are_refused_unless_forced(
    tmp_path: Path, monkeypatch: Any, now: dict[str, str]
) -> None:
    first = Rig(tmp_path, monkeypatch)
    first.hello("w0")
    await first.submit(max_workers=1)
    first.warm("w0", plan=PLAN | {"train_layout": "8:32x2", "train_digest": "a" * 64})
    rig = await crash(first, tmp_path, monkeypatch)
    rig.hello("w0")
    await rig.submit(resumes=True, max_workers=1)

    rig.warm("w0", plan=PLAN | now)

    assert rig.job.state.status == "failed"
    assert "is not the set on which the job was" in rig.events(UserErrorRaised)[-1].error
    await rig.submit(resumes=True, max_workers=1, is_forced=True)
    rig.tick()
    rig.warm("w0", plan=PLAN | now)
    assert rig.job.state.status == "running"


async def test_resumed_job_without_a_log_is_submitted(tmp_path: Path, monkeypatch: Any) -> None:
    rig = Rig(tmp_path, monkeypatch)

    await rig.submit(resumes=True)

    assert len(rig.events(JobSubmitted)) == 1
    assert rig.events(JobResumed) == []
