"""The event list and the markers of the charts, each with a limit."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from etrain_jupyter.log.events import Event
from etrain_jupyter.notebook.dashboard.event_text import Line
from etrain_jupyter.notebook.dashboard.snapshot import EventLine, Marker

MAX_ENTRIES = 120
MAX_ALARMS = 80
"""Warnings and errors have a separate limit, so that many other events do not displace them."""
MAX_MARKERS = 300
MAX_CHECKPOINT_MARKERS = 60

_ALARMING = ("warning", "error")


class Entries:
    """The newest entries of the event list."""

    def __init__(self) -> None:
        self._num = 0
        # Two bounded queues, which are merged by id when they are shown.
        self._calm: deque[EventLine] = deque(maxlen=MAX_ENTRIES)
        self._alarms: deque[EventLine] = deque(maxlen=MAX_ALARMS)

    def add(self, event: Event, line: Line) -> None:
        """Append the line of an event."""
        # Events that are not in the log have no number: several of them share ``seq`` 0.
        self._num += 1
        entry = EventLine(
            id=self._num,
            seq=event.seq,
            time=event.time,
            kind=event.kind,
            level=line.level,
            text=line.text,
        )
        entries = self._alarms if line.level in _ALARMING else self._calm
        entries.append(entry)

    def amend(self, seq: int, text: str) -> bool:
        """Replace the text of an event's entry; return whether the entry is still in the list."""
        # The limit may have dropped the entry since the event arrived.
        for entries in (self._calm, self._alarms):
            for index, entry in enumerate(entries):
                if entry.seq == seq:
                    entries[index] = replace(entry, text=text)
                    return True
        return False

    def to_tuple(self) -> tuple[EventLine, ...]:
        """Return the entries, oldest first."""
        # Sort by id, not by seq, which is 0 for events outside the log.
        return tuple(sorted([*self._calm, *self._alarms], key=lambda entry: entry.id))


class Markers:
    """The newest markers of the charts, with a separate limit for checkpoints."""

    def __init__(self) -> None:
        self._num = 0
        self._others: deque[Marker] = deque(maxlen=MAX_MARKERS)
        self._checkpoints: deque[Marker] = deque(maxlen=MAX_CHECKPOINT_MARKERS)

    def add(self, event: Event, kind: str, step: int, text: str) -> None:
        """Mark an event at a step."""
        self._num += 1
        marker = Marker(
            id=self._num, seq=event.seq, step=step, time=event.time, kind=kind, text=text
        )
        markers = self._checkpoints if kind == "checkpoint" else self._others
        markers.append(marker)

    def to_tuple(self) -> tuple[Marker, ...]:
        """Return the markers, ordered by their events."""
        return tuple(sorted([*self._others, *self._checkpoints], key=lambda marker: marker.id))
