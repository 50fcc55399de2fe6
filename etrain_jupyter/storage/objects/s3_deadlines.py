"""Overall deadlines for boto3 requests.

boto3's timeouts apply to each connection attempt and each read, so a server that sends a byte now
and then never exceeds them. ``Deadline`` limits everything that a thread does in a block. When the
time is up, a watcher thread shuts down the connections that the block uses, so that pending reads
and writes fail immediately, and new requests are refused::

    guard(client)
    with Deadline(20.0) as deadline:
        client.get_object(...)

A client whose internals ``guard`` does not recognize keeps boto3's own timeouts.
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


_OVER = "the deadline of this request has passed"


class DeadlineError(OSError):
    """A request did not complete before its deadline, or was started after it."""


# A server that sends one byte every few seconds, with a deadline of 20 s:
#
#   requesting thread                     watcher thread              server
#   with Deadline(20): start the clock    wait until 20 s
#   send request, hold(its socket)
#   recv() returns a byte                                             byte at 0 s, 4 s, 8 s ...
#   recv() blocks                         shutdown() of the socket
#   recv() fails; boto3 may retry, but
#   a new request raises DeadlineError
#   __exit__ raises DeadlineError
class Deadline:
    """Context manager that limits the time of this thread's requests with guarded clients.

    Args:
        seconds: Timeout, from entry.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._connections: list[socket.socket] = []
        """Duplicates of the sockets in use, which stay valid if the owner closes the originals."""
        self.at = 0.0
        self.is_over = False

    def __enter__(self) -> Self:
        self._outer = getattr(_local, "deadline", None)
        _local.deadline = self
        self.renew()  # before add(): the watcher would treat at=0.0 as expired
        _watcher.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: object
    ) -> None:
        """Stop watching; the connections stay open.

        Raises:
            DeadlineError: If the deadline has passed, even if the block succeeded, because a
                response that was cut off in its headers may look complete, or may fail anywhere in
                boto3.
        """
        _local.deadline = self._outer
        _watcher.remove(self)
        with self._lock:
            for handle in self._connections:
                handle.close()
            self._connections.clear()
        if self.is_over and (exc is None or isinstance(exc, Exception)):
            raise DeadlineError(_OVER) from exc

    def renew(self) -> None:
        """Restart the timeout, for the next of several requests."""
        self.at = time.monotonic() + self._seconds

    def extend(self, seconds: float) -> None:
        """Postpone the deadline because the request makes progress."""
        self.at += seconds

    def hold(self, connection: socket.socket) -> None:
        """Shut this connection down when the deadline passes."""
        # A duplicate, because urllib3 may close its own descriptor at any time, and the kernel may
        # give its number to another file. shutdown() of a duplicate ends the same connection.
        handle = socket.fromfd(connection.fileno(), connection.family, connection.type)
        with self._lock:
            self._connections.append(handle)
            # The deadline may have passed after the check that precedes every request.
            if self.is_over:
                _shut_down(handle)

    def cut(self) -> None:
        """Shut down all connections in use; called by the watcher thread."""
        with self._lock:
            self.is_over = True
            for handle in self._connections:
                _shut_down(handle)


def current() -> Deadline | None:
    """Return this thread's deadline, if any."""
    found: Deadline | None = getattr(_local, "deadline", None)
    return found


def guard(client: Any) -> Any:
    """Make a boto3 client's connections obey deadlines; return the client."""
    # boto3 has no public way to replace a client's connection classes.
    with contextlib.suppress(AttributeError):
        session = client._endpoint.http_session
        session._pool_classes_by_scheme = _POOLS
        session._manager.pool_classes_by_scheme = _POOLS
    return client


def _shut_down(handle: socket.socket) -> None:
    with contextlib.suppress(OSError):
        handle.shutdown(socket.SHUT_RDWR)


class _Watcher:
    """The watcher thread, which enforces deadlines; the first deadline starts it."""

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
            # The new deadline may be earlier than the one that the thread waits for.
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
                # If a deadline was extended, this thread only wakes too early, which is harmless.
                ends = [one.at for one in self._deadlines]
                self._changed.wait(max(0.0, min(ends) - now) if ends else None)


_watcher = _Watcher()


def _restart_after_fork() -> None:
    # The thread does not survive a fork, and its lock may have been held at that moment.
    global _watcher
    _watcher = _Watcher()


os.register_at_fork(after_in_child=_restart_after_fork)


class _Guarded:
    """Register a connection with the deadline of the thread that uses it."""

    sock: socket.socket | None

    def _new_conn(self) -> socket.socket:
        _check_deadline()
        made: socket.socket = super()._new_conn()  # type: ignore[misc]
        if (deadline := current()) is not None:
            deadline.hold(made)
        return made

    def request(self, *args: Any, **kwargs: Any) -> Any:
        _check_deadline()
        # A reused connection; a new one is opened below, and registers itself.
        if (deadline := current()) is not None and self.sock is not None:
            deadline.hold(self.sock)
        return super().request(*args, **kwargs)  # type: ignore[misc]


def _check_deadline() -> None:
    # boto3 retries a request whose connection the watcher has shut down. Refuse the retry
    # immediately, because connecting again may take the whole connect timeout.
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
