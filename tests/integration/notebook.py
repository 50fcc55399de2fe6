"""A real kernel, driven as a notebook drives it: cells in, what they showed and how out."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jupyter_client.manager import KernelManager

PATIENCE_S = 120.0
"""Longest wait for a kernel, or for a cell's end: the machine may be busy."""
ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What one cell showed."""

    status: str
    """``ok`` or ``error``; after an error "Run All" stops."""
    text: str
    """What it printed and its error's lines, without colours; displays as ``text/plain``."""
    took_s: float


class Notebook:
    """A kernel in a process of its own, in ``folder``."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self._manager = KernelManager(kernel_name="python3")
        self._manager.start_kernel(
            cwd=str(folder),
            env={**os.environ, **environment},
            extra_arguments=["--HistoryManager.enabled=False"],
        )
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=PATIENCE_S)
        self._parts: dict[str, list[str]] = {}
        """What each cell that runs has shown so far."""

    @property
    def pid(self) -> int:
        """The kernel's process."""
        return int(self._manager.provisioner.pid)

    @property
    def is_alive(self) -> bool:
        """Whether the kernel was neither killed nor closed."""
        return bool(self._manager.has_kernel)

    def send(self, code: str) -> str:
        """Let a cell begin; ``finish`` waits for its end."""
        request = str(self._client.execute(code, store_history=True, stop_on_error=False))
        self._parts[request] = []
        while True:
            message = self._next_message(timeout=PATIENCE_S)
            is_mine = message["parent_header"].get("msg_id") == request
            if is_mine and message["msg_type"] == "execute_input":
                return request

    def read_until(self, request: str, words: str, timeout: float = PATIENCE_S) -> None:
        """Wait until a cell that runs has shown ``words``."""
        deadline = time.monotonic() + timeout
        while words not in "".join(self._parts[request]):
            self._take(self._next_message(timeout=deadline - time.monotonic()))

    def finish(self, request: str, timeout: float = PATIENCE_S) -> Shown:
        """Wait for a cell's end and return what it showed."""
        started = time.monotonic()
        deadline = started + timeout
        while True:
            message = self._next_message(timeout=deadline - time.monotonic())
            self._take(message)
            is_status = message["msg_type"] == "status"
            is_mine = message["parent_header"].get("msg_id") == request
            if is_mine and is_status and message["content"]["execution_state"] == "idle":
                break
        text = ANSI.sub("", "".join(self._parts.pop(request))).strip()
        return Shown(status=self._status_of(request), text=text, took_s=time.monotonic() - started)

    def _next_message(self, timeout: float) -> dict[str, Any]:
        message: dict[str, Any] = self._client.get_iopub_msg(timeout=max(0.01, timeout))
        return message

    def _take(self, message: dict[str, Any]) -> None:
        parts = self._parts.get(message["parent_header"].get("msg_id"))
        if parts is not None:
            parts.append(_text_of(message["msg_type"], message["content"]))

    def _status_of(self, request: str) -> str:
        """Return what "Run All" goes by: the status in the reply."""
        return str(self._answer(request)["status"])

    def _answer(self, request: str, timeout: float = PATIENCE_S) -> dict[str, Any]:
        while True:
            reply = self._client.get_shell_msg(timeout=timeout)
            if reply["parent_header"].get("msg_id") == request:
                content: dict[str, Any] = reply["content"]
                return content

    def run(self, code: str, timeout: float = PATIENCE_S) -> Shown:
        """Run a cell to its end."""
        return self.finish(self.send(code), timeout)

    def complete(self, code: str, cursor: int) -> dict[str, Any]:
        """Press Tab; return the kernel's answer."""
        return self._answer(self._client.complete(code, cursor))

    def inspect(self, code: str, cursor: int, detail_level: int = 0) -> dict[str, Any]:
        """Press Shift-Tab; return the kernel's answer."""
        return self._answer(self._client.inspect(code, cursor, detail_level))

    def interrupt(self) -> None:
        """Press the interrupt key."""
        self._manager.interrupt_kernel()

    def kill(self) -> None:
        """End the kernel with SIGKILL, as the out-of-memory killer does."""
        os.kill(self.pid, signal.SIGKILL)
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)

    def close(self) -> None:
        """End the kernel."""
        if self._manager.has_kernel:
            self._client.stop_channels()
            self._manager.shutdown_kernel(now=True)


def _text_of(kind: str, content: Mapping[str, Any]) -> str:
    if kind == "stream":
        return str(content["text"])
    if kind == "error":
        return "\n".join(content["traceback"]) + "\n"
    if kind in ("display_data", "execute_result"):
        return str(content["data"].get("text/plain", "")) + "\n"
    return ""
