"""A job's log in the coordinator: durable first, then for whoever listens."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from pathlib import Path
from typing import Any

from etrain_jupyter.events import types as events
from etrain_jupyter.events.compaction import Compactor
from etrain_jupyter.events.log import EventLog, LogReader

RECENT_EVENTS = 20_000
"""Events kept in memory for listeners; older ones are read from the log."""

MAX_READERS = 8
"""Listeners that may read old events at the same time without each piece costing the whole log."""


class JobLog:
    """Appends facts to the durable log and serves them to listeners."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._log = EventLog(path)
        self._compactor = Compactor(path)
        self._readers: dict[int, LogReader] = {}
        """Listeners that read old events in pieces go on where the last piece ended."""
        self._recent: deque[dict[str, Any]] = deque(maxlen=RECENT_EVENTS)
        self.changed = asyncio.Event()
        """Set whenever an event was logged; then another one takes its place."""

    @property
    def last_seq(self) -> int:
        """Sequence number of the newest event."""
        return self._log.last_seq

    @property
    def is_told(self) -> bool:
        """Whether everything that was appended may be told."""
        return True

    @property
    def is_uploading(self) -> bool:
        """Whether there is another place that does not have everything yet, and may get it."""
        return False

    def append(self, facts: list[events.Event]) -> None:
        """Append facts to the durable log first, then let listeners have them."""
        if not facts:
            return
        self._recent.extend(event.to_dict() for event in self._log.append(facts))
        self._announce()
        self._compactor.look(self._log.last_seq)

    def _announce(self) -> None:
        """Wake who waits for news."""
        self.changed.set()
        self.changed = asyncio.Event()

    def since(self, seq: int, limit: int) -> list[dict[str, Any]]:
        """Return at most ``limit`` events after ``seq``, in order."""
        if self._recent and seq >= self._recent[0]["seq"] - 1:
            skip = seq - self._recent[0]["seq"] + 1
            return list(itertools.islice(self._recent, skip, skip + limit))
        return [event.to_dict() for event in self._read(seq, limit)]

    def _read(self, seq: int, limit: int) -> list[events.Event]:
        """Return events that are on the disk only."""
        reader = self._readers.pop(seq, None)
        if reader is None:
            reader = LogReader(self._path)
            reader.skip(seq)
        found = reader.read(limit)
        if found:
            self._readers[found[-1].seq] = reader
        while len(self._readers) > MAX_READERS:
            del self._readers[next(iter(self._readers))]
        return found

    def close(self) -> None:
        """Close the file; the job has ended."""
        self._log.close()
