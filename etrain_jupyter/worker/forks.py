"""Fork requests to a warm spare, and the processes that it has forked.

Each request passes four descriptors to the spare: the trainer's channel, its progress page, its
stdout and its stderr. The spare answers with the process's id and pidfd, and later reports its exit
status, because only a parent process receives it::

    supervisor   fork, 4 descriptors ──▶                                 (process is registered)
    spare                             forks    forked, pid, pidfd ──▶       exited, pid, status ──▶

A trainer does not outlive its spare: the kernel kills it (see ``trainer.main.die_with_parent``).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
from collections import deque
from collections.abc import Sequence

from etrain_jupyter.wire.fork_records import RECORD, Kind

FORK_S = 10.0
"""Timeout of a fork in seconds. It takes milliseconds unless the spare is stopped or swapped."""


class ForkedProcess:
    """Child process of the spare, with the needed subset of ``asyncio.subprocess.Process``."""

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
            os.close(self._pidfd)

    def close_pipes(self) -> None:
        """Close our ends of its pipes."""
        for pipe in self._pipes:
            pipe.close()


class Forks:
    """The supervisor's end of the connection on which a spare receives fork requests."""

    def __init__(self) -> None:
        self._socket, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self.is_ready = False
        """True if the spare has imported torch and is able to fork; it reports this once."""
        self._requests: deque[asyncio.Future[ForkedProcess]] = deque()
        self._running: dict[int, ForkedProcess] = {}

    @property
    def spare_fd(self) -> int:
        """The spare's end, to be passed to its process."""
        return self._theirs.fileno()

    @property
    def is_in_use(self) -> bool:
        """True if a forked process is running or a request is pending; both end with the spare."""
        return bool(self._running or self._requests)

    def begin(self) -> None:
        """Read the spare's records in the running loop, once its process has been spawned."""
        self._theirs.close()
        asyncio.get_running_loop().add_reader(self._socket, self._read)

    def close(self) -> None:
        """Kill the processes that the spare has forked, and fail the pending requests.

        May be called twice.
        """
        self.is_ready = False
        if self._socket.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
        self._theirs.close()
        for process in self._running.values():
            process.kill()  # the kernel also does so, but possibly a moment later
            process.end(-signal.SIGKILL)
        self._running.clear()
        while self._requests:
            self._fail(OSError("the spare has ended"))

    async def fork(self, fds: Sequence[int]) -> ForkedProcess:
        """Make the spare fork a trainer, which inherits these descriptors.

        Raises:
            OSError: If the spare cannot fork, has ended, or does not answer in time.
        """
        if self._socket.fileno() < 0:
            raise OSError("the spare has ended")
        (out, theirs_out), (err, theirs_err) = os.pipe(), os.pipe()
        request: asyncio.Future[ForkedProcess] = asyncio.get_running_loop().create_future()
        try:
            try:
                socket.send_fds(
                    self._socket, [RECORD.pack(Kind.FORK, 0, 0)], [*fds, theirs_out, theirs_err]
                )
                self._requests.append(request)
            finally:
                os.close(theirs_out)
                os.close(theirs_err)
            process = await asyncio.wait_for(request, FORK_S)
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
                except ConnectionError:  # the spare was killed with unread requests
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
                raise ValueError("a spare must not send fork requests")

    def _fail(self, error: OSError) -> None:
        request = self._requests.popleft()
        if not request.done():
            request.set_exception(error)
