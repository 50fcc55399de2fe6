"""What listeners get of a log, and when."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from etrain_jupyter.head.jobs import job_log
from etrain_jupyter.head.jobs.job_log import JobLog
from etrain_jupyter.log.event_log import LogReader
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
