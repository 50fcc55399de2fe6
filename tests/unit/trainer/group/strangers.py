"""A stranger: a process that is not a rank and connects to the ranks' ports, if possible as another
user.

Run as a script, it reads commands from its standard input, a line of JSON each, and answers each
with a line. It imports nothing of ours, and no torch.
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401  (for addresses; another user may not read this installation)
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

NOBODY = 65534


class Stranger:
    """Handle of the stranger's process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._lock = threading.Lock()  # the ranks of a test are threads

    def ask(self, **command: Any) -> Any:
        """Send a command and return the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            print(json.dumps(command), file=self._process.stdin, flush=True)
            return json.loads(self._process.stdout.readline())

    def connect(self, end: tuple[str, int], data: bytes = b"", *, then: str = "hold") -> None:
        """Connect and send; then hold the connection, or end it by ``fin`` or ``rst``."""
        self.ask(do="connect", end=end, data=data.hex(), then=then)

    def flood(self, end: tuple[str, int], count: int) -> int:
        """Open connections, hold them, and return how many were accepted."""
        return int(self.ask(do="flood", end=end, count=count))

    def relay(self, to: tuple[str, int]) -> int:
        """Listen, forward everything to another port, and return the relay's port.

        gloo compares ports to decide which rank connects; the relay's compares as a very low one.
        """
        return int(self.ask(do="relay", end=to))

    def num_received(self) -> int:
        """Return the number of bytes that its connections and relays have received so far."""
        return int(self.ask(do="received"))


@contextlib.contextmanager
def stranger() -> Iterator[Stranger]:
    """Start one; it is another user's process if the tests run as root."""
    process = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        try:
            yield Stranger(process)
        finally:
            process.kill()


def uid_of_stranger() -> int:
    """Return the user ID of the process."""
    return NOBODY if os.getuid() == 0 else os.getuid()


class _Serving:
    def __init__(self) -> None:
        self._held: list[socket.socket] = []
        self._relayed = 0

    def connect(self, end: list[Any], data: str, then: str, **_: Any) -> bool:
        connection = socket.create_connection((end[0], end[1]))
        connection.sendall(bytes.fromhex(data))
        if then == "fin":
            connection.shutdown(socket.SHUT_WR)
        if then == "rst":
            linger = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            connection.close()
        else:
            self._held.append(connection)
        return True

    def flood(self, end: list[Any], count: int, **_: Any) -> int:
        before = len(self._held)
        with contextlib.suppress(OSError):
            for _ in range(count):
                self._held.append(socket.create_connection((end[0], end[1]), timeout=0.5))
        return len(self._held) - before

    def relay(self, end: list[Any], **_: Any) -> int:
        family = socket.AF_INET6 if ":" in end[0] else socket.AF_INET
        for port in range(0x4000, 0x8000, 0x100):
            with contextlib.suppress(OSError):
                listener = socket.create_server((end[0], port), family=family)
                break
        threading.Thread(target=self._relay, args=(listener, end), daemon=True).start()
        return int(listener.getsockname()[1])

    def _relay(self, listener: socket.socket, end: list[Any]) -> None:
        while True:
            near = listener.accept()[0]
            far = socket.create_connection((end[0], end[1]))
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=(source, target), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._relayed += len(data)
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def received(self, **_: Any) -> int:
        count = self._relayed
        for connection in self._held:
            connection.setblocking(False)
            with contextlib.suppress(OSError):
                while data := connection.recv(65536):
                    count += len(data)
        return count


def _serve() -> None:
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    serving = _Serving()
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(getattr(serving, command["do"])(**command)), flush=True)


if __name__ == "__main__":
    _serve()
