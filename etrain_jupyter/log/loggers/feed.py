"""Pass a job's log to a logger, once or while the log grows.

The log is always read from its beginning. Records that the destination already has are skipped, so
a feed needs no state of its own: after any failure, another one continues.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from etrain_jupyter.errors import LoggerError
from etrain_jupyter.log.event_log import LogReader
from etrain_jupyter.log.events import (
    Event,
    JobResumed,
    JobStatus,
    JobStatusChanged,
    JobSubmitted,
)
from etrain_jupyter.log.exhibits import load_stored
from etrain_jupyter.log.loggers.base import Logger, Record, RunInfo, is_final
from etrain_jupyter.log.loggers.timeline import ReadExhibit, Rewind, Timeline, find_rewinds
from etrain_jupyter.untrusted import check_job_id

POLL_S = 1.0
"""Interval in seconds for reading new events."""
LINGER_S = 2.0
"""Seconds to keep reading after the job has ended, for late messages from its workers."""
_READ_EVENTS = 5_000
_MAX_RECORDS = 200
"""Maximum number of records per call of ``Logger.write``."""


class LogFeed:
    """Write a log to a logger.

    Args:
        log_path: The log.
        logger: The logger, not yet open.
        read_exhibit: Reads exhibits; by default from the folder of the log.
    """

    def __init__(
        self, log_path: Path, logger: Logger, read_exhibit: ReadExhibit | None = None
    ) -> None:
        self._path, self._logger = log_path, logger
        self._read_exhibit = read_exhibit or functools.partial(load_stored, log_path.parent)
        self._reader: LogReader | None = None
        self._timeline: Timeline | None = None
        self._num_stored = 0
        self.status: JobStatus | None = None
        """The newest status in the log, even if the logger cannot be opened; None if there is
        none."""

    def catch_up(self) -> int:
        """Write the records of all new events; return the number of new events."""
        num_events = 0
        while events := self._read():
            num_events += len(events)
            if not self._write(events):
                self._reader = None  # write the next revision from the beginning
        return num_events

    def close(self) -> None:
        """End the run with the newest status of the job, or leave it open if it has not ended."""
        if self._reader is not None:
            self._logger.close(self.status if is_final(self.status) else None)

    def discard(self) -> None:
        """Release the logger after a failure; another feed may then continue its run."""
        # The failure has been reported, and the destination may still fail.
        with contextlib.suppress(Exception):
            self._logger.close(None)

    def _read(self) -> list[Event]:
        if self._reader is None and not self._open():
            return []
        assert self._reader is not None
        return self._reader.read(_READ_EVENTS)

    def _open(self) -> bool:
        """Open the run at the revision of the log; return False if the log has no events."""
        run: RunInfo | None = None

        def survey() -> Iterator[Event]:
            nonlocal run
            reader = LogReader(self._path)
            while events := reader.read(_READ_EVENTS):
                for event in events:
                    run = _described_by(event, run)
                    self._take_status(event)
                    yield event

        rewinds = find_rewinds(survey())
        if run is None:
            return False
        self._num_stored = self._logger.open(dataclasses.replace(run, revision=len(rewinds)))
        self._timeline = Timeline(self._read_exhibit, rewinds)
        self._reader = LogReader(self._path)
        return True

    def _write(self, events: list[Event]) -> bool:
        """Write events; return False if the logger could not drop undone records."""
        assert self._timeline is not None
        records: list[Record] = []
        for event in events:
            self._take_status(event)
            for item in self._timeline.fold(event):
                if isinstance(item, Rewind):
                    # Some records before the rewind may remain, so write all of them first.
                    self._flush(records)
                    if not self._logger.drop_after(item.step, item.time):
                        return False
                elif item.number >= self._num_stored:
                    records.append(item)
                    if len(records) >= _MAX_RECORDS:
                        self._flush(records)
        self._flush(records)
        return True

    def _take_status(self, event: Event) -> None:
        if isinstance(event, JobStatusChanged):
            self.status = event.status

    def _flush(self, records: list[Record]) -> None:
        if records:
            self._logger.write(list(records))
            records.clear()


def export_log(
    log_path: Path, logger: Logger, read_exhibit: ReadExhibit | None = None
) -> JobStatus | None:
    """Write a log in its current state; return the job's status."""
    feed = LogFeed(log_path, logger, read_exhibit)
    try:
        feed.catch_up()
        feed.close()
    except BaseException:
        feed.discard()
        raise
    return feed.status


def follow_log(
    feed: LogFeed,
    is_wanted: Callable[[], bool],
    *,
    poll_s: float = POLL_S,
    linger_s: float = LINGER_S,
) -> None:
    """Write a log as it grows, until the job ends or ``is_wanted`` returns False."""
    ends_at = float("inf")
    while True:
        # Decide before reading, so that events written just before the end are not missed.
        is_last = not is_wanted() or time.monotonic() > ends_at
        # A job that has ended may be resumed while this loop lingers.
        if feed.catch_up():
            ends_at = time.monotonic() + linger_s if is_final(feed.status) else float("inf")
        if is_last:
            break
        time.sleep(poll_s)
    feed.close()


def _described_by(event: Event, run: RunInfo | None) -> RunInfo | None:
    if run is None:
        if not isinstance(event, JobSubmitted):
            return None  # the log is damaged
        try:
            # Loggers use the id in paths and queries, and another user may have written the log.
            check_job_id(event.job_id)
        except ValueError as exc:
            raise LoggerError(f"The log cannot be written to a logger: {exc}.") from exc
        return RunInfo(
            job_id=event.job_id, name=event.name, created=event.time, config=event.config
        )
    if isinstance(event, JobResumed) and event.config:
        return dataclasses.replace(run, config=event.config)
    return run


LOCK_EVERY_S = 0.1
"""Interval in seconds between two attempts to lock."""
_OTHER_CHARACTERS = re.compile(r"[^\w.-]")


@contextlib.contextmanager
def writer_lock(log_path: Path, name: str, is_wanted: Callable[[], bool]) -> Iterator[bool]:
    """Hold the lock of a logger, which prevents values from being written twice.

    Two processes overlap where a job changes hands::

        scheduler's logger   follows the job ──── lingers after its end ── unlocks
        %etrain track                             waits ────────────────── locks, writes the rest

    Args:
        log_path: The log. The lock file is created next to it.
        name: Name of the logger.
        is_wanted: Returns False to end the wait for the current holder.

    Yields:
        False if the wait ended before the lock was free.
    """
    path = log_path.with_name(f".logger-{_OTHER_CHARACTERS.sub('_', name)}.lock")
    try:
        # Another user may own the folder, so do not follow a link.
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError:
        # The folder is another user's and read-only, so no scheduler of this user writes that job.
        yield True
        return
    try:
        yield _lock(fd, is_wanted)
    finally:
        os.close(fd)


def _lock(fd: int, is_wanted: Callable[[], bool]) -> bool:
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if not is_wanted():
                return False
            time.sleep(LOCK_EVERY_S)
