"""A real kernel, driven like a notebook: run cells, and return their output and status."""

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
"""Timeout for the start of a kernel and for a cell: the machine may be busy."""
ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, kw_only=True)
class Shown:
    """Result of one cell."""

    status: str
    """``ok`` or ``error``; "Run All" stops after an error."""
    text: str
    """Printed text and traceback without colors, and displays as ``text/plain``."""
    took_s: float


class Notebook:
    """A kernel process with working directory ``folder``."""

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
        """Output so far of each running cell, by request id."""

    @property
    def pid(self) -> int:
        """Process id of the kernel."""
        return int(self._manager.provisioner.pid)

    @property
    def is_alive(self) -> bool:
        """True unless the kernel was killed or closed."""
        return bool(self._manager.has_kernel)

    def send(self, code: str) -> str:
        """Start a cell and return its request id; ``finish`` waits for its end."""
        request = str(self._client.execute(code, store_history=True, stop_on_error=False))
        self._parts[request] = []
        while True:
            message = self._next_message(timeout=PATIENCE_S)
            is_mine = message["parent_header"].get("msg_id") == request
            if is_mine and message["msg_type"] == "execute_input":
                return request

    def read_until(self, request: str, words: str, timeout: float = PATIENCE_S) -> None:
        """Wait until a running cell has shown ``words``."""
        deadline = time.monotonic() + timeout
        while words not in "".join(self._parts[request]):
            self._take(self._next_message(timeout=deadline - time.monotonic()))

    def finish(self, request: str, timeout: float = PATIENCE_S) -> Shown:
        """Wait for the end of a cell and return its result."""
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
        """Return the status in the reply, by which "Run All" decides whether to stop."""
        return str(self._answer(request)["status"])

    def _answer(self, request: str, timeout: float = PATIENCE_S) -> dict[str, Any]:
        while True:
            reply = self._client.get_shell_msg(timeout=timeout)
            if reply["parent_header"].get("msg_id") == request:
                content: dict[str, Any] = reply["content"]
                return content

    def run(self, code: str, timeout: float = PATIENCE_S) -> Shown:
        """Run a cell and return its result."""
        return self.finish(self.send(code), timeout)

    def complete(self, code: str, cursor: int) -> dict[str, Any]:
        """Send a completion request (Tab) and return the reply."""
        return self._answer(self._client.complete(code, cursor))

    def inspect(self, code: str, cursor: int, detail_level: int = 0) -> dict[str, Any]:
        """Send an inspection request (Shift-Tab) and return the reply."""
        return self._answer(self._client.inspect(code, cursor, detail_level))

    def interrupt(self) -> None:
        """Interrupt the kernel."""
        self._manager.interrupt_kernel()

    def kill(self) -> None:
        """Kill the kernel with SIGKILL, as the out-of-memory killer does."""
        os.kill(self.pid, signal.SIGKILL)
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)

    def close(self) -> None:
        """Shut the kernel down."""
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
