"""Trainers forked from a zygote, in place of what ``create_subprocess_exec`` would start.

A forked trainer is there after 50 ms and costs no imports, where a spawned one costs 3 s of
processor time. It differs from the product's: its command line and ``ranks.main.main`` are not
used, the zygote is its parent, it never waits as a warm spare that still imports, and its limits
are shorter.
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
    """What ``TrainerProcess`` needs of an ``asyncio.subprocess.Process``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdout: asyncio.StreamReader | None = None
        self.stderr: asyncio.StreamReader | None = None
        self._transport = self
        self._pipes: list[asyncio.BaseTransport] = []
        self.ended = asyncio.Event()

    async def read_from(self, out: int, err: int) -> None:
        """Read what it prints."""
        self.stdout, self.stderr = await self._reader(out), await self._reader(err)

    async def _reader(self, descriptor: int) -> asyncio.StreamReader:
        reader = asyncio.StreamReader(limit=1 << 20)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", 0)
        )
        self._pipes.append(transport)
        return reader

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it lives."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it with SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def end(self, code: int) -> None:
        """Take in that it has ended."""
        self.returncode = code
        self.ended.set()

    def close(self) -> None:
        """Close our ends of its pipes."""
        for pipe in self._pipes:
            pipe.close()


class Zygote:
    """The process that forks, as seen from the test's process. One loop at a time uses it.

    Args:
        keep_records: How many records a rank keeps; the product's number if it is None.
        collective_timeout_s: After how long a collective times out; the product's if it is None.
    """

    # Nothing is slow here that would need much patience, and a newcomer imports nothing.
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
        except BaseException:  # a time-out of the test, too: its imports take long at times
            self._process.kill()
            self.close()
            raise
        self._socket.setblocking(False)
        self._forking: deque[asyncio.Future[ForkedProcess]] = deque()
        self.living: dict[int, ForkedProcess] = {}

    def attach(self) -> None:
        """Let the running loop hear of forks and ends."""
        asyncio.get_running_loop().add_reader(self._socket, self._read)

    async def detach(self) -> None:
        """End what is left, and let go of the running loop."""
        for process in list(self.living.values()):
            process.kill()
            await asyncio.wait_for(process.ended.wait(), 10)
        asyncio.get_running_loop().remove_reader(self._socket)

    def close(self) -> None:
        """End the zygote, and with it whatever it has forked."""
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
        """The zygote's own process."""
        return self._process.pid

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while packet := self._socket.recv(100):
                told = json.loads(packet)
                if "forked" in told:
                    process = self.living[told["forked"]] = ForkedProcess(told["forked"])
                    asked = self._forking.popleft()
                    if asked.cancelled():
                        process.kill()  # whoever asked for it is gone
                    else:
                        asked.set_result(process)
                else:
                    self.living.pop(told["exited"]).end(told["code"])
