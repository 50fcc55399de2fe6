"""The latest values of a job, and the history of its steps in columns.

Steps in blocks are folded by column, so a million steps take milliseconds. One thread adds events
while any other thread may read, so a lock protects the values.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from os import SEEK_END
from pathlib import Path
from typing import Any, BinaryIO, Self

from etrain_jupyter.log.blocks import StepRun
from etrain_jupyter.log.columns import STEP_COLUMNS, History
from etrain_jupyter.log.events import (
    EvalCompleted,
    EvalScored,
    Event,
    ExhibitStored,
    JobRestored,
    JobStatusChanged,
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
