"""Fork server: imports torch once, and forks a trainer for each job.

Imports take seconds, but a fork takes milliseconds. The workers of a local cluster share one
server; on other pools, each worker starts its own. The server runs no user code, so a trainer
starts without any state from earlier jobs, such as modules, random states, CUDA contexts, threads
or files::

    worker         fork a trainer ──▶                           ◀── pid and pidfd of the trainer
    fork server    imports torch      forks ─────── forks ───────▶ waits for the next request
                                        └▶ trainer A   └▶ trainer B

A trainer outlives the server. However, the server kills a trainer whose worker has exited, even a
stopped one.

A fork copies only the calling thread, and CUDA cannot be used in a fork of a process that has
initialized it. If the imports leave the server in such a state, it refuses each fork, and the
workers spawn their trainers.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass

from etrain_jupyter.process.entry import kill_with_parent
from etrain_jupyter.trainer.imports import import_modules
from etrain_jupyter.wire.fork_records import NUM_FDS, RECORD, Kind

MAX_REQUEST = 1 << 20
"""Maximum size in bytes of a request, which is a record with the environment or the names of
modules."""

KEEPER_PIPE = 0
"""Standard input is the pipe that closes when the keeper (``process.entry``) exits. It is read here
instead of in a thread, because a process with threads must not fork."""

PROBE_S = 5.0
"""Timeout in seconds for the trial fork."""

TRIAL_S = 60.0
"""Timeout in seconds of a trial; a module may hang while it is imported."""

PASSED = 17
"""Exit code of a trial whose imports allow forks; no module is likely to exit with this code."""


@dataclass(frozen=True, kw_only=True)
class TrainerRequest:
    """Descriptors and environment with which a forked process becomes a trainer."""

    fds: list[int]
    """Channel, progress page, stdout, stderr."""
    environment: dict[str, str]

    def enter(self) -> tuple[int, int]:
        """Make a forked process independent of the server.

        Returns:
            Its channel and its progress page.
        """
        # An interrupt of the notebook, or a signal to another trainer's group, must not reach it.
        os.setsid()
        channel, page, out, err = self.fds
        null = os.open(os.devnull, os.O_RDONLY)
        for given, standard in ((null, 0), (out, 1), (err, 2)):
            os.dup2(given, standard)
            os.close(given)
        os.environ.clear()
        os.environ.update(self.environment)
        import numpy as np  # already loaded by the server, but only at its first request

        np.random.seed()  # Python reseeds its own generator; torch's has a constant seed
        return channel, page


@dataclass(frozen=True, kw_only=True)
class _Child:
    pid: int
    connection: int
    """Descriptor of the connection to the worker that requested the fork."""


@dataclass(frozen=True, kw_only=True)
class _Trial:
    """A fork that imports modules to find out whether this process could fork afterwards."""

    pid: int
    pidfd: int
    modules: list[str]
    deadline: float
    """A ``time.monotonic`` value."""


def serve(control: socket.socket) -> TrainerRequest | None:
    """Fork a trainer for each request. Returns in each forked process, and finally in the server.

    Args:
        control: Connection to the process that started the server. That process sends the
            connection to each worker, as a descriptor.

    Returns:
        In a forked process, the request for it. In the server, None once the keeper has exited, or
        the head and all workers have exited.
    """
    return _Server(control).run()


class _Server:
    def __init__(self, control: socket.socket) -> None:
        self._control: socket.socket | None = control
        self._connections: dict[int, socket.socket] = {}  # to the workers, by descriptor
        self._children: dict[int, _Child] = {}  # by pidfd
        self._can_fork: bool | None = None  # None before the imports
        self._environment = dict(os.environ)
        self._known_modules: set[str] = set()  # each is tried only once
        self._next_modules: list[str] = []
        self._trial: _Trial | None = None
        self._is_spoiled = False
        """True if imports that passed their trial have made forks impossible."""

    def run(self) -> TrainerRequest | None:
        while self._control is not None or self._connections:
            control = [self._control.fileno()] if self._control is not None else []
            trial = [self._trial.pidfd] if self._trial is not None else []
            watched = [KEEPER_PIPE, *control, *self._connections, *self._children, *trial]
            left_s = self._trial.deadline - time.monotonic() if self._trial is not None else None
            ready = set(select.select(watched, [], [], left_s and max(0.0, left_s))[0])
            if KEEPER_PIPE in ready:  # nothing is ever written, so this is the end of the file
                break
            for pidfd in self._children.keys() & ready:
                self._report_exit(pidfd)
            if ready.intersection(control):
                self._accept()
            for descriptor in self._connections.keys() & ready:
                if (request := self._answer(descriptor)) is not None:
                    return request
            if self._trial is not None and time.monotonic() >= self._trial.deadline:
                signal.pidfd_send_signal(self._trial.pidfd, signal.SIGKILL)
                self._end_trial()
            elif ready.intersection(trial):
                self._end_trial()
            if self._is_spoiled:  # each worker starts a server of its own; the trainers continue
                return None
            self._begin_trial()
        for descriptor in list(self._connections):
            self._drop(descriptor)
        if self._trial is not None:
            signal.pidfd_send_signal(self._trial.pidfd, signal.SIGKILL)
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

    def _answer(self, descriptor: int) -> TrainerRequest | None:
        """Handle a worker's request, or kill its trainers if it has exited."""
        try:
            data, fds, _, _ = socket.recv_fds(self._connections[descriptor], MAX_REQUEST, NUM_FDS)
        except ConnectionError:
            data, fds = b"", []
        if not data:
            self._drop(descriptor)
            return None
        if self._can_fork is None:
            # Meanwhile, other workers wait; their requests stay in the connections.
            importlib.import_module("etrain_jupyter.trainer.trainer")
            self._check()
        kind, payload = RECORD.unpack_from(data)[0], data[RECORD.size :].decode()
        if kind == Kind.IMPORT:
            if self._can_fork:
                self._send(descriptor, RECORD.pack(Kind.READY, 0, 0))
            new = [name for name in payload.split() if name not in self._known_modules]
            self._known_modules.update(new)
            self._next_modules += new
            return None
        try:
            if not self._can_fork:
                raise OSError(errno.ENOTSUP, "a fork would not work")
            if not (pid := os.fork()):
                self._close_all()
                return TrainerRequest(fds=fds, environment=self._set_by_imports(payload))
        except OSError as exc:
            self._send(descriptor, RECORD.pack(Kind.FAILED, 0, exc.errno or errno.ENOMEM))
        else:
            pidfd = os.pidfd_open(pid)  # not reaped yet, so the ID still refers to this process
            self._children[pidfd] = _Child(pid=pid, connection=descriptor)
            self._send(descriptor, RECORD.pack(Kind.FORKED, pid, 0), [pidfd])
        for fd in fds:
            os.close(fd)
        return None

    def _set_by_imports(self, payload: str) -> dict[str, str]:
        """Return a worker's environment, with the variables that imported packages have set."""
        given = json.loads(payload)
        added = {k: v for k, v in os.environ.items() if self._environment.get(k) != v}
        return {**added, **given}

    def _begin_trial(self) -> None:
        """Import the modules of the previous jobs, first in a fork.

        If a module starts threads or ends the process, the server imports none of the modules.
        """
        # trainer      hello, PackagesImported
        # server                4 s later: forks ─────────────────────── imports sklearn
        # trial                              └▶ imports sklearn: can fork
        # next trainer                                                       forked ── hello
        if self._trial is not None or not self._next_modules or not self._can_fork:
            return
        modules, self._next_modules = self._next_modules, []
        with contextlib.suppress(OSError):  # out of memory or processes
            server = os.getpid()
            if pid := os.fork():
                deadline = time.monotonic() + TRIAL_S
                pidfd = os.pidfd_open(pid)
                self._trial = _Trial(pid=pid, pidfd=pidfd, modules=modules, deadline=deadline)
                return
            code = 1
            try:
                kill_with_parent(server)
                self._close_all()
                import_modules(modules)
                code = PASSED if can_fork() else 1
            finally:
                os._exit(code)

    def _end_trial(self) -> None:
        assert self._trial is not None
        trial, self._trial = self._trial, None
        _, status = os.waitpid(trial.pid, 0)
        os.close(trial.pidfd)
        if os.waitstatus_to_exitcode(status) == PASSED:
            import_modules(trial.modules)
            self._check()
            self._is_spoiled = not self._can_fork
        else:
            print("a fork would not work after these imports:", *trial.modules)

    def _check(self) -> None:
        self._can_fork = can_fork()
        if not self._can_fork:
            print("the imports have started threads or initialized CUDA: this process cannot fork")

    def _report_exit(self, pidfd: int) -> None:
        child = self._children.pop(pidfd)
        _, status = os.waitpid(child.pid, 0)
        os.close(pidfd)
        code = os.waitstatus_to_exitcode(status)
        self._send(child.connection, RECORD.pack(Kind.EXITED, child.pid, code))

    def _drop(self, descriptor: int) -> None:
        """Close a worker's connection and kill its trainers, whose channels are closed, too."""
        # A trainer exits by itself when its channel closes, but not if it is stopped or hangs.
        # ``select`` reports each exit later, and ``_send`` finds no connection.
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
        for pidfd in [*self._children, *([self._trial.pidfd] if self._trial else [])]:
            os.close(pidfd)


def can_fork() -> bool:
    """Return True if a fork of this process is usable as a trainer.

    A trial fork reveals two problems. First, OpenBLAS stops its threads before a fork and restarts
    them when needed, so a thread that is still running afterwards belongs to a library that does
    not support forks. Second, torch can report in the child whether the parent has initialized
    CUDA.
    """
    import torch

    if sys.platform != "linux":
        return False
    gc.collect()
    gc.freeze()  # a garbage collection in a trainer would copy the pages of all these objects
    try:
        pid = os.fork()
        if not pid:
            os._exit(int(torch.cuda._is_in_bad_fork()))
        return _exits_well(pid) and len(os.listdir("/proc/self/task")) == 1
    except OSError:  # out of memory or processes, or the kernel has no pidfds
        return False


def _exits_well(pid: int) -> bool:
    """Wait for the trial process; kill it if a library's fork handler blocks it."""
    pidfd = os.pidfd_open(pid)
    try:
        if not select.select([pidfd], [], [], PROBE_S)[0]:
            os.kill(pid, signal.SIGKILL)
        return os.waitpid(pid, 0)[1] == 0
    finally:
        os.close(pidfd)
