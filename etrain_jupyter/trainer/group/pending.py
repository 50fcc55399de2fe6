"""Exchange thread, and waits that end when their operation completes or the generation aborts."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any

from etrain_jupyter.trainer.group.backends import GLOO
from etrain_jupyter.trainer.group.rendezvous import CommunicationError

MAX_TEXT = 2000
"""Maximum length of an exception's text in a report."""

_CPP_TRACE = "\nException raised from "

Work = Callable[[], None]


class Waiters:
    """The waits of one generation, and its failure."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wakes: dict[int, Callable[[], None]] = {}
        self._num_registered = 0
        self.failure = ""
        """Reason why the generation cannot continue; empty while it can."""
        self.failed_backend = ""
        """Backend that failed, ``gloo`` or ``nccl``; empty after an abort."""

    def fail(self, why: str, *, backend: str = "") -> CommunicationError:
        """Record the failure unless one is already recorded; return the exception to raise."""
        # The first failure is the cause. An abort breaks all collectives, whose errors follow.
        if not self.failure:
            self.failure, self.failed_backend = why, backend
        return CommunicationError(self.failure)

    def register(self, wake: Callable[[], None]) -> int:
        """Call ``wake`` on an abort, or immediately if already aborted.

        Return a token for ``forget``.
        """
        # ``fail`` and ``wake_all`` are two calls. A wait that registers before ``wake_all`` takes
        # the lock is woken by it, or sees the failure here:
        #
        #     aborting thread   fail ────────────────── wake_all
        #     waiting thread            register: failure is set, so it wakes itself
        with self._lock:
            if not self.failure:
                self._num_registered += 1
                self._wakes[self._num_registered] = wake
                return self._num_registered
        # Call it outside the lock, because ``wake`` may call ``forget``.
        wake()
        return 0

    def forget(self, token: int) -> None:
        """Unregister a wait: its operation is complete."""
        with self._lock:
            self._wakes.pop(token, None)

    def wake_all(self) -> None:
        """Wake all registered waits, after ``fail``."""
        # Call them outside the lock, because the callbacks may need the lock.
        with self._lock:
            wakes = list(self._wakes.values())
            self._wakes.clear()
        for wake in wakes:
            wake()


class Pending:
    """A collective in flight, or work in the exchange thread.

    Args:
        future: A future from torch or the exchange thread; None if there is nothing to wait for.
    """

    def __init__(self, waiters: Waiters, future: Any) -> None:
        self._waiters = waiters
        self._future = future

    def wait(self) -> None:
        """Block until complete. Raises CommunicationError on a failure or an abort."""
        if self._future is None:
            return
        # Do not use future.wait(), which would block without a timeout if the peer is silent.
        ready = threading.Event()
        token = self._waiters.register(ready.set)
        self._future.add_done_callback(lambda _: ready.set())
        ready.wait()
        self._waiters.forget(token)
        # An abort has woken this thread, so the operation is abandoned. It may still complete later
        # and write into its tensor, which must not be reused.
        if not self._future.done():
            raise self._waiters.fail("aborted")
        error = error_of(self._future)
        if error is not None:
            raise self._waiters.fail(text_of(error), backend=GLOO) from error


def error_of(future: Any) -> BaseException | None:
    """Return the error of a completed future from torch or from the exchange thread."""
    try:
        if isinstance(future, Future):
            # The error is not raised here, because the traceback would keep this future alive, and
            # with it the generation.
            return future.exception()
        future.value()
    except (RuntimeError, CancelledError) as exc:
        return exc.with_traceback(None)  # its frames would be kept alive with the exception
    return None


def text_of(exc: BaseException) -> str:
    """Return an exception's text for a report, bounded and without a C++ trace, or its type.

    It contains more than the first line, because NCCL puts its own message last, after ``Last
    error:``.
    """
    text = str(exc).partition(_CPP_TRACE)[0].strip() or type(exc).__name__
    return text.encode("utf-8", "backslashreplace").decode()[:MAX_TEXT]


class ExchangeThread:
    """Run work items in one thread, which may block inside gloo because it can be abandoned."""

    # main thread    submit ── Pending.wait ─────── X aborted: CommunicationError, next generation
    # this thread       └─ work: inside gloo, with a peer that is silent ....... released, ends
    def __init__(self) -> None:
        self._pieces: queue.SimpleQueue[tuple[Work, Future[None]] | None] = queue.SimpleQueue()
        self._ended = False
        # A daemon, so that the process can exit even if this thread is stuck inside gloo.
        threading.Thread(target=self._run, daemon=True, name="etrain-exchange").start()

    def submit(self, work: Work) -> Future[None]:
        """Run ``work`` after everything submitted before it."""
        future: Future[None] = Future()
        self._pieces.put((work, future))
        return future

    def end(self) -> None:
        """Drop work items that have not started, and let the thread exit. Does not wait for it."""
        self._ended = True
        self._pieces.put(None)

    def _run(self) -> None:
        while True:
            piece = self._pieces.get()
            if piece is None:
                return
            work, future = piece
            # Items still in the queue must not start in an aborted generation.
            if self._ended:
                future.cancel()
                continue
            try:
                work()
            except BaseException as exc:
                future.set_exception(exc)
            else:
                future.set_result(None)
            # The work refers to tensors. These variables would keep it alive until the next item
            # arrives.
            del piece, work, future
