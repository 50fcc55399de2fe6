"""What listeners get of a log, and when."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
from pathlib import Path

import pytest

from etrain_jupyter.head.jobs import job_log
from etrain_jupyter.head.jobs.job_log import JobLog
from etrain_jupyter.log.event_log import LogReader, read_events
from etrain_jupyter.log.events import Event, JobStatusChanged, LogLine


def line(text: str) -> LogLine:
    return LogLine(job_id="job", time=1.0, level="info", worker="", text=text)


class Changed(asyncio.Event):
    """Tells when listeners are told."""

    def __init__(self, happened: list[str]) -> None:
        super().__init__()
        self._happened = happened

    def set(self) -> None:
        self._happened.append("told")
        super().set()


async def test_change_is_announced_only_after_it_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    log = JobLog(tmp_path / "events.jsonl")
    write, fsync = os.write, os.fsync
    monkeypatch.setattr(os, "write", lambda *a: happened.append("written") or write(*a))
    monkeypatch.setattr(os, "fsync", lambda *a: happened.append("synced") or fsync(*a))
    log.changed = Changed(happened)

    log.append([JobStatusChanged(job_id="job", time=1.0, status="running")])

    assert happened == ["written", "synced", "told"]
    log.close()


async def test_old_events_are_read_from_the_end_of_the_previous_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_log, "RECENT_EVENTS", 5)
    log = JobLog(tmp_path / "events.jsonl")
    events: list[Event] = [line(str(n)) for n in range(1, 31)]
    log.append(events)
    skipped: list[int] = []
    skip = LogReader.skip
    monkeypatch.setattr(LogReader, "skip", lambda r, n: skipped.append(n) or skip(r, n))

    got: list[int] = []
    while news := log.since(len(got), 4):
        got += [event["seq"] for event in news]

    assert got == list(range(1, 31))
    assert skipped == [0]
    log.close()


async def test_log_of_an_ended_job_is_read_from_the_disk_and_uses_no_memory(
    tmp_path: Path,
) -> None:
    """Review R7: 20,000 events of every ended job stayed in the scheduler."""
    log = JobLog(tmp_path / "events.jsonl")
    log.append([line(str(n)) for n in range(1, 31)])
    assert len(log._recent) == 30
    first = log.since(0, 10)
    log.close()

    assert (len(log._recent), len(log._readers)) == (0, 0)
    got = list(first)
    while news := log.since(len(got), 8):
        got += news
    assert [event["seq"] for event in got] == list(range(1, 31))
    assert got[10:][0]["text"] == "11"
    log.append([line("late")])  # no error: the job has ended
    assert log.since(30, 8) == []


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[JobLog, list[str]]:
    """Return the log of a run folder with three events, and the restorations it reported."""
    monkeypatch.setattr(job_log, "LOOK_S", 0.0)
    files = [tmp_path / "job" / "job.json", tmp_path / "job" / "bundle"]
    files[0].parent.mkdir()
    for file in files:
        file.write_text(file.name)
    restored: list[str] = []
    log = JobLog(
        tmp_path / "job" / "events.jsonl", files=files, on_restored=lambda: restored.append("yes")
    )
    files[0].with_name("new").write_text("job.json with a cluster")
    files[0].with_name("new").rename(files[0])
    log.append([line(str(n)) for n in range(3)])
    log.retry()
    assert (log.trouble, restored) == ("", [])
    return log, restored


@pytest.mark.parametrize("is_moved", [False, True])
async def test_deleted_or_moved_run_folder_is_written_again(
    kept: tuple[JobLog, list[str]], tmp_path: Path, is_moved: bool
) -> None:
    log, restored = kept
    folder = tmp_path / "job"
    if is_moved:
        folder.rename(tmp_path / "moved")
    else:
        shutil.rmtree(folder)
    log.append([line("lost meanwhile")])

    log.retry()
    log.retry()
    log.append([line("afterwards")])

    events = read_events(folder / "events.jsonl")
    assert [event.seq for event in events] == [1, 2, 3, 4, 5, 6]
    assert events[4].level == "warning"
    assert events[4].text == (
        f"The run folder {folder} was deleted or moved. Written again: events.jsonl, job.json, "
        "bundle. Checkpoints that were in it are missing; the job saves a new one"
    )
    assert log.trouble in events[4].text
    assert (folder / "job.json").read_text() == "job.json with a cluster"
    assert (folder / "bundle").read_text() == "bundle"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert restored == ["yes"]
    log.close()


async def test_end_of_a_job_is_written_after_its_folder_was_deleted(
    kept: tuple[JobLog, list[str]], tmp_path: Path
) -> None:
    log, _ = kept
    shutil.rmtree(tmp_path / "job")

    log.append([JobStatusChanged(job_id="job", time=1.0, status="stopped")])
    log.close()

    [*_, end] = read_events(tmp_path / "job" / "events.jsonl")
    assert end.status == "stopped"
    assert [event["seq"] for event in log.since(0, 9)] == [1, 2, 3, 4]


async def test_run_folder_that_cannot_be_written_again_is_reported_and_the_end_is_kept(
    kept: tuple[JobLog, list[str]], tmp_path: Path
) -> None:
    log, restored = kept
    shutil.rmtree(tmp_path / "job")
    (tmp_path / "job").write_text("in the way")

    log.retry()
    assert log.trouble == (
        f"The run folder {tmp_path / 'job'} was deleted or moved, and cannot be written again: "
        "another user may have prepared it: it is not a folder of this user alone; retrying"
    )
    log.append([JobStatusChanged(job_id="job", time=1.0, status="stopped")])
    log.close()

    assert log.since(3, 9)[0]["status"] == "stopped"
    assert restored == []


@pytest.mark.parametrize("plant", ["link", "open"])
async def test_run_folder_that_another_user_may_have_replaced_is_not_written(
    kept: tuple[JobLog, list[str]], tmp_path: Path, plant: str
) -> None:
    log, restored = kept
    (tmp_path / "job").rename(tmp_path / "moved")
    planted = tmp_path / "planted"
    planted.mkdir()
    if plant == "link":
        (tmp_path / "job").symlink_to(planted)
    else:
        planted.chmod(0o777)
        planted.rename(tmp_path / "job")

    log.retry()

    assert "another user may have prepared it" in log.trouble
    assert list((tmp_path / "job").iterdir()) == []
    assert restored == []
    log.close()
