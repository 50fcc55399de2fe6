"""What ``logs`` prints of a job, and how ``logs -f`` goes on with it."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime

from etrain_jupyter.errors import EtrainError
from etrain_jupyter.log.blocks import Events, StepRun, runs_of
from etrain_jupyter.log.events import (
    Event,
    FaultInjected,
    JobResumed,
    JobStatusChanged,
    LogLine,
    RankTimed,
    StepCompleted,
    UserErrorRaised,
    WorkerLost,
)
from etrain_jupyter.notebook.dashboard.event_text import describe, describe_times
from etrain_jupyter.notebook.job.open_jobs import hold
from etrain_jupyter.notebook.job.run_store import RunStore
from etrain_jupyter.notebook.job.training_job import TrainingJob

SLICE_S = 0.2
"""How long one wait for news takes: an interrupt is seen in between."""
STEP_S = 5.0
"""Steps are too many to print each."""
LOOK_S = 3.0
"""How often it is looked whether somebody has resumed a job whose cluster is gone."""


def log_lines(events: Iterable[Event]) -> list[str]:
    """Return what was printed, and what happened to workers in between."""
    return [line for event in events if (line := _line_of(event))]


def _line_of(event: Event) -> str:
    clock = _clock_of(event)
    match event:
        case LogLine():
            return f"{clock} {event.level:<7} {event.worker or 'coordinator'}: {event.text}"
        case UserErrorRaised():
            text = (event.traceback or event.error).rstrip()
            return f"{clock} error   {', '.join(event.workers)}: {text}"
        case RankTimed():
            return f"{clock} info    {event.worker}: {describe_times(event)}"
        case WorkerLost() | FaultInjected() if said := describe(event):
            return f"{clock} {said.level:<7} {said.text}"
    return ""


def follow_lines(job: TrainingJob, store: RunStore, *, number: int) -> Iterator[str]:
    """Yield the last lines of a job's log and then each new one, until the job has ended.

    A job whose cluster went without an end is looked for again: who resumes it, here or elsewhere,
    goes on with the same log. Statuses are lines here too, and a step every ``STEP_S``.
    """
    news: queue.Queue[Sequence[Event]] = queue.Queue()
    job.subscribe(news.put)
    lines = _Follower()
    # A view that waits for the first batch must see an interrupt, too.
    while (events := _next_of(news)) is None:
        pass
    yield from lines.of(events)[-number:]
    while True:
        events = _next_of(news)
        if events is not None:
            yield from lines.of(events)
        elif job.is_over and not job.lost:
            return
        elif job.lost:
            yield f"{job.id}: {job.lost}. Waiting for %etrain resume {job.id}; interrupt to leave"
            job = _await_next_life(job, store)
            job.subscribe(news.put)


def _clock_of(event: Event) -> str:
    """Return the time of day; a log that somebody else has made may hold what is none."""
    try:
        return datetime.fromtimestamp(event.time).strftime("%H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return "??:??:??"


class _Follower:
    """Makes lines of events that come in batches, each once."""

    def __init__(self) -> None:
        self._newest = 0
        self._step_at = 0.0

    def of(self, events: Sequence[Event]) -> list[str]:
        """Return the lines of what has not come before."""
        if isinstance(events, Events) and self._newest:
            events = events.after(self._newest)
        lines = []
        for event in runs_of(events):
            if isinstance(event, StepRun):
                self._newest, self._step_at = event.last.seq, event.last.time
            elif event.seq > self._newest:
                self._newest = event.seq
                lines.append(_line_of(event) or self._line_of_course(event))
        return [line for line in lines if line]

    def _line_of_course(self, event: Event) -> str:
        """Return a line about how the job goes on; empty for what is left out."""
        clock = _clock_of(event)
        if isinstance(event, JobResumed):
            return f"{clock} info    job: resumed after step {event.step}"
        if isinstance(event, JobStatusChanged):
            reason = f" ({event.reason})" if event.reason else ""
            return f"{clock} info    job: {event.status}{reason}"
        if isinstance(event, StepCompleted) and event.time - self._step_at >= STEP_S:
            self._step_at = event.time
            return (
                f"{clock} info    job: step {event.step}, loss {event.loss:.4g}, "
                f"{event.world_size} workers"
            )
        return ""


def _next_of(news: queue.Queue[Sequence[Event]]) -> Sequence[Event] | None:
    try:
        return news.get(timeout=SLICE_S)
    except queue.Empty:
        return None


def _await_next_life(job: TrainingJob, store: RunStore) -> TrainingJob:
    """Wait until somebody trains a job again, and return it following that."""
    while True:
        time.sleep(LOOK_S)
        with contextlib.suppress(EtrainError):  # the store may be out of reach for a while
            record = store.find(job.id)
            if record.cluster != job.record.cluster or not store.summarize(record).is_gone:
                return hold(record)
