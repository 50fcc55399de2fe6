"""Format a job's events as lines for ``logs``, and follow them for ``logs -f``."""

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
"""Polling interval for new events, in seconds; interrupts are handled in between."""
STEP_S = 5.0
"""Minimum interval between printed steps, in seconds."""
LOOK_S = 3.0
"""Interval between checks for a resume after the cluster has ended, in seconds."""


def log_lines(events: Iterable[Event]) -> list[str]:
    """Return a line for each line that was printed and each event that affected a worker."""
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
        case WorkerLost() | FaultInjected() if shown := describe(event):
            return f"{clock} {shown.level:<7} {shown.text}"
    return ""


def follow_lines(job: TrainingJob, store: RunStore, *, number: int) -> Iterator[str]:
    """Yield the last lines of a job's log, then each new line, until the job has ended.

    If the cluster ends before the job, wait for a resume, by this kernel or another one, which
    continues the same log. Unlike ``log_lines``, this includes status changes, and at most one step
    per ``STEP_S``.
    """
    #   queue: all events so far -> print the last `number` lines
    #          each new batch   -> print its lines
    #          empty, and the job has ended                     -> return
    #          empty, and its cluster has ended before the job  -> wait for a resume, resubscribe
    #
    # A new subscription starts with all events so far again; _Follower skips those it has
    # formatted.
    batches: queue.Queue[Sequence[Event]] = queue.Queue()
    job.subscribe(batches.put)
    lines = _LogFollower()
    # Poll with a short timeout, so that an interrupt is handled while no batch has arrived.
    while (events := _next_batch(batches)) is None:
        pass
    yield from lines.of(events)[-number:]
    while True:
        events = _next_batch(batches)
        if events is not None:
            yield from lines.of(events)
        # Checked only when the queue is empty, so no line is lost at the end.
        elif job.is_over and not job.lost:
            return
        elif job.lost:
            yield f"{job.id}: {job.lost}. Waiting for %etrain resume {job.id}; interrupt to leave"
            job = _await_resume(job, store)
            job.subscribe(batches.put)


def _clock_of(event: Event) -> str:
    # A log from another user may contain any number as a time.
    try:
        return datetime.fromtimestamp(event.time).strftime("%H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return "??:??:??"


class _LogFollower:
    """Format events that arrive in batches, each event once."""

    def __init__(self) -> None:
        self._newest = 0
        self._step_at = 0.0

    def of(self, events: Sequence[Event]) -> list[str]:
        """Return the lines of the events that are newer than those of earlier calls."""
        if isinstance(events, Events) and self._newest:
            # This skips whole blocks without unpacking them. It saves time after a job with a long
            # log has been resumed.
            events = events.after(self._newest)
        lines = []
        for event in runs_of(events):
            # Blocks contain only steps from the history, which are not printed.
            if isinstance(event, StepRun):
                self._newest, self._step_at = event.last.seq, event.last.time
            elif event.seq > self._newest:
                self._newest = event.seq
                lines.append(_line_of(event) or self._progress_line(event))
        return [line for line in lines if line]

    def _progress_line(self, event: Event) -> str:
        """Return a line about the job's progress; empty if the event is not shown."""
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


def _next_batch(batches: queue.Queue[Sequence[Event]]) -> Sequence[Event] | None:
    try:
        return batches.get(timeout=SLICE_S)
    except queue.Empty:
        return None


def _await_resume(job: TrainingJob, store: RunStore) -> TrainingJob:
    while True:
        time.sleep(LOOK_S)
        with contextlib.suppress(EtrainError):  # the store may be temporarily unreachable
            record = store.find(job.id)
            # A resume changes the cluster in the record. Without a resume, the cluster may turn out
            # to be alive.
            if record.cluster != job.record.cluster or not store.summarize(record).is_gone:
                return hold(record)
