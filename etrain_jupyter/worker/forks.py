"""Fork requests to a fork server, and the forked trainers.

Each request passes descriptors: the trainer's channel, its progress page, its stdout and its
stderr. The server answers with the trainer's process id and pidfd. It later reports the exit
status, which only the parent process receives::

    supervisor   fork, descriptors ──▶                                 (process is registered)
    server                           forks    forked, pid, pidfd ──▶       exited, pid, status ──▶

Trainers outlive the server, so that the loss of one process does not end every trainer on the
machine. They do not outlive their worker (see ``trainer.fork_server``).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import signal
import socket
from collections import deque
from collections.abc import Iterable, Sequence

from etrain_jupyter.process.fork_server import ForkServerProcess, read_installed
from etrain_jupyter.wire.fork_records import RECORD, Kind

logger = logging.getLogger("etrain.supervisor")

FORK_S = 60.0
"""Timeout of a fork in seconds. It takes milliseconds unless the server is stopped or swapped, or
imports modules of a job."""

IMPORT_S = 120.0
"""Timeout in seconds of a fork by a server that has not imported torch yet."""

EXIT_S = 1.0
"""Timeout in seconds of the server's report of an exit, which has the exit status."""

UNKNOWN_STATUS = 255
"""Exit status of a process whose parent, the fork server, exited first."""


class ForkedProcess:
    """A forked process, with the needed subset of ``asyncio.subprocess.Process``."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdout: asyncio.StreamReader | None = None
        self.stderr: asyncio.StreamReader | None = None
        self._pidfd = pidfd
        self._pipes: list[asyncio.BaseTransport] = []

    async def read_from(self, out: int, err: int) -> None:
        """Start reading its stdout and stderr; takes over the descriptors."""
        self.stdout, self.stderr = await self._reader(out), await self._reader(err)

    async def _reader(self, descriptor: int) -> asyncio.StreamReader:
        reader = asyncio.StreamReader(limit=1 << 20)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", 0)
        )
        self._pipes.append(transport)
        return reader

    def send_signal(self, number: int) -> None:
        """Send it a signal if it is running. A pidfd never refers to another process."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def end(self, code: int) -> None:
        """Record its exit status."""
        if self.returncode is None:
            self.returncode = code
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)

    def watch(self, patience_s: float) -> None:
        """Detect its exit even if the server, which is its parent, does not report it in time."""
        if self.returncode is None:
            asyncio.get_running_loop().add_reader(self._pidfd, self._note_exit, patience_s)

    def _note_exit(self, patience_s: float) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._pidfd)
        loop.call_later(patience_s, self.end, UNKNOWN_STATUS)

    def close_pipes(self) -> None:
        """Close our ends of its pipes."""
        for pipe in self._pipes:
            pipe.close()


class ForkServer:
    """Connection to a fork server.

    Args:
        connection: A socket that keeps the boundaries of packets, in a running event loop.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self.is_ready = False
        """True if the server has reported that it can fork."""
        self._installed = read_installed()
        self._is_retired = False
        self._requests: deque[asyncio.Future[ForkedProcess]] = deque()
        self._running: dict[int, ForkedProcess] = {}
        asyncio.get_running_loop().add_reader(connection, self._read)

    @property
    def is_usable(self) -> bool:
        """False if the server has ended, or has imported packages that have since been replaced."""
        return self._socket.fileno() >= 0 and self._installed == read_installed()

    @property
    def is_in_use(self) -> bool:
        """True if a forked process is running or a request is pending."""
        return bool(self._running or self._requests)

    def retire(self) -> None:
        """Close the connection once the last forked process has ended."""
        self._is_retired = True
        if not self.is_in_use:
            self.close()

    def close(self) -> None:
        """Close the connection, and fail the pending requests. May be called twice.

        A server that is running then kills the processes that it has forked for this worker.
        """
        self.is_ready = False
        if self._socket.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
        for process in self._running.values():
            process.watch(0.0)  # no report will come
        self._running.clear()
        while self._requests:
            self._fail(OSError("the fork server has ended"))

    def learn(self, modules: Iterable[str] = ()) -> None:
        """Make the server import torch, and modules that later trainers will need."""
        # If the request is too large, or the server's queue is full, the trainers import them.
        with contextlib.suppress(OSError):
            self._socket.send(RECORD.pack(Kind.IMPORT, 0, 0) + " ".join(modules).encode())

    async def fork(self, fds: Sequence[int]) -> ForkedProcess:
        """Make the server fork a process with these descriptors and this process's environment.

        Raises:
            OSError: If the server cannot fork, has ended, or does not answer in time.
        """
        if self._socket.fileno() < 0:
            raise OSError("the fork server has ended")
        (out, theirs_out), (err, theirs_err) = os.pipe(), os.pipe()
        request: asyncio.Future[ForkedProcess] = asyncio.get_running_loop().create_future()
        try:
            try:
                record = [RECORD.pack(Kind.FORK, 0, 0), json.dumps(dict(os.environ)).encode()]
                socket.send_fds(self._socket, record, [*fds, theirs_out, theirs_err])
                self._requests.append(request)
            finally:
                os.close(theirs_out)
                os.close(theirs_err)
            process = await asyncio.wait_for(request, FORK_S if self.is_ready else IMPORT_S)
        except BaseException:
            os.close(out)
            os.close(err)
            raise
        await process.read_from(out, err)
        return process

    def _read(self) -> None:
        """Handle the records that have arrived."""
        with contextlib.suppress(BlockingIOError):
            while self._socket.fileno() >= 0:
                try:
                    data, fds, _, _ = socket.recv_fds(self._socket, RECORD.size, 1)
                except ConnectionError:  # it was killed with unread requests
                    data, fds = b"", []
                if not data:
                    self.close()
                    return
                self._take(data, fds)
                if self._is_retired:
                    self.retire()

    def _take(self, data: bytes, fds: list[int]) -> None:
        kind, pid, code = RECORD.unpack(data)
        match Kind(kind):
            case Kind.READY:
                self.is_ready = True
            case Kind.FORKED if not fds:
                os.kill(pid, signal.SIGKILL)  # without a pidfd, it cannot be supervised
                self._fail(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
            case Kind.FORKED:
                self.is_ready = True
                process = self._running[pid] = ForkedProcess(pid, fds[0])
                process.watch(EXIT_S)
                request = self._requests.popleft()
                if request.done():  # the caller was cancelled or timed out
                    process.kill()
                else:
                    request.set_result(process)
            case Kind.FAILED:
                self._fail(OSError(code, os.strerror(code)))
            case Kind.EXITED:
                if (ended := self._running.pop(pid, None)) is not None:
                    ended.end(code)
            case Kind.FORK | Kind.IMPORT:
                raise ValueError("only a supervisor sends requests")

    def _fail(self, error: OSError) -> None:
        request = self._requests.popleft()
        if not request.done():
            request.set_exception(error)


class Forks:
    """A worker's fork server, which is either the machine's or its own.

    The worker starts its own server if it has no connection to the machine's, if that server has
    ended or does not answer, or after packages have been installed.

    Args:
        fd: Descriptor of the connection to the machine's server; -1 if it has none.
    """

    def __init__(self, fd: int = -1) -> None:
        self._server: ForkServer | None = None
        if fd >= 0:
            os.set_inheritable(fd, False)
            self._server = ForkServer(socket.socket(fileno=fd))
        self._retired: list[ForkServer] = []
        self._own: ForkServerProcess | None = None
        self._pipe: tuple[int, int] = (-1, -1)  # closes with this process; its server then exits

    @property
    def is_ready(self) -> bool:
        """True if the server has imported torch and can fork."""
        return self._server is not None and self._server.is_ready

    def warm_up(self) -> None:
        """Make the server import torch; start it if necessary."""
        try:
            server = self._connect()
        except OSError as exc:  # out of file descriptors
            logger.error("no fork server could be started: %s", exc)
            return
        if server is not None:
            server.learn()

    def learn(self, modules: Iterable[str]) -> None:
        """Make the server import modules of a job in advance, for the next trainers."""
        if self._server is not None and self._server.is_usable:
            self._server.learn(modules)

    async def fork(self, fds: Sequence[int]) -> ForkedProcess:
        """Fork a trainer that inherits these descriptors: its channel and its progress page.

        Raises:
            OSError: If it cannot be forked. The call may be retried.
        """
        server = self._connect()
        if server is None:
            raise OSError("there is no fork server")
        try:
            return await server.fork(fds)
        except TimeoutError:
            if server is self._server:
                self._disconnect()  # the next trainer gets another server
                if self._own is not None:
                    self._own.give_up()
            raise

    def rest(self) -> None:
        """Stop using the server, which exits after the trainers that it has forked."""
        self._disconnect()
        if self._own is not None:
            self._own.retire()

    def close(self) -> None:
        """Close the connection, and kill the worker's own server. The trainers must have ended."""
        self.rest()
        for server in self._retired:
            server.close()
        if self._own is not None:
            self._own.close()
            self._own = None
            for end in self._pipe:
                os.close(end)

    def _disconnect(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.retire()
            self._retired = [one for one in (*self._retired, server) if one.is_in_use]

    def _connect(self) -> ForkServer | None:
        if self._server is not None and not self._server.is_usable:
            self._disconnect()  # ``_own`` counts its failures
        if self._server is None:
            if self._own is None:
                self._pipe = os.pipe()
                self._own = ForkServerProcess(parent_pipe=self._pipe[0])
            if (connection := self._own.connect()) is not None:
                self._server = ForkServer(connection)
        return self._server
