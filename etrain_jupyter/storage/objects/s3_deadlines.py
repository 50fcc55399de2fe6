"""Total deadlines for requests of boto3.

The timeouts of boto3 are for one connection and one read each: a server that sends a byte now and
then is never given up. ``Deadline`` bounds all that a thread does between two points. When it is
over, the connections that the thread uses are shut down by a thread that watches, so that whatever
waits for them fails at once, and new ones are refused::

    guard(client)
    with Deadline(20.0) as deadline:
        client.get_object(...)

A client that ``guard`` does not know how to change keeps boto3's own timeouts.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from typing import Any, Self

import botocore.awsrequest

_local = threading.local()


_OVER = "the time for this request is over"


class DeadlineError(OSError):
    """A request was not over at its deadline, or was begun after it."""


class Deadline:
    """Bounds what this thread asks of guarded clients, as a context.

    Args:
        seconds: From its entry on.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._held: list[socket.socket] = []
        """Further handles of the connections that are in use: they work whoever closes his."""
        self.at = 0.0
        self.is_over = False

    def __enter__(self) -> Self:
        """Begin."""
        self._outer = getattr(_local, "deadline", None)
        _local.deadline = self
        self.renew()
        _watch.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: object
    ) -> None:
        """End, and let the connections be.

        Raises:
            DeadlineError: If the time was over before, whatever came of it: an answer that was cut
                off in its headers may look whole, or fail anywhere in boto3.
        """
        _local.deadline = self._outer
        _watch.remove(self)
        with self._lock:
            for handle in self._held:
                handle.close()
            self._held.clear()
        if self.is_over and (exc is None or isinstance(exc, Exception)):
            raise DeadlineError(_OVER) from exc

    def renew(self) -> None:
        """Begin anew, for the next of several requests."""
        self.at = time.monotonic() + self._seconds

    def allow(self, seconds: float) -> None:
        """Put it off: something came of the time that went by."""
        self.at += seconds

    def hold(self, connection: socket.socket) -> None:
        """Shut this connection down when the time is over."""
        handle = socket.fromfd(connection.fileno(), connection.family, connection.type)
        with self._lock:
            self._held.append(handle)
            if self.is_over:
                _shut(handle)

    def cut(self) -> None:
        """End all that is under way; called by the thread that watches."""
        with self._lock:
            self.is_over = True
            for handle in self._held:
                _shut(handle)


def current() -> Deadline | None:
    """Return this thread's deadline."""
    found: Deadline | None = getattr(_local, "deadline", None)
    return found


def guard(client: Any) -> Any:
    """Let the connections of a client of boto3 obey deadlines; return it."""
    # There is no public way to give a client other classes of connections.
    with contextlib.suppress(AttributeError):
        session = client._endpoint.http_session
        session._pool_classes_by_scheme = _POOLS
        session._manager.pool_classes_by_scheme = _POOLS
    return client


def _shut(handle: socket.socket) -> None:
    with contextlib.suppress(OSError):
        handle.shutdown(socket.SHUT_RDWR)


class _Watch:
    """The thread that cuts off what is over; it is started by the first deadline."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._deadlines: set[Deadline] = set()
        self._thread: threading.Thread | None = None

    def add(self, deadline: Deadline) -> None:
        with self._changed:
            self._deadlines.add(deadline)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="etrain-s3-deadlines", daemon=True
                )
                self._thread.start()
            self._changed.notify()

    def remove(self, deadline: Deadline) -> None:
        with self._changed:
            self._deadlines.discard(deadline)

    def _run(self) -> None:
        with self._changed:
            while True:
                now = time.monotonic()
                for deadline in [one for one in self._deadlines if one.at <= now]:
                    self._deadlines.discard(deadline)
                    deadline.cut()
                # What is put off only wakes us too early, which does no harm.
                ends = [one.at for one in self._deadlines]
                self._changed.wait(max(0.0, min(ends) - now) if ends else None)


_watch = _Watch()


def _begin_after_fork() -> None:
    """Have a watch of our own: threads do not survive a fork, and its lock may be held."""
    global _watch
    _watch = _Watch()


os.register_at_fork(after_in_child=_begin_after_fork)


class _Guarded:
    """Registers a connection with the deadline of the thread that uses it."""

    sock: socket.socket | None

    def _new_conn(self) -> socket.socket:
        _check()
        made: socket.socket = super()._new_conn()  # type: ignore[misc]
        if (deadline := current()) is not None:
            deadline.hold(made)
        return made

    def request(self, *words: Any, **named: Any) -> Any:
        _check()
        # One that is used again; a new one is made below, and registers itself.
        if (deadline := current()) is not None and self.sock is not None:
            deadline.hold(self.sock)
        return super().request(*words, **named)  # type: ignore[misc]


def _check() -> None:
    if (deadline := current()) is not None and deadline.is_over:
        raise DeadlineError(_OVER)


class _Http(_Guarded, botocore.awsrequest.AWSHTTPConnection):  # type: ignore[misc]
    pass


class _Https(_Guarded, botocore.awsrequest.AWSHTTPSConnection):  # type: ignore[misc]
    pass


class _HttpPool(botocore.awsrequest.AWSHTTPConnectionPool):  # type: ignore[misc]
    ConnectionCls = _Http


class _HttpsPool(botocore.awsrequest.AWSHTTPSConnectionPool):  # type: ignore[misc]
    ConnectionCls = _Https


_POOLS = {"http": _HttpPool, "https": _HttpsPool}
