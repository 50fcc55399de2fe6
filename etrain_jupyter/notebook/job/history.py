"""What a job's events add up to: the latest values, and the history as columns.

Steps that come in blocks of columns are folded by column, so that a million of them stay a matter
of milliseconds. One thread folds events in; any thread may ask, which is why there is a lock.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterable
from os import SEEK_END
from pathlib import Path
from typing import Any, BinaryIO

from etrain_jupyter.log.blocks import StepRun, runs_of
from etrain_jupyter.log.events import (
    TERMINAL_STATUSES,
    BestReached,
    CheckpointCommitted,
    CostUpdated,
    EvalCompleted,
    Event,
    GenerationFormed,
    JobPlanned,
    JobRestored,
    JobResumed,
    JobStatusChanged,
    JobSubmitted,
    PreemptionNoticed,
    StepCompleted,
    UserErrorRaised,
    WorkerLeft,
    WorkerLost,
    WorkersScaled,
    event_from_dict,
)
from etrain_jupyter.notebook.job.columns import STEP_COLUMNS, History
from etrain_jupyter.untrusted import open_regular

__all__ = ["STEP_COLUMNS", "History", "LatestValues", "peek_log"]

NOT_FOLDABLE = (ValueError, KeyError, TypeError, AttributeError, ArithmeticError)
"""What comes of events with values that no event has: of a log that somebody else may have made."""
PEEK_BYTES = 64 * 1024
PEEK_MOST_BYTES = 4 * 1024 * 1024
"""How far to look back for a step or a status behind what was printed."""


class LatestValues:
    """The latest values of a job, folded from its events."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._history = History()
        self.status = "submitted"
        self.reason = ""
        self.step = 0
        self.total_steps = 0
        self._plan: JobPlanned | None = None
        self.epoch = 0
        self.world_size = 0
        self.generation = 0
        self.workers = (0, 0)
        self._ranks: frozenset[str] | None = None
        self.samples_per_s = math.nan
        self.metrics: dict[str, float] = {}
        self.saved_step = 0
        """Step of the newest durable checkpoint; 0 if there is none."""
        self.stalls: dict[int, float] = {}
        """For how long training stood still for each checkpoint, by step."""
        self.best: list[BestReached] = []
        """The best evaluations in the order in which they were reached, the very best last."""
        self.cost: CostUpdated | None = None
        """What the job has cost, as it was told last; None where its pool knows no prices."""
        self.num_preempted = 0
        """Workers whose machines were announced to be taken."""
        self.num_lost = 0
        """Workers that went without a word."""
        self.samples = 0
        """Samples trained so far, repeated epochs included."""
        self.user_error: UserErrorRaised | None = None
        self.started_at = math.nan
        self.changed_at = math.nan

    @property
    def is_terminal(self) -> bool:
        """Whether the log says that the job has ended."""
        return self.status in TERMINAL_STATUSES

    def add(self, events: Iterable[Event]) -> None:
        """Fold in what happened."""
        with self._lock:
            for item in runs_of(events):
                if isinstance(item, StepRun):
                    self._fold_run(item)
                else:
                    self._fold(item)
                    self.changed_at = item.time

    def columns(self) -> dict[str, list[Any]]:
        """Return the history; see ``History.columns``."""
        with self._lock:
            return self._history.columns()

    def _fold(self, event: Event) -> None:
        match event:
            case StepCompleted():
                self._fold_step(event)
            case EvalCompleted():
                self._history.add_eval(event)
                measured = {"loss": event.loss, **event.metrics}
                self.metrics = self.metrics | {f"eval_{k}": v for k, v in measured.items()}
            case GenerationFormed():
                self.generation, self.world_size = event.generation, event.world_size
                self.step = event.step
                self._ranks = frozenset(event.ranks)
            case CostUpdated():
                self.cost = event
            case PreemptionNoticed():
                self.num_preempted += 1
            case WorkerLost() | WorkerLeft():
                self.num_lost += isinstance(event, WorkerLost)
                self._ranks = self._ranks and self._ranks - {event.worker}
                self._count_if_paused()
            case JobRestored():
                self.step = event.step
                self._history.rewind_to(event.step)
                self.best = [best for best in self.best if best.step <= event.step]
            case BestReached():
                self.best = [*(b for b in self.best if b.step != event.step), event]
            case JobStatusChanged():
                self.status, self.reason = event.status, event.reason
                if event.status == "waiting":
                    self.world_size = 0
                if event.status == "finished" and self.step:
                    self.total_steps = self.step  # it may have ended before its time
                self._count_if_paused()
            case CheckpointCommitted():
                self.saved_step = event.step
                self.stalls[event.step] = event.stall_s
            case JobPlanned():
                self._plan, self.total_steps = event, event.total_steps
            case JobSubmitted():
                self.started_at = event.time
                self.workers = (event.min_workers, event.max_workers)
            case JobResumed():
                self.workers = (event.min_workers, event.max_workers)
                self.user_error, self.world_size, self._ranks = None, 0, None
            case WorkersScaled():
                self.workers = (event.min_workers, event.max_workers)
            case UserErrorRaised():
                self.user_error = event

    def _count_if_paused(self) -> None:
        # Otherwise the next generation says how many there are.
        if self.status == "paused" and self._ranks is not None:
            self.world_size = len(self._ranks)

    def _fold_step(self, event: StepCompleted) -> None:
        self._history.add_step(event)
        self._take_values(event)

    def _fold_run(self, run: StepRun) -> None:
        self._history.add_run(run)
        last = run.last
        self._take_values(last)
        self.changed_at = last.time

    def _take_values(self, event: StepCompleted) -> None:
        self.step, self.epoch = event.step, event.epoch
        if self._plan is not None:
            num_train = self._plan.num_train_samples
            self.samples = event.epoch * num_train + event.first + event.samples
            self.total_steps = self._plan.total_steps_after(event)
        # Whoever sees only the end of a log knows from here how many there are.
        self.world_size = event.world_size
        if event.generation > self.generation:
            self._ranks = None  # they are those of a generation whose beginning was not seen
        self.generation = max(self.generation, event.generation)
        self.samples_per_s = event.samples_per_s
        self.metrics = self.metrics | {"loss": event.loss, **event.metrics}


def peek_log(path: Path) -> LatestValues:
    """Return a job's latest values from the two ends of its log, however long that is.

    What happened in between is not looked at, so that a list of a hundred jobs costs a hundred
    short reads. A step in the last part tells that the job was running there, and with how many.
    """
    view = LatestValues()
    try:
        with open_regular(path) as file:
            view.add(_events_in(file.read(PEEK_BYTES)))
            _add_tail(view, _tail_of(file))
    except (OSError, *NOT_FOLDABLE):
        pass
    return view


def _tail_of(file: BinaryIO) -> list[Event]:
    """Return the last events, from as far back as it takes to know how the job stood."""
    size = file.seek(0, SEEK_END)
    length = PEEK_BYTES
    while True:
        start = max(PEEK_BYTES, size - length)
        file.seek(start)
        events = _events_in(file.read())
        facts = [e for e in events if isinstance(e, StepCompleted | JobStatusChanged)]
        if facts or start == PEEK_BYTES or length >= PEEK_MOST_BYTES:
            return events
        length *= 4


def _add_tail(view: LatestValues, events: list[Event]) -> None:
    view.add(events)
    facts = [e for e in events if isinstance(e, StepCompleted | JobStatusChanged)]
    if facts and isinstance(facts[-1], StepCompleted):
        view.status, view.reason = "running", ""


def _events_in(data: bytes) -> list[Event]:
    """Return the events of the whole lines; the pieces at both ends are passed over."""
    events = []
    for line in data.splitlines():
        try:
            events.append(event_from_dict(json.loads(line)))
        except (*NOT_FOLDABLE, RecursionError):
            continue
    return events
