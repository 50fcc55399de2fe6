"""A job whose run store is a bucket, in the coordinator: outages, its end, and other writers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from etrain_jupyter.errors import FencedError, RunStoreError
from etrain_jupyter.head.coordinator.coordinator import Coordinator
from etrain_jupyter.head.jobs import mirrored_log
from etrain_jupyter.log import events
from etrain_jupyter.log.event_log import read_events
from etrain_jupyter.storage.bucket_log import mirror
from etrain_jupyter.storage.bucket_log.chain import Chain
from etrain_jupyter.storage.bucket_log.local_copy import LogCopy
from etrain_jupyter.storage.bucket_log.locations import spool_of
from etrain_jupyter.storage.bucket_log.objects import RunObjects
from etrain_jupyter.storage.bucket_log.uploads import ALIVE, claim
from etrain_jupyter.testing.s3_faults import S3Fault
from etrain_jupyter.testing.s3_server import S3Server
from etrain_jupyter.wire import messages as m
from etrain_jupyter.wire.requests import SubmitJob
from tests.unit.head.coordinator.rig import Disk, Rig, put_bundle


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ETRAIN_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(mirror, "FLUSH_S", 0.05)
    monkeypatch.setattr(mirror, "RETRY_S", 0.05)
    monkeypatch.setattr(mirror, "MAX_RETRY_S", 0.05)
    monkeypatch.setattr(mirrored_log, "UPLOAD_PATIENCE_S", 0.0)


@pytest.fixture
def place(s3_bucket: str) -> str:
    return f"s3://{s3_bucket}/runs/j"


@pytest_asyncio.fixture
async def rig(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_pauses: None, s3_server: S3Server
) -> AsyncIterator[Rig]:
    made = Rig(tmp_path, monkeypatch)
    made.now = 1_900_000_000.0
    yield made
    s3_server.set_faults()
    for job in made.coordinator._jobs.values():
        job.job_log.close()
        await until(lambda job=job: not job.job_log.is_uploading)


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.02)


def seen_elsewhere(tmp_path: Path, place: str) -> list[events.Event]:
    copy = LogCopy(Chain(RunObjects(place)), tmp_path / "elsewhere" / "events.jsonl")
    copy.refresh()
    return list(read_events(copy.path))


async def test_events_are_uploaded_to_the_bucket(rig: Rig, tmp_path: Path, place: str) -> None:
    await rig.start("w1", place=place)
    rig.commit("w1", 1, 2)
    await until(lambda: rig.job.job_log._mirror.seq == rig.job.job_log.last_seq)
    there = seen_elsewhere(tmp_path, place)
    assert there == list(read_events(spool_of(place) / "events.jsonl"))
    assert [e.step for e in there if isinstance(e, events.StepCompleted)] == [1, 2]
    assert rig.job.spec.checkpoints == place


async def test_exhibit_is_uploaded_to_the_bucket(rig: Rig, place: str) -> None:
    await rig.start("w1", place=place)
    found = {"step": 3, "name": "report", "format": "text", "data": b"fine"}
    rig.tell("w1", m.ExhibitFound, **found)

    key = "exhibits/step_00000003/report.txt"
    await until(lambda: RunObjects(place).get(key) == b"fine")
    assert (spool_of(place) / key).read_bytes() == b"fine"


async def test_outage_is_logged_once_and_the_backlog_is_uploaded_afterwards(
    rig: Rig, tmp_path: Path, place: str, s3_server: S3Server
) -> None:
    await rig.start("w1", place=place)
    await until(lambda: rig.job.job_log._mirror.seq == rig.job.job_log.last_seq)
    s3_server.set_faults(S3Fault(kind="internal_error"))
    rig.commit("w1", 1)
    await until(lambda: rig.events(events.LogLine))
    for step in (2, 3, 4):
        rig.commit("w1", step)
    [told] = rig.events(events.LogLine)
    assert told.level == "warning"
    assert "S3 has an internal error" in told.text
    assert told.text.endswith("Training and the log continue here; the upload is retried")
    s3_server.set_faults()
    await until(lambda: len(rig.events(events.LogLine)) == 2)
    await until(lambda: rig.job.job_log._mirror.seq == rig.job.job_log.last_seq)
    assert "has the whole log again, after" in rig.events(events.LogLine)[1].text
    steps = [e for e in seen_elsewhere(tmp_path, place) if isinstance(e, events.StepCompleted)]
    assert [e.step for e in steps] == [1, 2, 3, 4]


async def test_end_is_announced_only_after_the_bucket_has_it(
    rig: Rig, tmp_path: Path, place: str, s3_server: S3Server
) -> None:
    await rig.start("w1", place=place)
    await until(lambda: rig.job.job_log._mirror.seq == rig.job.job_log.last_seq)
    s3_server.set_faults(S3Fault(kind="internal_error"))
    await rig.control("stop", {"now": True})
    assert rig.job.state.is_ended
    assert not rig.job.has_reported_end
    assert rig.coordinator.idle_s() == 0.0
    assert "stopped" not in [e.status for e in rig.events(events.JobStatusChanged)]
    s3_server.set_faults()
    await until(lambda: rig.job.has_reported_end)
    assert rig.events(events.JobStatusChanged)[-1].status == "stopped"
    there = seen_elsewhere(tmp_path, place)
    assert [e.status for e in there if isinstance(e, events.JobStatusChanged)][-1] == "stopped"
    await until(lambda: not rig.job.is_uploading)
    told, _ = RunObjects(place).get_aged(ALIVE) or ({}, 0.0)
    assert (told["status"], told["has_ended"]) == ("stopped", True)


async def test_job_ends_although_the_bucket_is_unreachable(
    rig: Rig, tmp_path: Path, place: str, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirrored_log, "LAST_UPLOAD_S", 0.0)
    await rig.start("w1", place=place)
    await until(lambda: rig.job.job_log._mirror.seq == rig.job.job_log.last_seq)
    s3_server.set_faults(S3Fault(kind="internal_error"))
    await rig.control("stop", {"now": True})
    await until(lambda: rig.job.has_reported_end)
    assert rig.events(events.JobStatusChanged)[-1].status == "stopped"
    assert f"{place} does not have its end yet" in rig.events(events.LogLine)[-1].text
    assert rig.job.is_uploading
    s3_server.set_faults()
    await until(lambda: not rig.job.is_uploading)
    there = seen_elsewhere(tmp_path, place)
    assert [e.status for e in there if isinstance(e, events.JobStatusChanged)][-1] == "stopped"


async def test_upload_is_abandoned_some_time_after_the_end(
    rig: Rig, place: str, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirrored_log, "LAST_UPLOAD_S", 0.0)
    monkeypatch.setattr(mirror, "ABANDON_S", 0.0)
    await rig.start("w1", place=place)
    s3_server.set_faults(S3Fault(kind="internal_error"))
    await rig.control("stop", {"now": True})
    await until(lambda: rig.job.has_reported_end and not rig.job.is_uploading)


async def test_coordinator_ends_a_job_that_another_one_has_taken_over(
    rig: Rig, tmp_path: Path, place: str
) -> None:
    await rig.start("w1", place=place)
    await until(lambda: rig.job.job_log._mirror.seq == rig.job.job_log.last_seq)
    chain = Chain(RunObjects(place))
    copy = LogCopy(chain, tmp_path / "other" / "events.jsonl")
    claim(copy, chain, job_id="j")
    rig.commit("w1", 1)
    await until(lambda: rig.job.state.is_ended)
    [told] = [e for e in rig.events(events.LogLine) if e.level == "error"]
    assert told.text.startswith("Another coordinator has taken over the job, so it stops here")
    await until(lambda: rig.job.has_reported_end)
    there = seen_elsewhere(tmp_path, place)
    assert not [e for e in there if isinstance(e, events.StepCompleted)]


async def test_job_is_taken_over_on_another_machine(
    rig: Rig, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.start("w1", place=place)
    rig.commit("w1", 1, 2)
    await until(lambda: rig.job.job_log._mirror.seq == rig.job.job_log.last_seq)
    monkeypatch.setenv("ETRAIN_STATE", str(tmp_path / "second"))
    second = Rig(tmp_path, monkeypatch)
    await second.submit(place=place, resumes=True)
    [resumed] = second.events(events.JobResumed)
    assert (resumed.from_status, resumed.step) == ("running", 2)
    assert second.job.spec.run_dir == tmp_path / "second" / spool_of(place).relative_to(
        tmp_path / "second"
    )
    await until(lambda: second.job.job_log._mirror.seq == second.job.job_log.last_seq)
    second.job.job_log.close()
    assert second.job.job_log._mirror.is_done.wait(30.0)


async def test_submit_is_refused_if_the_bucket_is_not_writable(
    rig: Rig, place: str, s3_server: S3Server
) -> None:
    s3_server.set_faults(S3Fault(kind="deny", match="PUT "))
    with pytest.raises(RunStoreError, match="access denied"):
        await rig.submit(place=place)
    assert rig.coordinator._jobs == {}
    s3_server.set_faults()
    await rig.submit(place=place)  # nothing of the first attempt is in the way


async def test_job_whose_log_another_process_writes_is_refused(
    rig: Rig, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirrored_log, "LOCK_S", 0.0)
    await rig.start("w1", place=place)
    other = Coordinator(rig.nodes, cluster_id="d", on_shutdown=lambda: None)
    order = {"job_id": "j", "name": "j", "run_dir": "/x", "config": {}}
    order |= put_bundle({**order, "place": place})
    request = SubmitJob(job={**order, "place": place, "resumes": True})
    with pytest.raises(FencedError, match="written or uploaded by another process"):
        await other._kernel_requests.submit(request)


async def test_restarted_coordinator_continues_as_the_same_writer(
    rig: Rig, tmp_path: Path, place: str
) -> None:
    await rig.start("w1", place=place)
    await until(lambda: rig.job.job_log._mirror.seq == rig.job.job_log.last_seq)
    order, log = rig.job.spec, rig.job.job_log
    log.close()
    assert log._mirror.is_done.wait(30.0)
    again = mirrored_log.MirroredLog(order, None, lambda: None)
    again.append([events.LogLine(job_id="j", time=1.0, level="info", worker="", text="here")])
    again.close()
    assert again._mirror.is_done.wait(30.0)
    last = seen_elsewhere(tmp_path, place)[-1]
    assert isinstance(last, events.LogLine)
    assert last.text == "here"


async def test_last_events_are_uploaded_before_the_cluster_ends(
    rig: Rig, tmp_path: Path, place: str, s3_server: S3Server
) -> None:
    await rig.start("w1", place=place)
    await until(lambda: rig.job.job_log._mirror.seq == rig.job.job_log.last_seq)
    s3_server.set_faults(S3Fault(kind="slow", seconds=0.2))
    await rig.control("stop", {"now": True})
    await rig.coordinator.close()
    assert not rig.job.is_uploading
    statuses = [
        e.status for e in seen_elsewhere(tmp_path, place) if isinstance(e, events.JobStatusChanged)
    ]
    assert statuses[-1] == "stopped"


async def test_failed_packs_do_not_block_the_upload(
    rig: Rig, tmp_path: Path, place: str, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etrain_jupyter.storage.bucket_log.uploads.PACKS", (20_000, 2))
    s3_server.set_faults(S3Fault(kind="deny", match="/packs/"))
    await rig.start("w1", place=place)
    rig.commit("w1", 1)
    await rig.control("stop", {"now": True})
    await until(lambda: rig.job.has_reported_end and not rig.job.is_uploading)
    [step] = [e for e in seen_elsewhere(tmp_path, place) if isinstance(e, events.StepCompleted)]
    assert step.step == 1


async def test_bucket_gets_all_events_although_the_local_disk_was_full_at_the_end(
    rig: Rig, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Review R1, for a job of a bucket."""
    disk = Disk(monkeypatch)
    await rig.start("w1", place=place)
    rig.commit("w1", 1)
    disk.is_full = True
    rig.commit("w1", 2)
    await rig.control("stop", {"now": True})
    rig.tick()
    assert rig.job.state.is_ended
    assert not rig.job.has_reported_end
    assert "cannot be written: No space left on device" in rig.job.job_log.trouble

    disk.is_full = False
    rig.tick()
    await until(lambda: rig.job.has_reported_end and not rig.job.is_uploading)
    there = seen_elsewhere(tmp_path, place)
    assert [e.step for e in there if isinstance(e, events.StepCompleted)] == [1, 2]
    statuses = [e.status for e in there if isinstance(e, events.JobStatusChanged)]
    assert statuses[-1] == "stopped"
