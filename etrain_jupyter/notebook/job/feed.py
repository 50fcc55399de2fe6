"""Follow the events of one job, in order, without gaps or duplicates.

The thread ``etrain-feed-<job_id>`` reads the log in the run folder, then requests newer events from
the coordinator by long polling. Responses and new listeners all go through one inbox. Each listener
therefore first receives the whole history and then each batch once, always from this thread. The
thread ends when the log ends, or when the cluster is known to have ended. While the cluster may
still be alive, the thread keeps retrying.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from pathlib import Path

from etrain_jupyter.errors import EtrainError
from etrain_jupyter.log.blocks import Events
from etrain_jupyter.log.events import Event, event_from_dict
from etrain_jupyter.log.segments import read_log
from etrain_jupyter.notebook.job.contact import Contact
from etrain_jupyter.notebook.job.known_events import KnownEvents, Listener
from etrain_jupyter.notebook.job.link import JobLink
from etrain_jupyter.wire.requests import EventBatch, FetchEvents

POLL_S = 10.0
"""Timeout of a long poll at the coordinator, in seconds."""
BATCH = 5_000
"""Maximum number of events in one response."""
TROUBLE_EVERY_S = 60.0
"""Interval between status updates while the coordinator cannot write the log, in seconds."""
LINGER_S = 2.0
"""Seconds after the job's end during which late output of its workers is still collected."""
AFTERWARDS_S = 0.3
"""Interval between polls after the end of the job, in seconds."""


@dataclass
class _Newcomer:
    """A listener that has not received the history yet."""

    listener: Listener
    has_history: threading.Event = field(default_factory=threading.Event)


class EventFeed:
    """The events of one job.

    Args:
        job_id: The job.
        log_path: Its durable log; used if this machine can read it.
        link: Connection to its cluster; None if the cluster has ended.
        fold: Called first with every batch, before the listeners.
        refresh: Updates ``log_path`` if it is a copy; called before it is read.
        is_copy: True if ``log_path`` is a copy, which may lack events that the coordinator sends.

    Attributes:
        caught_up: Set once all events from before the start of the feed are folded. If the
            coordinator cannot be reached, set once the available events are folded.
        ended: Set once the job is terminal or lost.
        is_reading: True while the log on this machine is read and its events are folded.
        lost: Why the job counts as lost; empty otherwise.
    """

    def __init__(
        self,
        job_id: str,
        log_path: Path,
        link: JobLink | None,
        fold: Listener,
        *,
        refresh: Callable[[], object] = lambda: None,
        is_copy: bool = False,
    ) -> None:
        self.job_id = job_id
        self.caught_up = threading.Event()
        self.ended = threading.Event()
        self.is_reading = False
        self._responded = threading.Event()
        """Set after a response, after an outage was reported, or after a wait has timed out."""
        self.lost = ""
        self._log_path, self._link = log_path, link
        self._refresh, self._is_copy = refresh, is_copy
        self._known = KnownEvents(job_id, fold)
        self._inbox: queue.Queue[_Newcomer | Future[EventBatch] | None] = queue.Queue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_over = self._is_requesting = False
        self._request_at = self._linger_until = 0.0
        self._log_size = -1
        self._contact = Contact()
        self._log_trouble = ""
        self._trouble_sent_at = 0.0

    @property
    def trouble(self) -> str:
        """Why the coordinator cannot be reached at the moment; empty while it responds."""
        return self._contact.trouble

    @property
    def log_trouble(self) -> str:
        """Why the coordinator cannot write the job's log at the moment; empty while it can."""
        return "" if self.ended.is_set() else self._log_trouble

    def start(self) -> None:
        """Start following the job; further calls have no effect."""
        with self._lock:
            # After the end, only `subscribe` starts a thread, to pass on the history.
            if self._thread is None and not self._is_over:
                self._start_thread()

    def close(self) -> None:
        """Stop following. The job continues, and the events received so far are kept."""
        with self._lock:
            if self._thread is not None:
                self._inbox.put(None)

    def subscribe(self, listener: Listener) -> threading.Event:
        """Call ``listener`` from the feed's thread, with the history and then with each batch.

        Returns:
            An event that is set once the listener has received the history.
        """
        newcomer = _Newcomer(listener)
        # The thread holds the same lock while it finds its inbox empty and ends. Without it, the
        # thread could end between these two lines, and the listener would wait forever:
        #   here: put   thread: inbox was empty   thread: ends   here: a thread exists, start none
        with self._lock:
            self._inbox.put(newcomer)
            if self._thread is None:
                self._start_thread()
        return newcomer.has_history

    def wait_until_caught_up(self, timeout: float) -> bool:
        """Wait until earlier events are folded; returns immediately if called from a listener."""
        if threading.current_thread() is self._thread:
            return self.caught_up.is_set()
        return self.caught_up.wait(timeout)

    def wait_until_responded(self, timeout: float, *, is_last: bool = True) -> None:
        """Wait for the coordinator's first response, which includes whether it can write the log.

        Args:
            timeout: Timeout in seconds.
            is_last: True if later calls must not wait again.
        """
        # A listener runs in the feed's thread, so the thread would wait for itself.
        if threading.current_thread() is not self._thread and not self.ended.is_set():
            self._responded.wait(timeout)
            # Set it even after a timeout, so that a slow scheduler does not delay every call in a
            # cell.
            if is_last:
                self._responded.set()

    def events(self) -> Events:
        """Return all events received so far."""
        return self._known.events.copy()

    def _start_thread(self) -> None:
        name = f"etrain-feed-{self.job_id}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except Exception as exc:
            # A bug in the feed must not block other threads forever.
            self._is_over = True
            self.lost = f"following job {self.job_id} failed: {type(exc).__name__}: {exc}"
            self._known.send_end(self.lost)
            self.caught_up.set()
            self.ended.set()
            self._responded.set()
            self._serve_the_rest()

    def _serve_the_rest(self) -> None:
        while True:
            with self._lock:
                if self._inbox.empty():
                    self._thread = None
                    return
            message = self._inbox.get_nowait()
            if isinstance(message, _Newcomer):
                self._handle(message)

    def _work(self) -> None:
        """Follow the job, then serve late subscribers until none is left."""
        # The thread of a running job:
        #   read the log         -> caught_up, if the coordinator's log is on this machine
        #   first request        -> returns at once with the rest of the history -> responded
        #   long polls of 10 s   -> each returns as soon as there are new events
        #   terminal status      -> ended; for 2 s more, poll for late output of the workers
        #   inbox empty          -> the thread ends; a late subscriber starts another one
        # Hence the events are not empty if a late subscriber started this thread.
        if not self._known.events:
            self._take_log()
        # If the log already contained the job's end when the feed started, no further events can
        # arrive.
        self._is_over = self._is_over or self._known.is_terminal
        if self._link is None and not self._is_over:
            self._lose("its cluster has ended")
        if self._log_path.exists() and not self._is_copy:
            # The coordinator writes each event to the log before it sends it to a client. It
            # uploads events to a bucket later, so a copy may lack the newest ones.
            self.caught_up.set()
        while True:
            self._follow()
            with self._lock:
                # A later subscriber finds no thread and starts its own.
                if self._inbox.empty():
                    self._thread = None
                    return
            self._handle(self._inbox.get_nowait())

    def _follow(self) -> None:
        """Poll the coordinator and handle the inbox until the log is complete."""
        while not self._is_over:
            self._request_if_due()
            pause = None if self._is_requesting else max(0.0, self._request_at - time.monotonic())
            try:
                self._handle(self._inbox.get(timeout=pause))
            except queue.Empty:
                continue
        self.caught_up.set()
        self.ended.set()
        self._responded.set()
        if self._link is not None:
            self._link.release()

    def _request_if_due(self) -> None:
        if self._is_requesting or self._link is None or time.monotonic() < self._request_at:
            return
        # The first request only fetches existing events, and a retry only tests whether the
        # coordinator is back, so neither may block. All other requests wait for new events.
        # After the job's end, `AFTERWARDS_S` separates the requests instead.
        is_begun = self.caught_up.is_set() and self._responded.is_set()
        is_calm = is_begun and not self._contact.num_failures
        wait_s = POLL_S if is_calm and not self._known.is_terminal else 0.0
        self._is_requesting = True
        future = self._link.send(
            FetchEvents(job_id=self.job_id, since=self._known.last_seq, wait_s=wait_s, limit=BATCH),
            timeout=wait_s + POLL_S,
        )
        # The callback runs in the link's thread, so it only hands the response over.
        future.add_done_callback(self._inbox.put)

    def _handle(self, message: _Newcomer | Future[EventBatch] | None) -> None:
        if message is None:
            self._is_over = True
        elif isinstance(message, Future):
            self._is_requesting = False
            self._take_response(message)
            # Reporting an outage also ends the wait; the status is then the last known one.
            if not self._contact.num_failures or self._contact.trouble:
                self._responded.set()
        else:
            self._known.add_listener(message.listener)
            message.has_history.set()

    def _take_response(self, future: Future[EventBatch]) -> None:
        try:
            response = future.result()
            received = [event_from_dict(data) for data in response.events]
        except (EtrainError, OSError, ValueError, CancelledError, KeyError, TypeError) as exc:
            self._fail(exc)
            return
        # The response does not continue the known events (a gap), so request them again.
        if not self._take(received) and received:
            self._fail(EtrainError(f"event {self._known.last_seq + 1} is missing in the response"))
            return
        was_silent = self._contact.succeed(time.time())
        self._take_log_trouble(response.trouble, is_due=was_silent)
        # A full batch means that more events are waiting.
        if len(received) < BATCH:
            self.caught_up.set()
        if self._known.is_terminal:
            self.ended.set()
            self._request_at = time.monotonic() + AFTERWARDS_S
            self._is_over = not received or time.monotonic() > self._linger_until

    def _take_log_trouble(self, trouble: str, *, is_due: bool) -> None:
        """Report to the listeners when log trouble begins, changes or ends."""
        # While the coordinator cannot write the log, for example because the disk is full or the
        # bucket is unreachable, it sends events that are not durable yet, and each response
        # contains the reason.
        before, self._log_trouble = self._log_trouble, trouble
        has_aged = time.monotonic() - self._trouble_sent_at >= TROUBLE_EVERY_S
        # Report each start and end immediately, but a change in the text at most once per interval,
        # because it may contain numbers that keep changing.
        if is_due or bool(trouble) != bool(before) or (trouble != before and has_aged):
            self._trouble_sent_at = time.monotonic()
            if not self._known.is_terminal:
                self._known.send_status(trouble)
            if not trouble:
                self._known.forget_unlogged()

    def _fail(self, exc: BaseException) -> None:
        """Schedule a retry; give up only if the cluster is known to have ended."""
        # The cases, in this order:
        #   the cluster has ended                      -> read the log; lost unless it has the end
        #   unreachable, and the log shows the end     -> the job is over
        #   unreachable for long enough to report it   -> report it once, and retry
        #   otherwise                                  -> retry
        is_first_report = self._contact.fail(exc)
        self._request_at = time.monotonic() + self._contact.pause_s()
        if self._contact.is_final(exc):
            # The first sentence is the cause; the advice after it is for user requests.
            self._lose(str(exc).partition(". ")[0])
            return
        if self._contact.trouble and self._log_has_grown():
            # The coordinator may be unreachable from here and still write to a shared folder or to
            # the bucket, up to the end of the job.
            self._take_log()
        if self._contact.trouble and self._known.is_terminal:
            self._is_over, self._contact.trouble = True, ""
            self._known.forget_unlogged()
        elif is_first_report:
            # Methods that wait for the whole history then use the events in the log, instead of
            # blocking until the scheduler is back.
            self.caught_up.set()
            self._known.send_status(self._contact.trouble)

    def _lose(self, why: str) -> None:
        """Read the rest of the log; if it lacks the job's end, mark the job as lost."""
        self._take_log()
        self._is_over, self._contact.trouble = True, ""
        self._known.forget_unlogged()
        if not self._known.is_terminal:
            self.lost = why
            self._known.send_end(why)

    def _log_has_grown(self) -> bool:
        """Return True if the log's size has changed, without the cost of reading the log."""
        before = self._log_size
        self._refresh()
        try:
            self._log_size = self._log_path.stat().st_size
        except OSError:
            return False
        return self._log_size != before

    def _take_log(self) -> None:
        """Take the events of the log that are not known yet."""
        self._refresh()
        self.is_reading = True
        try:
            self._take(self._read_log())
        finally:
            self.is_reading = False

    def _read_log(self) -> Events:
        """Return the events of the log that are not known yet; empty if it is unreadable."""
        try:
            return read_log(self._log_path, since=self._known.last_seq)
        except (OSError, EtrainError):
            return Events()

    def _take(self, events: Sequence[Event]) -> Sequence[Event]:
        """Take the events that continue the known ones, and return them."""
        was_terminal = self._known.is_terminal
        fresh = self._known.take(events)
        if fresh:
            # Until the first response, the newest logged event shows when the job was last seen.
            self._contact.seen_at = self._contact.seen_at or fresh[-1].time
        if self._known.is_terminal and not was_terminal:
            self._linger_until = time.monotonic() + LINGER_S
        return fresh
