"""Waits that end when their operation is complete *or* the generation is aborted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any

from etrain_jupyter.trainer.group.backends import GLOO
from etrain_jupyter.trainer.group.rendezvous import CommunicationError

MOST_TEXT = 2000
"""Characters of an exception's text that a report carries at most."""

_CPP_TRACE = "\nException raised from "


class Waiters:
    """Everybody who waits within one generation, and why it cannot go on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wakes: dict[int, Callable[[], None]] = {}
        self._num_registered = 0
        self.failure = ""
        """Why the generation cannot go on; empty while it can."""
        self.failed_backend = ""
        """The backend that failed, ``gloo`` or ``nccl``; empty after an abort."""

    def fail(self, why: str, *, backend: str = "") -> CommunicationError:
        """Keep the first reason, and return it as what is to be raised."""
        if not self.failure:
            self.failure, self.failed_backend = why, backend
        return CommunicationError(self.failure)

    def register(self, wake: Callable[[], None]) -> int:
        """Have ``wake`` called by an abort, at once if there was one. Returns a token."""
        with self._lock:
            if not self.failure:
                self._num_registered += 1
                self._wakes[self._num_registered] = wake
                return self._num_registered
        wake()
        return 0

    def forget(self, token: int) -> None:
        """Call it no more: its operation is complete."""
        with self._lock:
            self._wakes.pop(token, None)

    def wake_all(self) -> None:
        """Call everybody who is registered, after ``fail``."""
        with self._lock:
            wakes = list(self._wakes.values())
            self._wakes.clear()
        for wake in wakes:
            wake()


class Pending:
    """A collective, or a piece of work of the exchange thread, under way.

    Args:
        waiters: Those of its generation.
        future: Of torch or of the exchange thread; None if there is nothing to wait for.
    """

    def __init__(self, waiters: Waiters, future: Any) -> None:
        self._waiters = waiters
        self._future = future

    def wait(self) -> None:
        """Block until it is complete. Raises CommunicationError if it failed or was aborted."""
        if self._future is None:
            return
        ready = threading.Event()
        token = self._waiters.register(ready.set)
        self._future.add_done_callback(lambda _: ready.set())
        ready.wait()
        self._waiters.forget(token)
        if not self._future.done():
            raise self._waiters.fail("aborted")
        error = error_of(self._future)
        if error is not None:
            raise self._waiters.fail(text_of(error), backend=GLOO) from error


def error_of(future: Any) -> BaseException | None:
    """Return what a completed future of torch or of the exchange thread failed with."""
    try:
        if isinstance(future, Future):
            # Not raised here: its traceback would hold this future, and with it a generation.
            return future.exception()
        future.value()
    except (RuntimeError, CancelledError) as exc:
        return exc.with_traceback(None)  # it would hold the frames of whoever keeps the exception
    return None


def text_of(exc: BaseException) -> str:
    """Return an exception's text for a report, or its type: bounded, and without a C++ trace.

    NCCL's own words come last, after ``Last error:``, so that the first line is not enough.
    """
    text = str(exc).partition(_CPP_TRACE)[0].strip() or type(exc).__name__
    return text.encode("utf-8", "backslashreplace").decode()[:MOST_TEXT]
