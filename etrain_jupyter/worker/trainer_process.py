"""One trainer process as its supervisor sees it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil

from etrain_jupyter.log.events import STACKS_ASKED
from etrain_jupyter.wire.channel import FrameDecoder, Message, encode
from etrain_jupyter.wire.progress_page import ProgressPage, TrainerProgress

logger = logging.getLogger("etrain.supervisor")

MAX_LINES_PER_S = 50
"""Printed lines that are passed on; what exceeds it is counted and left out."""

STACKS_S = 2.0
"""How long a trainer may take to write what its threads are doing."""

MAX_STACK_LINES = 500
"""Lines of that which are passed on."""


OnMessage = Callable[["TrainerProcess", Message], None]
OnExit = Callable[["TrainerProcess", str], None]


class TrainerProcess:
    """Starts a trainer, passes messages both ways, tells of its end. For one event loop."""

    def __init__(
        self, *, on_message: OnMessage, on_exit: OnExit, may_read: asyncio.Event | None = None
    ) -> None:
        self.name = ""
        """The trainer's name; empty while it is a spare."""
        self.pid = 0
        self._on_message = on_message
        self._on_exit = on_exit
        self._may_read = may_read
        """While it is clear, nothing that the trainer says is read: it waits when it has said what
        the channel holds."""
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._killed_because = ""
        self._early: list[bytes] = []
        self._page: ProgressPage | None = None
        self._num_free_lines = 0
        """Lines that are passed on however fast they come."""

    async def start(self) -> None:
        """Spawn the process; it imports torch and waits for a job."""
        with contextlib.ExitStack() as undo:
            ours, theirs = socket.socketpair()
            undo.callback(ours.close)
            with theirs:
                self._page = page = ProgressPage.create()
                undo.callback(self._close_page)
                self._process = await self._spawn(theirs, page)
            undo.pop_all()
        self.pid = self._process.pid
        if self._killed_because:  # meanwhile
            self._process.kill()
        reader, self._writer = await asyncio.open_connection(sock=ours)
        for frame in self._early:
            self._writer.write(frame)
        self._early = []
        streams = ((self._process.stdout, "info"), (self._process.stderr, "warning"))
        self._tasks = [
            asyncio.create_task(self._read_lines(stream, level))
            for stream, level in streams
            if stream
        ]
        self._tasks.append(asyncio.create_task(self._read_messages(reader)))

    async def _spawn(
        self, channel: socket.socket, page: ProgressPage
    ) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            *("-u", "-X", "faulthandler", "-m", "etrain_jupyter.trainer.main"),
            *(str(channel.fileno()), str(page.fd)),
            pass_fds=[channel.fileno(), page.fd],
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "ETRAIN_SUPERVISOR_PID": str(os.getpid())},
            start_new_session=True,  # an interrupt of the notebook must not reach it
            limit=1 << 20,
        )

    def _close_page(self) -> None:
        if self._page is not None:
            self._page.close()
            self._page = None

    def send(self, message: Message) -> None:
        """Pass a message to the trainer; one that is starting gets it when it reads."""
        frame = encode(message)
        if self._writer is None:
            self._early.append(frame)
        elif not self._writer.is_closing():
            self._writer.write(frame)

    def kill(self, why: str = "") -> None:
        """End the process with SIGKILL."""
        self._killed_because = self._killed_because or why or "killed"
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def progress(self) -> TrainerProgress | None:
        """Return how far it is, whatever it does just now; None before its start and at its end."""
        return self._page.read() if self._page is not None else None

    def process_state(self) -> str:
        """Return how the system sees the process: ``running``, ``sleeping``, ``stopped`` ..."""
        try:
            return str(psutil.Process(self.pid).status())
        except psutil.Error:
            return "gone"

    def send_signal(self, number: signal.Signals) -> None:
        """Send the process a signal, if it lives."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def tell_stacks(self) -> None:
        """Log what each of its threads is doing, as far as that can be found out.

        The trainer writes it from within a signal's handler, so that it also tells of a thread
        that holds the interpreter's lock; but a process that is stopped writes nothing.
        """
        state = self.process_state()
        if self._page is None or not self._page.has_pulsed() or state == "stopped":
            text = f"trainer {self.pid} is {state}: what its threads are doing cannot be told"
            self._tell_line("warning", text)
            return
        self._tell_line("warning", STACKS_ASKED)
        self._num_free_lines = MAX_STACK_LINES
        self.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + STACKS_S
        # It ends with the main thread's oldest frame, and nothing tells that it was the last line.
        left = -1
        while left != self._num_free_lines and time.monotonic() < deadline:
            left = self._num_free_lines
            await asyncio.sleep(STACKS_S / 8)

    async def wait(self) -> None:
        """Wait until the process has ended."""
        if self._process is not None:
            await self._exit_code()

    async def _read_messages(self, reader: asyncio.StreamReader) -> None:
        decoder = FrameDecoder()
        try:
            while await self._is_read() and (data := await _read(reader)):
                for message in decoder.feed(data):
                    self._on_message(self, message)
        except Exception as exc:
            # Bytes that are no message, or a defect of ours: nobody could follow it any more.
            logger.exception("what trainer %d sends cannot be read", self.pid)
            self.kill(f"what it sends cannot be read: {type(exc).__name__}: {exc}")
        code = await self._exit_code()
        cause = self._cause_of_end(code)
        for task in self._tasks[:2]:
            # What a crash printed comes first; a child of the trainer may hold the pipe open for
            # ever. A process that was killed has no last words to wait for.
            if code != -signal.SIGKILL:
                await asyncio.wait([task], timeout=0.2)
            task.cancel()
        if self._writer is not None:
            self._writer.close()
        self._close_pipes()
        self._close_page()
        self._on_exit(self, cause)

    async def _is_read(self) -> bool:
        """Wait until what the trainer says may be read."""
        if self._may_read is not None:
            await self._may_read.wait()
        return True

    def _close_pipes(self) -> None:
        """Close our ends of the pipes, whoever holds the others; asyncio has no public way."""
        transport = getattr(self._process, "_transport", None)
        if transport is not None:
            transport.close()

    async def _exit_code(self, patience_s: float = 5.0) -> int:
        """Wait for the end of the process alone.

        ``Process.wait`` also waits until nobody holds its pipes any more, and loader processes
        outlive a killed trainer by seconds.
        """
        assert self._process is not None
        deadline = time.monotonic() + patience_s
        while (code := self._process.returncode) is None:
            if time.monotonic() > deadline:
                self._process.kill()  # it closed the channel, but would not end
            await asyncio.sleep(0.002)
        return code

    def _cause_of_end(self, code: int) -> str:
        if self._killed_because:
            return self._killed_because
        if code < 0:
            name = signal.Signals(-code).name
            # Nobody of us did it; the system does it where memory runs out.
            guess = " (out of memory?)" if code == -signal.SIGKILL else ""
            return f"trainer {self.pid} was ended by {name}{guess}"
        return f"trainer {self.pid} exited with code {code}"

    async def _read_lines(self, stream: asyncio.StreamReader, level: str) -> None:
        try:
            await self._pass_lines(stream, level)
        except Exception:
            # It may not stop to be read: the trainer would wait for that when the pipe is full.
            logger.exception("a line of trainer %d could not be passed on", self.pid)
            while await _read(stream):
                pass

    async def _pass_lines(self, stream: asyncio.StreamReader, level: str) -> None:
        window, count, left_out = 0.0, 0, 0
        while await self._is_read() and (line := await _read_line(stream)):
            now = time.monotonic()
            if now - window > 1:
                if left_out:
                    self._tell_line(level, f"... {left_out} more lines left out")
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
                self._tell_line(level, text, is_printed=not is_free)

    def say(self, level: str, text: str) -> None:
        """Log a line about it."""
        self._tell_line(level, text)

    def _tell_line(self, level: str, text: str, *, is_printed: bool = False) -> None:
        message: dict[str, Any] = {"op": "log", "level": level, "text": text}
        if is_printed:
            message["is_printed"] = True  # the job's log takes a bounded number of these
        self._on_message(self, message)


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
