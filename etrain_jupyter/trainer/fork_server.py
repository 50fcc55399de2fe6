"""Fork server: imports torch once per machine, and forks a warm spare for each worker.

Four workers on a laptop would otherwise spend four times the processor seconds and the memory on
the same imports. The server runs no user code and holds no state. It imports at the first request::

    head           starts the server; passes one end of a connection to it, the other to a worker
    worker         fork a spare ──▶                    ◀── pid and pidfd of the spare
    fork server                    forks
                                     └▶ spare ── forks ──▶ trainer of a job

A spare outlives the server, unless its worker has exited: the server then kills it, even if it is
stopped. If the server ends, the workers spawn their spares.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import os
import select
import signal
import socket
from dataclasses import dataclass

from etrain_jupyter.wire.fork_records import NUM_SPARE_FDS, RECORD, Kind

MAX_REQUEST = 1 << 20
"""Largest size of a request in bytes: a record and the environment."""

KEEPER_PIPE = 0
"""Standard input is the pipe that ends with the keeper (``process.parent_pipe``). It is read here
instead of in a thread, because a process with threads must not fork."""


@dataclass(frozen=True, kw_only=True)
class SpareRequest:
    """Descriptors and environment with which a forked process becomes a spare."""

    fds: list[int]
    """Channel, progress page, fork requests, stdout, stderr."""
    environment: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class _Child:
    pid: int
    connection: int
    """Descriptor of the connection of the worker for which it was forked."""


def serve(control: socket.socket) -> SpareRequest | None:
    """Fork a spare for each request. Returns in each forked process, and finally in the server.

    Args:
        control: Connection to the head, which sends a descriptor for each worker: its connection.

    Returns:
        In a forked process, its request. In the server, None once the keeper has exited, or the
        head and all workers have.
    """
    return _Server(control).run()


def enter_spare(request: SpareRequest) -> list[int]:
    """Make a forked process independent of the server.

    Returns:
        Its channel, its progress page and its fork requests.
    """
    os.setsid()  # an interrupt of the notebook must not reach it
    *own, out, err = request.fds
    for given, standard in ((out, 1), (err, 2)):
        os.dup2(given, standard)
        os.close(given)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.environ.clear()
    os.environ.update(request.environment)
    import numpy as np  # already loaded by the server, but only at its first request

    np.random.seed()  # Python reseeds its own generator; torch's has a constant seed
    return own


class _Server:
    def __init__(self, control: socket.socket) -> None:
        self._control: socket.socket | None = control
        self._connections: dict[int, socket.socket] = {}  # to the workers, by descriptor
        self._children: dict[int, _Child] = {}  # by pidfd
        self._can_fork: bool | None = None  # None before the imports

    def run(self) -> SpareRequest | None:
        while self._control is not None or self._connections:
            control = [self._control.fileno()] if self._control is not None else []
            watched = [KEEPER_PIPE, *control, *self._connections, *self._children]
            ready = set(select.select(watched, [], [])[0])
            if KEEPER_PIPE in ready:  # nothing is ever written: this is its end-of-file
                break
            for pidfd in self._children.keys() & ready:
                self._report_exit(pidfd)
            if ready.intersection(control):
                self._accept()
            for descriptor in self._connections.keys() & ready:
                if (request := self._answer(descriptor)) is not None:
                    return request
        for descriptor in list(self._connections):
            self._drop(descriptor)
        return None

    def _accept(self) -> None:
        """Take over a connection to a worker."""
        assert self._control is not None
        data, fds, _, _ = socket.recv_fds(self._control, 1, 1)
        if not data:  # the head has exited; the workers may outlive it
            self._control.close()
            self._control = None
        for descriptor in fds:
            os.set_inheritable(descriptor, False)
            self._connections[descriptor] = socket.socket(fileno=descriptor)

    def _answer(self, descriptor: int) -> SpareRequest | None:
        """Fork a spare for a worker, or kill its spares if it has exited."""
        try:
            data, fds, _, _ = socket.recv_fds(
                self._connections[descriptor], MAX_REQUEST, NUM_SPARE_FDS
            )
        except ConnectionError:
            data, fds = b"", []
        if not data:
            self._drop(descriptor)
            return None
        if self._can_fork is None:
            # Other workers wait meanwhile: their requests stay in their connections.
            self._can_fork = _import_everything()
        try:
            if not self._can_fork:
                raise OSError(errno.ENOTSUP, "a fork would not work")
            if not (pid := os.fork()):
                self._close_all()
                environment = json.loads(data[RECORD.size :])
                return SpareRequest(fds=fds, environment=environment)
        except OSError as exc:
            self._send(descriptor, RECORD.pack(Kind.FAILED, 0, exc.errno or errno.ENOMEM))
        else:
            pidfd = os.pidfd_open(pid)  # not reaped yet, so the ID still refers to this process
            self._children[pidfd] = _Child(pid=pid, connection=descriptor)
            self._send(descriptor, RECORD.pack(Kind.FORKED, pid, 0), [pidfd])
        for fd in fds:
            os.close(fd)
        return None

    def _report_exit(self, pidfd: int) -> None:
        child = self._children.pop(pidfd)
        _, status = os.waitpid(child.pid, 0)
        os.close(pidfd)
        code = os.waitstatus_to_exitcode(status)
        self._send(child.connection, RECORD.pack(Kind.EXITED, child.pid, code))

    def _drop(self, descriptor: int) -> None:
        """Close a worker's connection, and kill its spares: their channels are closed too."""
        # A spare exits by itself when its channel closes, but not if it is stopped, or hangs as a
        # trainer. ``select`` then reports the exit, and ``_send`` finds no connection.
        self._connections.pop(descriptor).close()
        for pidfd, child in self._children.items():
            if child.connection == descriptor:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def _send(self, descriptor: int, record: bytes, fds: list[int] | None = None) -> None:
        connection = self._connections.get(descriptor)
        if connection is not None:
            # If the worker has exited, ``select`` reports its connection.
            with contextlib.suppress(OSError):
                socket.send_fds(connection, [record], fds or [])

    def _close_all(self) -> None:
        """Close the server's descriptors in a forked process."""
        if self._control is not None:
            self._control.close()
        for connection in self._connections.values():
            connection.close()
        for pidfd in self._children:
            os.close(pidfd)


def _import_everything() -> bool:
    """Import what a trainer needs; return False if this process cannot fork afterwards."""
    from etrain_jupyter.trainer import spare

    importlib.import_module("etrain_jupyter.trainer.trainer")
    if spare.can_fork():
        return True
    print("the imports have started threads or initialized CUDA: this process cannot fork spares")
    return False
