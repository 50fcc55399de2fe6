"""A job with loggers has its log followed by a process per logger."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from etrain_jupyter.head.jobs import hosted_job
from etrain_jupyter.head.jobs.hosted_job import HostedJob
from etrain_jupyter.head.jobs.job_spec import JobSpec

Started = list[tuple[str, Mapping[str, Any], Path, Callable[[str], None]]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    calls: Started = []
    monkeypatch.setattr(hosted_job, "follow_elsewhere", lambda *call: calls.append(call))
    return calls


def host(run_dir: Path, **log: Any) -> HostedJob:
    objects = {"bundle_digest": "", "bundle_size": 0}
    order = JobSpec(job_id="job-1", name="job", run_dir=run_dir, config={"log": log}, **objects)
    nothing: Any = lambda *_: None  # noqa: E731
    return HostedJob(spec=order, send_to=nothing, send_all=nothing)


async def test_each_logger_of_a_job_is_started(tmp_path: Path, started: Started) -> None:
    host(tmp_path / "a")
    host(tmp_path / "b", to={"mlflow": {"uri": "file:///runs"}, "wandb": {}})

    path = tmp_path / "b" / "events.jsonl"
    assert [call[:3] for call in started] == [
        ("mlflow", {"uri": "file:///runs"}, path),
        ("wandb", {}, path),
    ]


async def test_tensorboard_is_one_of_the_loggers(tmp_path: Path, started: Started) -> None:
    host(tmp_path / "a", tensorboard=True)
    host(tmp_path / "b", tensorboard=str(tmp_path / "boards"))

    assert [call[:3] for call in started] == [
        ("tensorboard", {"folder": str(folder)}, tmp_path / run / "events.jsonl")
        for run, folder in (("a", tmp_path / "a" / "tensorboard"), ("b", tmp_path / "boards"))
    ]


async def test_failure_of_a_logger_is_logged_with_the_next_step(
    tmp_path: Path, started: Started
) -> None:
    job = host(tmp_path, to={"mlflow": {}})
    changed = job.job_log.changed

    # It fails in a thread of its own.
    await asyncio.to_thread(started[0][3], "The MLflow server at http://x is not reachable.")
    await asyncio.wait_for(changed.wait(), 30)

    [text] = [e["text"] for e in job.job_log.since(0, 99) if e["event"] == "LogLine"]
    assert text == (
        "Values are not logged to mlflow: The MLflow server at http://x is not reachable. "
        "Training continues. If they are missing afterwards: %etrain track job-1 --to mlflow"
    )
