"""The events of a job that its feed knows, and the listeners that receive them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from etrain_jupyter.log.blocks import Events, runs_of
from etrain_jupyter.log.events import TERMINAL_STATUSES, Event, JobStatus, JobStatusChanged

Listener = Callable[[Sequence[Event]], None]
"""Receives events in order. A long history arrives as ``Events``; iterate it with ``runs_of``."""

KEEP_LINES = 50_000
"""Number of log lines whose texts stay in memory; older texts are only in the log."""


class KnownEvents:
    """Collect the events of one job, and pass each to all listeners once, in order.

    Only the feed's thread changes it.

    Args:
        job_id: The job.
        fold: Called first with every batch, before the listeners.

    Attributes:
        events: All known events of the log.
        is_terminal: True once the job has ended.
        num_errors: Number of listener calls that raised; they are not retried.
    """

    def __init__(self, job_id: str, fold: Listener) -> None:
        self.events = Events()
        self.is_terminal = False
        self.num_errors = 0
        self.last_error: Exception | None = None
        self._job_id, self._fold = job_id, fold
        self._listeners: list[Listener] = []
        self._status: JobStatusChanged | None = None
        self._unlogged: list[Event] = []

    @property
    def last_seq(self) -> int:
        """Sequence number of the newest event; 0 if there is none."""
        return self.events[-1].seq if self.events else 0

    def add_listener(self, listener: Listener) -> None:
        """Call ``listener`` with the history now, and with each batch from now on."""
        self._listeners.append(listener)
        known = self.events.copy()
        # Events that are not logged are not part of the history, but describe the current state.
        known.extend(self._unlogged)
        self._notify(listener, known)

    def take(self, events: Sequence[Event]) -> Sequence[Event]:
        """Append the events that continue the known ones, notify all listeners, and return them."""
        # The log and the responses overlap, since both start after the newest known event. Sequence
        # numbers ensure that each event is counted once, regardless of which source delivers it
        # first.
        fresh = self._select_next(events)
        if not fresh:
            return fresh
        self.events.extend(fresh)
        self.events.forget_lines(KEEP_LINES)
        self._fold(fresh)
        for event in runs_of(fresh):
            if isinstance(event, JobStatusChanged):
                self._status = event
        self.is_terminal |= self._status is not None and self._status.status in TERMINAL_STATUSES
        for listener in self._listeners:
            self._notify(listener, fresh)
        return fresh

    def send_status(self, trouble: str) -> None:
        """Send the last known status; its reason is ``trouble`` unless that is empty."""
        known = self._status
        reason = trouble or (known.reason if known else "")
        self._send_unlogged(known.status if known else "submitted", reason, time.time())

    def send_end(self, why: str) -> None:
        """Send a final event in place of the coordinator's."""
        at = self.events[-1].time if self.events else time.time()
        self._send_unlogged("failed", why, at)

    def forget_unlogged(self) -> None:
        """Do not send later listeners the last event that is in no log."""
        self._unlogged = []

    def _send_unlogged(self, status: JobStatus, reason: str, at: float) -> None:
        """Send an event with ``seq`` 0, which is in no log, to the listeners now and later."""
        generation = self.events[-1].generation if self.events else 0
        self._unlogged = [
            JobStatusChanged(
                job_id=self._job_id, time=at, generation=generation, status=status, reason=reason
            )
        ]
        for listener in self._listeners:
            self._notify(listener, self._unlogged)

    def _select_next(self, events: Sequence[Event]) -> Sequence[Event]:
        """Return the events that are new, up to the first gap."""
        # A whole log stays packed in blocks, because a million steps as objects would take 1 GB.
        if not self.events and isinstance(events, Events) and events.is_dense_from(1):
            return events
        fresh: list[Event] = []
        wanted = self.last_seq + 1
        for event in events:
            if event.seq == wanted:
                fresh.append(event)
                wanted += 1
        return fresh

    def _notify(self, listener: Listener, events: Sequence[Event]) -> None:
        try:
            # Each listener receives its own copy, which it may keep, read in another thread or
            # change.
            listener(events.copy() if isinstance(events, Events) else list(events))
        except Exception as exc:  # A failing listener must not stop other listeners or the job.
            self.num_errors += 1
            self.last_error = exc
