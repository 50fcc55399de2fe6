"""The event list and the markers of the charts, neither of which may grow for ever."""

from __future__ import annotations

from collections import deque
from typing import Any

from etrain_jupyter.log.events import Event
from etrain_jupyter.notebook.dashboard.event_text import Line
from etrain_jupyter.notebook.dashboard.facts import marker_of

MAX_ENTRIES = 120
MAX_ALARMS = 80
"""Warnings and errors have room of their own: no flood of checkpoints drives them out."""
MAX_MARKERS = 300
MAX_CHECKPOINT_MARKERS = 60

_ALARMING = ("warning", "error")


class Entries:
    """The newest sentences about a job, and the newest that warn."""

    def __init__(self) -> None:
        self._num = 0
        self._calm: deque[dict[str, Any]] = deque(maxlen=MAX_ENTRIES)
        self._alarms: deque[dict[str, Any]] = deque(maxlen=MAX_ALARMS)

    def add(self, event: Event, line: Line) -> None:
        """Append what an event says."""
        self._num += 1
        # What no log has, has no number of its own: several such events share ``seq`` 0.
        entry = {"id": self._num, "seq": event.seq, "time": event.time, "kind": event.kind}
        entry |= {"level": line.level, "text": line.text}
        room = self._alarms if line.level in _ALARMING else self._calm
        room.append(entry)

    def amend(self, seq: int, text: str) -> bool:
        """Say something else in the entry of an event; tell whether it is still there."""
        for room in (self._calm, self._alarms):
            for place, entry in enumerate(room):
                if entry["seq"] == seq:
                    # A new one: a snapshot that was taken before shares the entries.
                    room[place] = entry | {"text": text}
                    return True
        return False

    def to_list(self) -> list[dict[str, Any]]:
        """Return the entries, the oldest first."""
        return sorted([*self._calm, *self._alarms], key=lambda entry: entry["id"])


class Markers:
    """What the charts mark, with room of its own for checkpoints."""

    def __init__(self) -> None:
        self._num = 0
        self._others: deque[dict[str, Any]] = deque(maxlen=MAX_MARKERS)
        self._checkpoints: deque[dict[str, Any]] = deque(maxlen=MAX_CHECKPOINT_MARKERS)

    def add(self, event: Event, kind: str, step: int, text: str) -> None:
        """Mark an event at a step."""
        self._num += 1
        room = self._checkpoints if kind == "checkpoint" else self._others
        room.append({"id": self._num, **marker_of(event, kind, step, text)})

    def to_list(self) -> list[dict[str, Any]]:
        """Return the markers in the order of their events."""
        return sorted([*self._others, *self._checkpoints], key=lambda marker: marker["id"])
