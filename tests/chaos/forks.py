"""Spares forked from a zygote, as a substitute for ``asyncio.create_subprocess_exec``.

A forked spare starts in 50 ms, without imports; a spawned one costs 3 s of CPU time. It differs
from the product's spare: it skips the command line and ``trainer.main.main``, its parent is the
zygote, it never imports for seconds, and its timeouts are shorter. It forks trainers as in the
product.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.chaos.trainers import Limits

ROOT = Path(__file__).parents[2]
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class ForkedProcess:
    """The part of ``asyncio.subprocess.Process`` that ``TrainerProcess`` uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdout: asyncio.StreamReader | None = None
        self.stderr: asyncio.StreamReader | None = None
        self._transport = self
        self._pipes: list[asyncio.BaseTransport] = []
        self.ended = asyncio.Event()

    async def read_from(self, out: int, err: int) -> None:
        """Start reading its stdout and stderr."""
        self.stdout, self.stderr = await self._reader(out), await self._reader(err)

    async def _reader(self, descriptor: int) -> asyncio.StreamReader:
        reader = asyncio.StreamReader(limit=1 << 20)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", 0)
        )
        self._pipes.append(transport)
        return reader

    def send_signal(self, number: int) -> None:
        """Send it a signal if it is running."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def end(self, code: int) -> None:
        """Record its exit status."""
        self.returncode = code
        self.ended.set()

    def close(self) -> None:
        """Close our ends of its pipes."""
        for pipe in self._pipes:
            pipe.close()


class Zygote:
    """Handle of the forking process in the test process. Used by one event loop at a time.

    Args:
        keep_records: Number of records that a rank keeps; the product's default if None.
        collective_timeout_s: Timeout of a collective; the product's default if None.
    """

    # Short timeouts suffice: nothing is slow here, and a new trainer imports nothing.
    limits = Limits(hang_s=3.0, beat_s=0.25, restore_patience=2, warm_up_patience=2)
    warms_up = False

    def __init__(
        self, *, keep_records: int | None = None, collective_timeout_s: float | None = None
    ) -> None:
        changes = {"keep_records": keep_records, "collective_timeout_s": collective_timeout_s}
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **dict.fromkeys(THREADS, "1")}
        environment["ETRAIN_SUPERVISOR_PID"] = str(os.getpid())
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-u", "-m", "tests.chaos.zygote"),
                    *(str(theirs.fileno()), json.dumps(changes)),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=environment,
                cwd=ROOT,
            )
        try:
            assert json.loads(self._socket.recv(100)) == {"ready": True}
        except BaseException:  # including the test's timeout: imports are sometimes slow
            self._process.kill()
            self.close()
            raise
        self._socket.setblocking(False)
        self._forking: deque[asyncio.Future[ForkedProcess]] = deque()
        self.living: dict[int, ForkedProcess] = {}

    def attach(self) -> None:
        """Read the zygote's messages in the running loop."""
        asyncio.get_running_loop().add_reader(self._socket, self._read)

    async def detach(self) -> None:
        """Kill the remaining trainers and leave the running loop."""
        for process in list(self.living.values()):
            process.kill()
            await asyncio.wait_for(process.ended.wait(), 10)
        asyncio.get_running_loop().remove_reader(self._socket)

    def close(self) -> None:
        """Stop the zygote, and with it all processes that it has forked."""
        self._socket.close()
        self._process.wait(30)

    async def start_process(self, *_: str, pass_fds: Sequence[int], **__: Any) -> ForkedProcess:
        """Fork a trainer: stands for ``asyncio.create_subprocess_exec``."""
        (out, theirs_out), (err, theirs_err) = os.pipe(), os.pipe()
        fds = array.array("i", [*pass_fds, theirs_out, theirs_err])
        forked: asyncio.Future[ForkedProcess] = asyncio.get_running_loop().create_future()
        self._forking.append(forked)
        self._socket.sendmsg([b"fork"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        os.close(theirs_out)
        os.close(theirs_err)
        try:
            process = await forked
        except asyncio.CancelledError:
            os.close(out)
            os.close(err)
            raise
        await process.read_from(out, err)
        return process

    @property
    def pid(self) -> int:
        """Process id of the zygote itself."""
        return self._process.pid

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while packet := self._socket.recv(100):
                message = json.loads(packet)
                if "forked" in message:
                    process = self.living[message["forked"]] = ForkedProcess(message["forked"])
                    asked = self._forking.popleft()
                    if asked.cancelled():
                        process.kill()  # its requester was cancelled
                    else:
                        asked.set_result(process)
                else:
                    self.living.pop(message["exited"]).end(message["code"])
