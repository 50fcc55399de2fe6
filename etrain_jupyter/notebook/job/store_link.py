"""Follow a job whose cluster is unreachable from here, by polling its log in the run store.

The only supported request returns new events, for which the log is read every ``POLL_S``. In a
bucket, ``alive.json`` shows whether the coordinator is alive. For a job in a folder, this is
unknown, so the job is followed until its log contains its end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar, cast

from etrain_jupyter.errors import RunStoreError
from etrain_jupyter.log.event_log import LogReader
from etrain_jupyter.notebook.job.job_record import RunRecord
from etrain_jupyter.notebook.job.link import ClusterEndedError, UnreachableError
from etrain_jupyter.storage.bucket_log.chain import Chain
from etrain_jupyter.storage.bucket_log.local_copy import LogCopy
from etrain_jupyter.storage.bucket_log.mirror import SILENT_S
from etrain_jupyter.storage.bucket_log.objects import RunObjects
from etrain_jupyter.storage.bucket_log.uploads import ALIVE
from etrain_jupyter.wire.requests import EventBatch, FetchEvents, R, Request

T = TypeVar("T")

POLL_S = 1.5
HEARTBEAT_CHECK_S = 5.0
"""Interval between checks of the coordinator's heartbeat while no events arrive, in seconds."""


class StoreLink:
    """Connection to a job's log where its cluster is unreachable; see ``link.JobLink``."""

    def __init__(self, record: RunRecord, *, why: str = "") -> None:
        self.why = why
        self._record = record
        self._objects = RunObjects(record.place) if record.place else None
        self._copy = LogCopy(Chain(self._objects), record.log_path) if self._objects else None
        self._reader: tuple[int, LogReader] | None = None
        self._heartbeat_seen_at = 0.0
        self._is_released = threading.Event()
        self._executor: ThreadPoolExecutor | None = None

    def call(self, request: Request[R], *, timeout: float = 10.0) -> R:
        """Answer a request from the log; refuse requests that need the cluster."""
        return self.send(request, timeout=timeout).result(timeout)

    def send(self, request: Request[R], *, timeout: float = 10.0) -> Future[R]:
        """Start a request in the thread ``etrain-store-<job>``, and return its future."""
        if not isinstance(request, FetchEvents):
            refused: Future[R] = Future()
            where = self._record.host or "the machine of its cluster"
            refused.set_exception(
                UnreachableError(
                    f"job {self._record.job_id} takes no commands from here, so nothing was done: "
                    + (self.why or f"type the command on {where}.")
                )
            )
            return refused
        # A link may be used again after it was released.
        self._is_released.clear()
        if self._executor is None:
            name = f"etrain-store-{self._record.job_id}"
            self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)
        batch = self._executor.submit(self._poll, request.since, request.wait_s, request.limit)
        return cast("Future[R]", batch)

    def release(self) -> None:
        """End the thread; a later request starts a new one."""
        # Ends a running poll within its current pause, instead of after `wait_s`.
        self._is_released.set()
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=False, cancel_futures=True)

    def _poll(self, since: int, wait_s: float, limit: int) -> EventBatch:
        deadline = time.monotonic() + wait_s
        while True:
            if self._copy is not None:
                self._copy.refresh()
            events = self._read(since, limit)
            if not events:
                self._check_heartbeat(since)
            left = deadline - time.monotonic()
            if events or left <= 0 or self._is_released.wait(min(POLL_S, left)):
                return EventBatch(events=tuple(events))

    def _read(self, since: int, limit: int) -> list[dict[str, Any]]:
        # Keep the reader between polls, so that each poll parses only the new lines.
        if self._reader is None or self._reader[0] != since:
            reader = LogReader(self._record.log_path)
            # The copy may be shorter than the feed's history, for example if it was damaged and
            # fetched again. In that case, there are no newer events to return.
            if self._lines(lambda: reader.skip(since)) < since:
                return []
            self._reader = (since, reader)
        reader = self._reader[1]
        found = self._lines(lambda: reader.read(limit))
        if found:
            self._reader = (found[-1].seq, self._reader[1])
        return [event.to_json_dict() for event in found]

    def _lines(self, read: Callable[[], T]) -> T:
        # The job is unreachable rather than lost, because the disk or the network folder may come
        # back.
        try:
            return read()
        except OSError as exc:
            raise UnreachableError(
                f"the log of job {self._record.job_id} cannot be read "
                f"({exc.strerror or exc}: {self._record.log_path})"
            ) from exc

    def _check_heartbeat(self, since: int) -> None:
        """Raise ``ClusterEndedError`` if the coordinator has sent no heartbeat for ``SILENT_S``."""
        # Only called while the log brings no new events:
        #   alive.json younger than 45 s       alive (written every 5 s): keep polling
        #   older, names an event after here   it ended, but the rest of its log is still to come
        #   older, names no newer event        it has ended
        #   missing, job younger than 45 s     it is starting
        #   missing, job older                 it never started
        # A coordinator that is only cut off from the bucket is fenced by the next writer.
        if self._objects is None or time.monotonic() - self._heartbeat_seen_at < HEARTBEAT_CHECK_S:
            return
        found = self._objects.get_aged(ALIVE)
        heartbeat, age_s = found or ({}, time.time() - self._record.created)
        if age_s <= SILENT_S or heartbeat.get("seq", 0) > since:
            self._heartbeat_seen_at = time.monotonic()
            return
        if found is None:
            raise ClusterEndedError("no coordinator has started it")
        host = heartbeat.get("host", self._record.host)
        raise ClusterEndedError(
            f"its coordinator on {host} has sent no heartbeat for {age_s:.0f} s. Its committed "
            f"steps are in {self._record.place}. %etrain resume continues from there"
        )


def refresh_log(record: RunRecord) -> None:
    """Update this machine's copy of a job's log; a job in a folder has no copy.

    Raises:
        RunStoreError: If the bucket cannot be read, or its log is damaged.
    """
    if record.place:
        LogCopy(Chain(RunObjects(record.place)), record.log_path).refresh()


def try_refresh_log(record: RunRecord) -> str:
    """Update the copy of a job's log; return the error message, or an empty string."""
    try:
        refresh_log(record)
    except (RunStoreError, OSError) as exc:  # OSError: from the disk with this machine's copy
        return str(exc)
    return ""
