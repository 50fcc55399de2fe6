"""A job without a cluster: what its coordinator would say is said by a test."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from etrain_jupyter.log.event_log import EventLog
from etrain_jupyter.log.events import Event, JobStatusChanged, JobSubmitted
from etrain_jupyter.notebook.job.run_store import RunStore
from etrain_jupyter.notebook.job.training_job import TrainingJob
from etrain_jupyter.wire import requests as q


class FakeLink:
    """A coordinator that never has news and remembers what it was asked."""

    def __init__(self, answer: Callable[[q.Request[Any]], Any] | None = None) -> None:
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.waiting: Future[q.EventBatch] = Future()
        self._answer = answer or (lambda request: q.Outcome(message="done"))

    def send(self, request: q.Request[Any], *, timeout: float = 10.0) -> Future[Any]:
        if isinstance(request, q.FetchEvents):
            return self.waiting
        if isinstance(request, q.ControlJob):
            self.requests.append((request.request, request.args or {}))
        future: Future[Any] = Future()
        future.set_result(self._answer(request))
        return future

    def call(self, request: q.Request[Any], *, timeout: float = 10.0) -> Any:
        return self.send(request, timeout=timeout).result(timeout)

    def release(self) -> None:
        pass

    def tell(self, *events: Event) -> None:
        """Answer the question that waits."""
        waiting, self.waiting = self.waiting, Future()
        waiting.set_result(q.EventBatch(events=tuple(event.to_json_dict() for event in events)))


def status(name: str, seq: int = 0, reason: str = "") -> Event:
    return JobStatusChanged(job_id="digits-1", time=2.0, seq=seq, status=name, reason=reason)


def new_job(tmp_path: Path, link: FakeLink | None, *events: Event) -> TrainingJob:
    record = RunStore(tmp_path).create(
        {"name": "digits", "created": 1.0, "config": {"model": "Net()"}}, job_id="digits-1"
    )
    log = EventLog(record.log_path, fsync_every_s=None)
    submitted = JobSubmitted(
        job_id="digits-1", time=1.0, name="digits", min_workers=1, max_workers=2
    )
    log.append([submitted, *events])
    log.close()
    return TrainingJob(record, link)
