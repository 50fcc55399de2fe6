"""A job that asks for TensorBoard has its log followed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from etrain_jupyter.head.jobs import loggers
from etrain_jupyter.head.jobs.hosted_job import HostedJob
from etrain_jupyter.head.jobs.job_spec import JobSpec

Followed = list[tuple[Path, Path, Callable[[str], None]]]


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> Followed:
    calls: Followed = []
    monkeypatch.setattr(loggers, "follow_elsewhere", lambda *call: calls.append(call))
    return calls


def host(run_dir: Path, **log: Any) -> HostedJob:
    objects = {"bundle_digest": "", "bundle_size": 0}
    order = JobSpec(job_id="job-1", name="job", run_dir=run_dir, config={"log": log}, **objects)
    nothing: Any = lambda *_: None  # noqa: E731
    return HostedJob(spec=order, send_to=nothing, send_all=nothing)


async def test_tensorboard_files_are_written_to_the_configured_folder(
    tmp_path: Path, followed: Followed
) -> None:
    host(tmp_path / "a")
    host(tmp_path / "b", tensorboard=True)
    host(tmp_path / "c", tensorboard=str(tmp_path / "boards"))

    assert [call[:2] for call in followed] == [
        (tmp_path / "b" / "events.jsonl", tmp_path / "b" / "tensorboard"),
        (tmp_path / "c" / "events.jsonl", tmp_path / "boards" / "job-1"),
    ]


async def test_failure_of_the_writer_is_logged(tmp_path: Path, followed: Followed) -> None:
    job = host(tmp_path, tensorboard=True)
    changed = job.job_log.changed

    # It fails in a thread of its own.
    await asyncio.to_thread(followed[0][2], "no room on the disk")
    await asyncio.wait_for(changed.wait(), 30)

    (told,) = [e["text"] for e in job.job_log.since(0, 99) if e["event"] == "LogLine"]
    assert told == "TensorBoard files are not written: no room on the disk"
