"""The latest values of a job, the history of its steps in columns, and its workers' times.

Steps in blocks are folded by column, so a million steps take milliseconds. One thread adds events
while any other thread may read, so a lock protects the values.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from os import SEEK_END
from pathlib import Path
from typing import Any, BinaryIO, Self

from etrain_jupyter.log.blocks import StepRun, runs_of
from etrain_jupyter.log.columns import STEP_COLUMNS, History
from etrain_jupyter.log.events import (
    EvalCompleted,
    EvalScored,
    Event,
    ExhibitStored,
    JobRestored,
    JobStatusChanged,
    RankTimed,
    StepCompleted,
    event_from_dict,
)
from etrain_jupyter.log.job_record import JobRecord
from etrain_jupyter.untrusted import open_regular

__all__ = ["STEP_COLUMNS", "History", "LatestValues", "peek_log"]

NOT_FOLDABLE = (ValueError, KeyError, TypeError, AttributeError, ArithmeticError)
"""Exceptions raised by events with invalid values, since a log may come from another user."""
PEEK_BYTES = 64 * 1024
PEEK_MAX_BYTES = 4 * 1024 * 1024
"""Maximum number of bytes to search at the end of a log for a step or a status."""
PARTS = ("data_s", "compute_s", "communication_s", "optimizer_s")
APART = ("evaluation_s", "checkpoint_s")
WITHIN = ("wait_s", "metrics_s")
"""Parts of ``communication_s`` and ``compute_s``."""


class LatestValues(JobRecord):
    """A job's record and the history of its steps. One thread adds events; any thread may read."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._history = History()

    def add(self, events: Iterable[Event]) -> None:
        """Fold the next events of the log."""
        with self._lock:
            self.apply_all(events)

    def columns(self) -> dict[str, list[Any]]:
        """Return the history; see ``History.columns``."""
        with self._lock:
            return self._history.columns()

    def list_exhibits(self) -> list[ExhibitStored]:
        """Return the stored figures, texts and tables of the evaluations."""
        with self._lock:
            return [event for named in self.exhibits.values() for event in named.values()]

    def apply(self, event: Event) -> Self:
        """Add the next event of the log to the record and to the history."""
        match event:
            case StepCompleted():
                self._history.add_step(event)
            case EvalCompleted() | EvalScored():
                self._history.add_eval(event)
            case JobRestored():
                self._history.rewind_to(event.step)
        return super().apply(event)

    def apply_run(self, run: StepRun) -> Self:
        """Add a run of steps to the record and, column by column, to the history."""
        self._history.add_run(run)
        return super().apply_run(run)


def peek_log(path: Path) -> LatestValues:
    """Return a job's latest values after reading only the beginning and the end of its log.

    The events in between are not read, so a list of a hundred jobs costs a hundred short reads. A
    step near the end shows that the job was running, and how many workers it had.
    """
    # The parts of a long log that are read:
    #   |-- 64 kB --|           not read           |-- 64 kB, 256 kB, 1 MB or 4 MB --|
    #   submitted, planned (total steps)            the newest step or status
    view = LatestValues()
    try:
        with open_regular(path) as file:
            view.add(_events_in(file.read(PEEK_BYTES)))
            _add_tail(view, _tail_of(file))
    except (OSError, *NOT_FOLDABLE):
        pass
    return view


def _tail_of(file: BinaryIO) -> list[Event]:
    """Return the last events, enough to include a step or a status."""
    size = file.seek(0, SEEK_END)
    length = PEEK_BYTES
    while True:
        # The first PEEK_BYTES have been read already. A short log has nothing after them.
        start = max(PEEK_BYTES, size - length)
        file.seek(start)
        events = _events_in(file.read())
        shown = [e for e in events if isinstance(e, StepCompleted | JobStatusChanged)]
        if shown or start == PEEK_BYTES or length >= PEEK_MAX_BYTES:
            return events
        # Workers may have printed a lot since the last step, so search further back.
        length *= 4


def _add_tail(view: LatestValues, events: list[Event]) -> None:
    view.add(events)
    shown = [e for e in events if isinstance(e, StepCompleted | JobStatusChanged)]
    if shown and isinstance(shown[-1], StepCompleted):
        # A step after the last status proves that the job is running, even if an earlier status has
        # not been read.
        view.status, view.reason = "running", ""


def _events_in(data: bytes) -> list[Event]:
    # The first and last lines of a part are usually incomplete. Skip them, as well as lines written
    # by a newer version or another author.
    events = []
    for line in data.splitlines():
        try:
            events.append(event_from_dict(json.loads(line)))
        except (*NOT_FOLDABLE, RecursionError):
            continue
    return events


@dataclass
class _Spent:
    """Totals for one worker."""

    rank: int = 0
    num_steps: int = 0
    samples: int = 0
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("elapsed_s", *PARTS, *APART, *WITHIN), 0.0)
    )

    def add(self, event: RankTimed) -> None:
        self.rank = event.rank
        self.num_steps += event.num_steps
        self.samples += event.samples
        for name in self.seconds:
            spent = getattr(event, name)
            self.seconds[name] += math.nan if spent is None else spent

    @property
    def samples_per_s(self) -> float:
        return _rate(self.samples, self.seconds["elapsed_s"])

    @property
    def own_samples_per_s(self) -> float:
        # The rate if the worker never waited for others.
        return _rate(self.samples, self.seconds["elapsed_s"] - self.seconds["communication_s"])


def phases_of(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Return one record per worker, in the order in which the workers first appear.

    A worker's efficiency is the ratio of its samples per second to those of a single worker. The
    single-worker rate is measured while the job has one worker. If that never happens, it is
    estimated from the worker's own times without communication.

    Each record has ``worker``, ``rank`` (the newest), ``num_steps``, ``samples`` (those that this
    worker trained on), ``samples_per_s``, ``efficiency`` (1.0 is that of a single worker) and times
    in seconds: ``elapsed_s`` of all its steps, with its parts ``data_s``, ``compute_s``,
    ``communication_s`` and ``optimizer_s``, and separately ``evaluation_s`` and ``checkpoint_s``.
    ``wait_s`` is the part of ``communication_s`` in which the worker waited for a slower one, and
    ``metrics_s`` the part of ``compute_s`` in the cell's metrics; NaN on a GPU.
    """
    workers: dict[str, _Spent] = {}
    alone = _Spent()  # total of the times with a single worker, whichever it was
    for event in runs_of(events):  # steps arrive as runs and are skipped
        if isinstance(event, RankTimed):
            workers.setdefault(event.worker, _Spent()).add(event)
            if event.world_size == 1:
                alone.add(event)
    return [
        {
            "worker": worker,
            "rank": spent.rank,
            "num_steps": spent.num_steps,
            "samples": spent.samples,
            "samples_per_s": spent.samples_per_s,
            "efficiency": _rate(
                spent.samples_per_s, alone.samples_per_s or spent.own_samples_per_s
            ),
            **spent.seconds,
        }
        for worker, spent in workers.items()
    ]


def _rate(amount: float, by: float) -> float:
    return amount / by if by > 0 else 0.0
