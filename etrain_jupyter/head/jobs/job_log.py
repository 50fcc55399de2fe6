"""The coordinator's log of a job: events are durable before listeners receive them.

A disk that rejects writes (full, read-only, failing) does not end a job. Events are then kept in
memory, in order, and written as soon as writes succeed. Until then, no listener receives them, and
no report is acknowledged. The supervisors' outboxes bound the number of these events, since a
supervisor with a full outbox stops reading, and its trainers wait::

    disk          ok     full ───────────────────────────────────── ok
    job log       write  keep in memory ... retry every tick ...    write all, announce, LogLine
    listeners     get    get nothing, and ``trouble``               get all, in order
    supervisors   ack    no ack: outbox fills up, trainers wait     ack, trainers continue

A run folder that is deleted or moved while its job runs is written again. The log and the other
files that readers and new trainers need are kept open, so their contents still exist.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from etrain_jupyter.log import events
from etrain_jupyter.log.compaction import Compactor
from etrain_jupyter.log.event_log import EventLog, LogReader, copy_open_file, is_open_file

logger = logging.getLogger("etrain.coordinator")

RECENT_EVENTS = 20_000
"""Number of events kept in memory for listeners; older events are read from the log."""

MAX_READERS = 8
"""Maximum number of listeners whose read position is cached. Any other listener reads the log from
the start for each batch."""


WRITE_AT_ONCE = 1000
"""Number of waiting events that are written in one call."""

CATCH_UP_S = 0.1
"""Maximum time in seconds for one call to ``retry``, which blocks the scheduler's event loop."""

LOOK_S = 1.0
"""Interval in seconds between checks that the run folder still exists."""

SHOW_S = 60.0
"""Seconds for which ``JobLog.trouble`` reports that the run folder was written again."""


def describe_refusal(error: OSError, folder: Path) -> str:
    """Return why a disk rejected a write in a folder, with the free space."""
    try:
        free = f", {shutil.disk_usage(folder).free:,} bytes free"
    except OSError:
        free = ""
    return f"{error.strerror or error} ({folder}{free})"


def remedy_of(error: OSError) -> str:
    """Return what a user can do about a disk that rejects writes."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free space there, and writing continues"
    return "writing continues as soon as the disk accepts it"


class KeptFile:
    """A file that is kept open, so that it can be written again after it was deleted or moved."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = -1
        self.is_in_place()

    def is_in_place(self) -> bool:
        """Return False if the file was deleted or moved; follow it if it was replaced."""
        if self._file >= 0 and is_open_file(self._file, self.path):
            return True
        try:
            new = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return self._file < 0  # a file that never existed here is not missing
        self.close()
        self._file = new
        return True

    def write_again(self) -> None:
        """Write its contents to a new file at its path."""
        new = copy_open_file(self._file, self.path, size=os.fstat(self._file).st_size)
        self.close()
        self._file = new

    def close(self) -> None:
        """Close the file. May be called twice."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class JobLog:
    """Append events to the durable log, and serve them to listeners.

    Args:
        path: The log.
        files: Other files to write again if the run folder is deleted or moved.
        on_restored: Called after the folder was written again.
    """

    def __init__(
        self,
        path: Path,
        *,
        files: Iterable[Path] = (),
        on_restored: Callable[[], None] = lambda: None,
    ) -> None:
        self._path = path
        self._log = EventLog(path)
        self._compactor = Compactor(path)
        # Readers for old events, by the ``seq`` where their next batch starts.
        self._readers: dict[int, LogReader] = {}
        self._recent: deque[dict[str, Any]] = deque(maxlen=RECENT_EVENTS)
        # Events not yet written to disk, in order; the newest disk error; and when the failure
        # started, on the monotonic clock.
        self._waiting: deque[events.Event] = deque()
        self._refusal: OSError | None = None
        self._refused_at = 0.0
        self._most_waiting = 0
        self._is_closing = self._is_closed = False
        # The newest loss of the run folder, as text, and until when it is reported as trouble.
        self._files = [KeptFile(file) for file in files]
        self._on_restored = on_restored
        self._looked_at = -LOOK_S
        self._loss, self._loss_until = "", 0.0
        self.changed = asyncio.Event()
        """Set when an event is logged, then replaced with a new object."""

    @property
    def last_seq(self) -> int:
        """Sequence number of the newest event that is durable."""
        return self._log.last_seq

    @property
    def next_seq(self) -> int:
        """Sequence number that the next event will have."""
        return self._log.last_seq + len(self._waiting) + 1

    @property
    def is_behind(self) -> bool:
        """True if events are kept in memory because disk writes fail."""
        return bool(self._waiting)

    @property
    def is_reported(self) -> bool:
        """True if listeners may receive everything appended so far."""
        return not self._waiting

    @property
    def is_uploading(self) -> bool:
        """True if events still have to be uploaded."""
        return bool(self._waiting)

    @property
    def trouble(self) -> str:
        """Why events are only in memory, and what to do about it; empty if all are on disk."""
        if self._refusal is None:
            return self._loss if time.monotonic() < self._loss_until else ""
        num, one = len(self._waiting), len(self._waiting) == 1
        kept = f"{num:,} {'event is' if one else 'events are'} kept in memory"
        what = describe_refusal(self._refusal, self._path.parent)
        return f"the log cannot be written: {what}; {kept}; {remedy_of(self._refusal)}"

    def append(self, new: list[events.Event]) -> None:
        """Append events to the durable log first, then make them available to listeners."""
        if not new:
            return
        # A job may still log while shutting down. Another process may have opened the log by then.
        if self._is_closed:
            logger.warning("%s: dropped after the end: %s", self._path, new)
            return
        if self._waiting:  # the order in the log is the order of the calls
            self._waiting.extend(new)
            return
        try:
            self._write(new)
        except OSError as exc:
            self._waiting.extend(new)
            self._refusal, self._refused_at = exc, time.monotonic()
            logger.error("%s", self.trouble)
            self._announce()  # wake the listeners: their replies contain ``trouble``

    def check(self) -> None:
        """Raise an error unless everything appended so far is on the disk.

        Raises:
            OSError: The disk's error.
        """
        if self._refusal is not None:
            code, why = self._refusal.errno, self._refusal.strerror
            raise OSError(code, why, str(self._path))

    def retry(self) -> None:
        """Write events that are only in memory, for at most ``CATCH_UP_S``; restore the folder."""
        now = time.monotonic()
        if now >= self._looked_at + LOOK_S and not self._is_closed:
            self._looked_at = now
            if self._restore():
                self._on_restored()
        if not self._waiting:
            return
        self._most_waiting = max(self._most_waiting, len(self._waiting))
        deadline = time.monotonic() + CATCH_UP_S
        while self._waiting and time.monotonic() < deadline:
            batch = list(itertools.islice(self._waiting, WRITE_AT_ONCE))
            try:
                self._write(batch)
            except OSError as exc:
                self._refusal = exc
                return
            except (TypeError, ValueError):
                # One event is not valid JSON. Write each event separately, so that the invalid one
                # does not block the others.
                for event in batch:
                    try:
                        self._write([event])
                    except (OSError, TypeError, ValueError):
                        logger.exception("%s: an event is lost: %r", self._path, event)
            # Remove the events only after the write: ``next_seq`` and ``is_behind`` count waiting
            # events.
            for _ in batch:
                self._waiting.popleft()
            if not self._waiting:
                self._recover(batch[-1])

    def _restore(self) -> bool:
        """Write the run folder again if it was deleted or moved; return True if it was."""
        files: list[EventLog | KeptFile] = [self._log, *self._files]
        missing = [file for file in files if not file.is_in_place()]
        if not missing:
            return False
        what = f"The run folder {self._path.parent} was deleted or moved"
        try:
            for file in missing:
                file.write_again()
        except OSError as exc:
            self._loss_until = float("inf")
            self._loss = f"{what}, and cannot be written again: {exc.strerror or exc}; retrying"
            logger.error("%s", self._loss)
            self._announce()
            return False
        names = ", ".join(file.path.name for file in missing)
        self._loss_until = time.monotonic() + SHOW_S
        self._loss = f"{what}. Written again: {names}. Checkpoints that were in it are missing"
        logger.error("%s", self._loss)
        if self._recent and not self._is_closing:
            newest = self._recent[-1]
            common: dict[str, Any] = {key: newest[key] for key in ("job_id", "generation")}
            text = f"{self._loss}; the job saves a new one"
            self.append(
                [events.LogLine(**common, time=time.time(), level="warning", worker="", text=text)]
            )
        return True

    def _recover(self, newest: events.Event) -> None:
        refusal, self._refusal = self._refusal, None
        out_s, num = time.monotonic() - self._refused_at, self._most_waiting
        self._most_waiting = 0
        why = (refusal.strerror or str(refusal)) if refusal is not None else ""
        text = (
            f"The log could not be written for {out_s:.0f} s: {why}. {num:,} "
            f"{'event was' if num == 1 else 'events were'} kept in memory and are written now; "
            "none is missing"
        )
        logger.warning("%s: %s", self._path, text)
        common: dict[str, Any] = {"job_id": newest.job_id, "generation": newest.generation}
        line = events.LogLine(**common, time=time.time(), level="warning", worker="", text=text)
        self.append([line])
        if self._is_closing and not self._waiting:
            self._shut()

    def _write(self, new: list[events.Event]) -> None:
        self._recent.extend(event.to_json_dict() for event in self._log.append(new))
        self._announce()
        try:
            self._compactor.look(self._log.last_seq)
        # No thread can be started. Segments only speed up reading, and the next call retries.
        except RuntimeError as exc:
            logger.warning("%s: its segments are not written: %s", self._path, exc)

    def _announce(self) -> None:
        # Wake the listeners. From now on, listeners wait for the next event on a new object.
        self.changed.set()
        self.changed = asyncio.Event()

    def since(self, seq: int, limit: int) -> list[dict[str, Any]]:
        """Return at most ``limit`` events after ``seq``, in order."""
        # ``seq`` counts from 1 without gaps, so the first event's number determines each event's
        # index in the deque.
        if self._recent and seq >= self._recent[0]["seq"] - 1:
            skip = seq - self._recent[0]["seq"] + 1
            return list(itertools.islice(self._recent, skip, skip + limit))
        # Not in memory: either there is nothing newer, or it must be read from the disk.
        if seq >= self._log.last_seq:
            return []
        return [event.to_json_dict() for event in self._read(seq, limit)]

    def _read(self, seq: int, limit: int) -> list[events.Event]:
        # A listener fetches batch after batch, so the reader of its previous batch is at the right
        # line. If it has no reader (a new listener), skip ahead from the start of the log.
        reader = self._readers.pop(seq, None)
        if reader is None:
            reader = LogReader(self._path)
            reader.skip(seq)
        found = reader.read(limit)
        if found:
            self._readers[found[-1].seq] = reader
        while len(self._readers) > MAX_READERS:  # drop the least recently used reader
            del self._readers[next(iter(self._readers))]
        return found

    def close(self) -> None:
        """Close the file once all events are written, after the job has ended."""
        self._is_closing = True
        if not self._waiting:
            self._shut()

    def abandon(self) -> None:
        """Close the file now; events that are only in memory are lost."""
        if self._waiting:
            logger.error("%s: %d events are lost: %s", self._path, len(self._waiting), self.trouble)
        self._waiting.clear()
        self._refusal = None
        self.close()

    def _shut(self) -> None:
        # Also free the memory: from now on, listeners read the events from disk.
        self._is_closed = True
        self._restore()  # otherwise, a reader would never find the end of the job
        is_readable = self._log.is_in_place()
        for kept in self._files:
            kept.close()
        try:
            self._log.close()
        except OSError as exc:
            logger.error("%s: the last second may not survive a crash: %s", self._path, exc)
        # If the folder could not be written again, memory still has the newest events.
        if is_readable:
            self._recent.clear()
