"""A job's log in the coordinator: durable first, then for whoever listens."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from pathlib import Path
from typing import Any

from etrain_jupyter.events import types as events
from etrain_jupyter.events.log import EventLog, read_events

RECENT_EVENTS = 20_000
"""Events kept in memory for listeners; older ones are read from the log."""


class JobLog:
    """Appends facts to the durable log and serves them to listeners."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._log = EventLog(path)
        self._recent: deque[dict[str, Any]] = deque(maxlen=RECENT_EVENTS)
        self.changed = asyncio.Event()
        """Set whenever an event was logged; then another one takes its place."""

    @property
    def last_seq(self) -> int:
        """Sequence number of the newest event."""
        return self._log.last_seq

    def append(self, facts: list[events.Event]) -> None:
        """Append facts to the durable log first, then let listeners have them."""
        if not facts:
            return
        self._recent.extend(event.to_dict() for event in self._log.append(facts))
        self.changed.set()
        self.changed = asyncio.Event()

    def since(self, seq: int, limit: int) -> list[dict[str, Any]]:
        """Return at most ``limit`` events after ``seq``, in order."""
        if self._recent and seq >= self._recent[0]["seq"] - 1:
            skip = seq - self._recent[0]["seq"] + 1
            return list(itertools.islice(self._recent, skip, skip + limit))
        return [event.to_dict() for event in read_events(self._path, since=seq, limit=limit)]

    def close(self) -> None:
        """Close the file; the job has ended."""
        self._log.close()
