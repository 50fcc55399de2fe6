"""The power switch of instances: parse ``shutdown`` commands, and listen for them."""

from __future__ import annotations

import json
import re
import socket
import socketserver
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from etrain_jupyter.plugins.ec2.simulator.guest.shutdown import SOCKET
from etrain_jupyter.testing.serving import serve_in_thread


@dataclass(frozen=True, kw_only=True)
class PowerCommand:
    """A parsed ``shutdown`` command."""

    minutes: int | None
    """Minutes until power-off; None cancels a scheduled one."""


def parse_arguments(arguments: list[str]) -> PowerCommand:
    """Parse the arguments of shutdown(8), as far as needed for powering off.

    Raises:
        ValueError: If they are invalid, with the command's output.

    >>> parse_arguments(["-h", "+15"])
    PowerCommand(minutes=15)
    >>> parse_arguments(["-c"]), parse_arguments(["-P", "now", "the", "end"])
    (PowerCommand(minutes=None), PowerCommand(minutes=0))
    """
    # Anything after the time is a message to logged-in users, and is ignored.
    flags = [word for word in arguments if word.startswith("-")]
    rest = [word for word in arguments if not word.startswith("-")]
    known = {"-h", "-P", "-H", "-c", "--poweroff", "--halt", "--no-wall"}
    for flag in flags:
        if flag not in known:
            raise ValueError(f"shutdown: unsupported option {flag} in a fake instance")
    if "-c" in flags:
        return PowerCommand(minutes=None)
    when = rest[0] if rest else "+1"
    if when == "now":
        return PowerCommand(minutes=0)
    if not re.fullmatch(r"\+?\d+", when):
        raise ValueError(f"Failed to parse time specification: {when}")
    return PowerCommand(minutes=int(when))


class PowerSwitch:
    """Listen for the ``shutdown`` commands of all instances on a socket in a folder, in threads."""

    def __init__(self, folder: Path, on_command: Callable[[str, PowerCommand], str]) -> None:
        """Start listening.

        Args:
            folder: Folder for the socket.
            on_command: Executes a command on an instance; returns the output.
        """
        self._server = _PowerServer(folder, on_command)
        self._thread = serve_in_thread(self._server, "power")

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _PowerServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 64  # all machines of a cluster may shut down at once; the default is 5

    def __init__(self, folder: Path, on_command: Callable[[str, PowerCommand], str]) -> None:
        self.on_command = on_command
        super().__init__(str(folder / SOCKET), _PowerHandler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing if the machine was switched off during the request."""


class _PowerHandler(socketserver.StreamRequestHandler):
    request: socket.socket

    def handle(self) -> None:
        message = json.loads(self.rfile.readline())
        status = 0
        try:
            command = parse_arguments(message["arguments"])
            text = cast(_PowerServer, self.server).on_command(message["instance"], command)
        except ValueError as exc:
            text, status = str(exc), 1
        # The command may be gone: after `shutdown now`, its process is killed, too.
        with suppress(OSError):
            self.wfile.write(json.dumps({"text": text, "status": status}).encode() + b"\n")
