"""A trainer's process, as its supervisor sees it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import psutil

from etrain_jupyter.log.events import STACKS_HEADER
from etrain_jupyter.wire.channel import FrameDecoder, frame
from etrain_jupyter.wire.codec import Encoded, WireVersionError, encode
from etrain_jupyter.wire.messages import FROM_TRAINER, TextLogged
from etrain_jupyter.wire.progress_page import ProgressPage, TrainerProgress
from etrain_jupyter.worker.forks import ForkedProcess, Forks

logger = logging.getLogger("etrain.supervisor")

MAX_LINES_PER_S = 50
"""Maximum number of printed lines to forward per second; other lines are counted and dropped."""

STACKS_S = 2.0
"""Timeout in seconds for a trainer to write the stacks of its threads."""

MAX_STACK_LINES = 500
"""Maximum number of stack lines to forward."""

VMSTAT = Path("/proc/vmstat")
"""The kernel's counters, which include the processes it has killed because memory ran out."""

OnMessage = Callable[["TrainerProcess", Encoded], None]
"""Handles a message of a kind that trainers send. Its fields are not checked yet."""
OnExit = Callable[["TrainerProcess", str], None]

MakeProcess = Callable[
    [Sequence[int]], Coroutine[Any, Any, asyncio.subprocess.Process | ForkedProcess]
]
"""Starts a process that inherits these descriptors: its channel and its progress page."""


class TrainerProcess:
    """Start a trainer, forward messages in both directions, and report its exit.

    Runs on one event loop.

    Args:
        name: The trainer's name.
        on_message: Called with each message of the trainer.
        on_exit: Called once it has exited, with the cause.
        may_read: While this is cleared, the trainer's output is not read.
        forks: Forks the process; if that fails, or if None, the process is spawned.
    """

    def __init__(
        self,
        name: str = "",
        *,
        on_message: OnMessage,
        on_exit: OnExit,
        may_read: asyncio.Event | None = None,
        forks: Forks | None = None,
    ) -> None:
        self.name = name
        self.pid = 0
        self._on_message = on_message
        self._on_exit = on_exit
        # While it is cleared, the trainer blocks once the channel's buffer is full.
        self._may_read = may_read
        self._forks = forks
        self._process: asyncio.subprocess.Process | ForkedProcess | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []  # output, errors, messages
        self._killed_because = ""  # the first reason; empty if not killed
        self._early: list[bytes] = []  # messages from before the channel was open
        self._page: ProgressPage | None = None
        self._num_oom_kills = count_oom_kills()  # at its start
        self._num_free_lines = 0  # lines of a stack report, exempt from the rate limit

    async def start(self) -> None:
        """Start the process, which waits for a job.

        Raises:
            OSError: If it could not be started. The call may be retried.
        """
        if self._forks is not None:
            try:
                await self._begin(self._forks.fork)
                return
            except OSError as exc:
                # The next attempt opens another channel, because a stopped server keeps the
                # descriptors of its pending request open.
                name = type(exc).__name__
                logger.warning("the fork server failed (%s: %s): spawning a trainer", name, exc)
        await self._begin(self._spawn)

    async def _begin(self, make: MakeProcess) -> None:
        # If the process cannot be started, close the resources that were opened for it.
        with contextlib.ExitStack() as undo:
            ours, theirs = socket.socketpair()
            undo.callback(ours.close)
            with theirs:
                self._page = page = ProgressPage.create()
                undo.callback(self._close_page)
                self._process = await make([theirs.fileno(), page.fd])
            undo.pop_all()
        self.pid = self._process.pid
        if self._killed_because:  # killed while it was starting
            self._process.kill()
        reader, self._writer = await asyncio.open_connection(sock=ours)
        for data in self._early:  # in order, before any later message
            self._writer.write(data)
        self._early = []
        streams = ((self._process.stdout, "info"), (self._process.stderr, "warning"))
        self._tasks = [
            asyncio.create_task(self._read_lines(stream, level))
            for stream, level in streams
            if stream
        ]
        self._tasks.append(asyncio.create_task(self._read_messages(reader)))

    async def _spawn(self, fds: Sequence[int]) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            # Output is unbuffered, and a segmentation fault prints a stack, so that the last lines
            # explain a crash.
            *("-u", "-X", "faulthandler", "-m", "etrain_jupyter.trainer.main"),
            *map(str, fds),
            pass_fds=fds,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "ETRAIN_SUPERVISOR_PID": str(os.getpid())},
            start_new_session=True,  # an interrupt of the notebook must not reach it
            limit=1 << 20,  # bytes of a line
        )

    def _close_page(self) -> None:
        if self._page is not None:
            self._page.close()
            self._page = None

    def send(self, message: Encoded) -> None:
        """Send a message to the trainer, or queue it if the trainer is still starting."""
        data = frame(message)
        if self._writer is None:
            self._early.append(data)
        elif not self._writer.is_closing():
            self._writer.write(data)

    def kill(self, why: str = "") -> None:
        """Kill the process with SIGKILL."""
        self._killed_because = self._killed_because or why or "killed"
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def progress(self) -> TrainerProgress | None:
        """Return its progress, even if it is stopped; None before it starts and after it exits."""
        # While the process waits for the fork server, its page has no pulse, as if it were frozen.
        page = self._page if self._process is not None else None
        return page.read() if page is not None else None

    def process_state(self) -> str:
        """Return the OS's process state: ``running``, ``sleeping``, ``stopped`` ..."""
        try:
            return str(psutil.Process(self.pid).status())
        except psutil.Error:
            return "gone"

    def send_signal(self, number: signal.Signals) -> None:
        """Send the process a signal, if it is alive."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def log_stacks(self) -> None:
        """Log each thread's stack.

        The trainer writes its stacks in a signal handler, which works even while a thread holds the
        GIL. A stopped process writes nothing.
        """
        # The handler is installed before the first pulse (``trainer.main.open_page``). Until then,
        # the signal would kill the process.
        state = self.process_state()
        if self._page is None or not self._page.has_pulsed() or state == "stopped":
            text = f"trainer {self.pid} is {state}: the stacks of its threads cannot be logged"
            self.log("warning", text)
            return
        self.log("warning", STACKS_HEADER)
        self._num_free_lines = MAX_STACK_LINES
        self.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + STACKS_S
        # The report has no end marker, so wait until no more lines arrive.
        left = -1
        while left != self._num_free_lines and time.monotonic() < deadline:
            left = self._num_free_lines
            await asyncio.sleep(STACKS_S / 8)

    async def wait(self) -> None:
        """Wait until the process has exited."""
        if self._process is not None:
            await self._exit_code()

    async def _read_messages(self, reader: asyncio.StreamReader) -> None:
        decoder = FrameDecoder()
        try:
            while await self._is_read() and (data := await _read(reader)):
                for message in decoder.feed(data):
                    FROM_TRAINER.class_of(message)  # raises if a trainer may not send it
                    self._on_message(self, message)
        except WireVersionError as exc:
            # The package's files were replaced with another version while this worker was running.
            logger.error("trainer %d: %s", self.pid, exc)
            self.kill(
                f"{exc}: etrain-jupyter was updated on this machine while the worker was running. "
                "The trainer was killed. Restart the worker; for a local cluster, run %etrain down"
            )
        except Exception as exc:
            # The bytes are not a message, or this package has a bug. The start of the next message
            # cannot be found.
            logger.exception("a message from trainer %d cannot be decoded", self.pid)
            self.kill(f"its message cannot be decoded: {type(exc).__name__}: {exc}")
        # The channel is closed, so the process has exited, or is about to.
        #
        #   channel closed -> exit code -> last printed lines -> TrainerExited, via ``_on_exit``
        #
        # The lines are sent first, because the coordinator builds the error message from them.
        code = await self._exit_code()
        cause = self._cause_of_end(code)
        for task in self._tasks[:2]:
            # Wait only briefly, because a child of the trainer may hold the pipe open. Do not wait
            # for a killed process, because it has printed no explanation.
            if code != -signal.SIGKILL:
                await asyncio.wait([task], timeout=0.2)
            task.cancel()
        if self._writer is not None:
            self._writer.close()
        self._close_pipes()
        self._close_page()
        self._on_exit(self, cause)

    async def _is_read(self) -> bool:
        """Wait until the trainer's messages may be read."""
        if self._may_read is not None:
            await self._may_read.wait()
        return True

    def _close_pipes(self) -> None:
        if isinstance(self._process, ForkedProcess):
            self._process.close_pipes()
            return
        # Children of the trainer may hold their ends open. asyncio has no public way to close ours.
        transport = getattr(self._process, "_transport", None)
        if transport is not None:
            transport.close()

    async def _exit_code(self, patience_s: float = 5.0) -> int:
        # Poll, because ``Process.wait`` also waits for the pipes to close, and loader processes
        # outlive a killed trainer by seconds.
        assert self._process is not None
        deadline = time.monotonic() + patience_s
        while (code := self._process.returncode) is None:
            if time.monotonic() > deadline:
                self._process.kill()  # it closed the channel but has not exited
            await asyncio.sleep(0.002)
        return code

    def _cause_of_end(self, code: int) -> str:
        if self._killed_because:
            return self._killed_because
        if code < 0:
            name = signal.Signals(-code).name
            # The supervisor did not kill it. Linux sends SIGKILL when memory runs out, but so does
            # anyone's `kill -9`.
            is_memory = code == -signal.SIGKILL and count_oom_kills() > self._num_oom_kills
            guess = " (out of memory?)" if is_memory else ""
            return f"trainer {self.pid} was killed by {name}{guess}"
        return f"trainer {self.pid} exited with code {code}"

    async def _read_lines(self, stream: asyncio.StreamReader, level: str) -> None:
        try:
            await self._pass_lines(stream, level)
        except Exception:
            # Keep reading; otherwise the trainer would block once the pipe is full.
            logger.exception("a line of trainer %d could not be passed on", self.pid)
            while await _read(stream):
                pass

    async def _pass_lines(self, stream: asyncio.StreamReader, level: str) -> None:
        window, count, left_out = 0.0, 0, 0  # start of the current second, lines passed on, dropped
        while await self._is_read() and (line := await _read_line(stream)):
            now = time.monotonic()
            if now - window > 1:
                if left_out:
                    self.log(level, f"... {left_out} more lines dropped")
                window, count, left_out = now, 0, 0
            is_free = self._num_free_lines > 0
            if is_free:
                self._num_free_lines -= 1
            else:
                count += 1
            if count > MAX_LINES_PER_S:
                left_out += 1
            else:
                text = line.decode(errors="replace").rstrip()[:2000]
                self.log(level, text, is_printed=not is_free)

    def log(self, level: str, text: str, *, is_printed: bool = False) -> None:
        """Log a line as if the trainer had sent it."""
        line = TextLogged(level=level, text=text, is_printed=is_printed)
        self._on_message(self, encode(line))


def count_oom_kills() -> int:
    """Return the number of processes that Linux has killed since boot because memory ran out.

    The number includes containers' processes killed at their own limit. 0 if there is no such
    count.
    """
    try:
        lines = VMSTAT.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


async def _read(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read(1 << 20)
    except OSError:
        return b""


async def _read_line(stream: asyncio.StreamReader) -> bytes:
    try:
        return await stream.readline()
    except (OSError, ValueError):  # ValueError: a line longer than the limit
        return b"\n"
