"""Fork requests to a warm spare or to the machine's fork server, and the forked processes.

Each request passes descriptors: the new process's channel, its progress page, its stdout and its
stderr. The other process answers with the new process's id and pidfd, and later reports its exit
status, because only a parent process receives it::

    supervisor   fork, descriptors ──▶                                 (process is registered)
    spare                           forks    forked, pid, pidfd ──▶       exited, pid, status ──▶

A trainer does not outlive its spare: the kernel kills it (see ``trainer.main.die_with_parent``). A
spare outlives the fork server, so that the loss of one process does not end every trainer of the
machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from etrain_jupyter.process.installed import read_installed
from etrain_jupyter.wire.fork_records import MAX_MODULES_BYTES, RECORD, Kind

FORK_S = 10.0
"""Timeout of a fork in seconds. It takes milliseconds unless the parent is stopped or swapped."""

SERVER_FORK_S = 60.0
"""Timeout in seconds of a fork by the fork server, which imports torch at the first request."""

UNKNOWN_STATUS = 255
"""Exit status of a process whose parent, the fork server, ended before it."""


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

    def watch(self) -> None:
        """Detect its exit without its parent, which has ended. Its exit status is then unknown."""
        asyncio.get_running_loop().add_reader(self._pidfd, self.end, UNKNOWN_STATUS)

    def close_pipes(self) -> None:
        """Close our ends of its pipes."""
        for pipe in self._pipes:
            pipe.close()


class ForkClient:
    """The supervisor's end of a connection on which another process receives fork requests.

    Args:
        connection: A socket that keeps the boundaries of packets.
    """

    parent = "the parent process"
    """Name of the other process in messages."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self.is_ready = False
        """True if the other process has reported that it can fork."""
        self._requests: deque[asyncio.Future[ForkedProcess]] = deque()
        self._running: dict[int, ForkedProcess] = {}

    @property
    def is_in_use(self) -> bool:
        """True if a forked process is running or a request is pending."""
        return bool(self._running or self._requests)

    def begin(self) -> None:
        """Read the other process's records in the running loop."""
        asyncio.get_running_loop().add_reader(self._socket, self._read)

    def close(self) -> None:
        """Close the connection, and fail the pending requests. May be called twice."""
        self.is_ready = False
        if self._socket.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
        for process in self._running.values():
            self._lose(process)
        self._running.clear()
        while self._requests:
            self._fail(OSError(f"{self.parent} has ended"))

    def _lose(self, process: ForkedProcess) -> None:
        """Handle the end of a running process's parent."""
        process.watch()

    async def fork(
        self, fds: Sequence[int], payload: bytes = b"", *, timeout_s: float | None = None
    ) -> ForkedProcess:
        """Make the other process fork one that inherits these descriptors.

        Raises:
            OSError: If the other process cannot fork, has ended, or does not answer in time.
        """
        if self._socket.fileno() < 0:
            raise OSError(f"{self.parent} has ended")
        (out, theirs_out), (err, theirs_err) = os.pipe(), os.pipe()
        request: asyncio.Future[ForkedProcess] = asyncio.get_running_loop().create_future()
        try:
            try:
                record = RECORD.pack(Kind.FORK, 0, 0)
                socket.send_fds(self._socket, [record, payload], [*fds, theirs_out, theirs_err])
                self._requests.append(request)
            finally:
                os.close(theirs_out)
                os.close(theirs_err)
            process = await asyncio.wait_for(request, FORK_S if timeout_s is None else timeout_s)
        except BaseException:
            os.close(out)
            os.close(err)
            raise
        await process.read_from(out, err)
        return process

    def _read(self) -> None:
        """Handle the records that have arrived."""
        with contextlib.suppress(BlockingIOError):
            while True:
                try:
                    data, fds, _, _ = socket.recv_fds(self._socket, RECORD.size, 1)
                except ConnectionError:  # it was killed with unread requests
                    data, fds = b"", []
                if not data:
                    self.close()
                    return
                self._take(data, fds)

    def _take(self, data: bytes, fds: list[int]) -> None:
        kind, pid, code = RECORD.unpack(data)
        match Kind(kind):
            case Kind.READY:
                self.is_ready = True
            case Kind.FORKED if not fds:
                os.kill(pid, signal.SIGKILL)  # without a pidfd, it cannot be supervised
                self._fail(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
            case Kind.FORKED:
                process = self._running[pid] = ForkedProcess(pid, fds[0])
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
            case Kind.FORK:
                raise ValueError("only a supervisor sends fork requests")

    def _fail(self, error: OSError) -> None:
        request = self._requests.popleft()
        if not request.done():
            request.set_exception(error)


class Forks(ForkClient):
    """Connection to a warm spare, which forks trainers. They end with it."""

    parent = "the spare"

    def __init__(self) -> None:
        ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(ours)

    @property
    def spare_fd(self) -> int:
        """The spare's end, to be passed to its process."""
        return self._theirs.fileno()

    def begin(self) -> None:
        """Read the spare's records in the running loop, once its process has been started."""
        self._theirs.close()
        super().begin()

    def close(self) -> None:
        """Kill the processes that the spare has forked, and fail the pending requests.

        May be called twice.
        """
        super().close()
        self._theirs.close()

    def _lose(self, process: ForkedProcess) -> None:
        process.kill()  # the kernel also does so, but possibly a moment later
        process.end(-signal.SIGKILL)


class ForkServer(ForkClient):
    """Connection to the machine's fork server, which forks warm spares. They outlive it.

    Args:
        fd: Descriptor of the connection, as received from the process that started this one.
    """

    parent = "the fork server"

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        super().__init__(socket.socket(fileno=fd))
        self.installed = read_installed()
        """The installed packages, as the server has imported them."""
        self._is_reading = False

    @property
    def is_outdated(self) -> bool:
        """True if packages have been installed or removed since the server began its imports."""
        return self.installed != read_installed()

    async def fork_spare(self, fds: Sequence[int], environment: Mapping[str, str]) -> ForkedProcess:
        """Make the server fork a spare.

        Args:
            fds: The spare's channel, progress page and fork requests.
            environment: Its environment variables.

        Raises:
            OSError: If the server cannot fork, has ended, or does not answer in time.
        """
        if not self._is_reading:
            self._is_reading = True
            self.begin()
        payload = json.dumps(dict(environment)).encode()
        return await self.fork(fds, payload, timeout_s=SERVER_FORK_S)


class SpareModules:
    """The modules of future spares, and whether a spare that has imported them can fork."""

    def __init__(self) -> None:
        self.current: tuple[str, ...] = ()
        """Modules that each new spare imports, in order."""
        self._refused: set[str] = set()
        self._previous: tuple[str, ...] = ()

    def learn(self, modules: Iterable[str]) -> bool:
        """Add modules, in order; return False if all are known, or if they do not fit.

        Modules that have prevented forks before are not added.
        """
        known = {*self.current, *self._refused}
        added = tuple(name for name in modules if name not in known)
        size = sum(len(name) + 1 for name in (*self.current, *added))
        if not added or size > MAX_MODULES_BYTES:
            return False
        self._previous, self.current = self.current, (*self.current, *added)
        return True

    def refuse_newest(self) -> None:
        """Remove the modules added last: a spare that has imported them cannot fork."""
        self._refused |= set(self.current) - set(self._previous)
        self.current = self._previous
