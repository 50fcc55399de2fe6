"""Attacker process of ``strangers``: connects to every TCP port that is opened on this machine.

    python stranger.py MODE WORLD_SIZE

It lists the listeners through the kernel's ``sock_diag``, which any user may do, and connects to
new ones immediately. On each connection it sends a number that gloo interprets as a rank. Modes:
``place`` keeps the connections and reads from them; ``relay`` forwards the received bytes to a
connection of another port; ``flood`` opens 1,500 connections to each new port. At the end of its
standard input it prints its figures as JSON. It imports only the standard library, because root
starts it as another user, who may not be able to read any other package.
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401  (cannot be imported after switching the user)
import json
import os
import resource
import selectors
import socket
import struct
import sys
import time

NOBODY = 65534
LISTENING = "0A"
FLOOD = 1500
MAX_HELD = 8 * FLOOD
PAUSE_S = 0.0002
_TLS_ALERT = b"\x15\x03"


class Stranger:
    """Connect to listeners and count the received bytes."""

    def __init__(self, mode: str, world_size: int) -> None:
        self._mode, self._world_size = mode, world_size
        # Skip existing listeners: flooding the scheduler's port would only test Dask.
        self._known = find_listeners() if mode == "flood" else set()
        self._open = selectors.DefaultSelector()
        self._targets: list[socket.socket] = []
        self.figures = dict.fromkeys(("ports", "connections", "bytes", "tls_alerts"), 0)

    def look(self) -> None:
        """Attack the listeners that are new since the last scan."""
        found = find_listeners()
        for port, _ in found - self._known:
            self._attack(port)
        self._known = found

    def _attack(self, port: int) -> None:
        self.figures["ports"] += 1
        for index in range(FLOOD if self._mode == "flood" else self._world_size):
            data = b"" if self._mode == "flood" else struct.pack("=Q", index)
            with contextlib.suppress(OSError):
                self._connect(port, data)
        if self._mode != "flood":
            self._targets = self._targets[-2 * self._world_size :]
            return
        for old in self._targets[:-MAX_HELD]:
            self._drop(old)
        self._targets = self._targets[-MAX_HELD:]

    def _connect(self, port: int, data: bytes) -> None:
        connection = socket.socket()
        connection.setblocking(False)
        # On loopback, connecting succeeds immediately or never; do not wait for a closed listener.
        connection.connect_ex(("127.0.0.1", port))
        try:
            connection.send(data)
        except OSError:
            connection.close()
            return
        self._open.register(connection, selectors.EVENT_READ)
        self._targets.append(connection)
        self.figures["connections"] += 1

    def read(self) -> None:
        """Read from all connections, count the bytes, and forward them in mode ``relay``."""
        for key, _ in self._open.select(0):
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            try:
                data = connection.recv(1 << 20)
            except OSError:
                data = b""
            if not data:
                self._drop(connection)
            elif data.startswith(_TLS_ALERT):
                self.figures["tls_alerts"] += 1
            else:
                self.figures["bytes"] += len(data)
                self._pass_on(connection, data)

    def _drop(self, connection: socket.socket) -> None:
        if connection.fileno() >= 0:
            self._open.unregister(connection)
            connection.close()

    def _pass_on(self, source: socket.socket, data: bytes) -> None:
        if self._mode != "relay":
            return
        with contextlib.suppress(OSError):
            mine = source.getpeername()
            others = [t for t in self._targets if t.fileno() >= 0 and t.getpeername() != mine]
            if others:
                others[-1].sendall(data)


_DIAG = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4)  # NETLINK_SOCK_DIAG
_LISTENING, _DUMP, _BY_FAMILY, _DONE = 10, 0x301, 20, 3


def find_listeners() -> set[tuple[int, int]]:
    """Return port and inode of every listening TCP socket."""
    families = (socket.AF_INET, socket.AF_INET6)
    return {listener for family in families for listener in list_listeners(family)}


def list_listeners(family: int) -> list[tuple[int, int]]:
    """Return port and inode of the listening TCP sockets of one address family."""
    request = struct.pack("BBBxI", family, socket.IPPROTO_TCP, 0, 1 << _LISTENING) + bytes(48)
    _DIAG.send(struct.pack("IHHII", 16 + len(request), _BY_FAMILY, _DUMP, 0, 0) + request)
    found: list[tuple[int, int]] = []
    while True:
        data = _DIAG.recv(1 << 18)
        offset = 0
        while offset < len(data):
            length, kind = struct.unpack_from("IH", data, offset)
            if kind == _DONE:
                return found
            (port,) = struct.unpack_from("!H", data, offset + 20)
            (inode,) = struct.unpack_from("I", data, offset + 16 + 68)
            found.append((port, inode))
            offset += (length + 3) & ~3


def main() -> None:
    """Attack until standard input ends."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if os.getuid() == 0:
        with contextlib.suppress(OSError):  # real-time priority: never wait for a core
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    stranger = Stranger(sys.argv[1], int(sys.argv[2]))
    print(json.dumps({"uid": os.getuid()}), flush=True)
    end = selectors.DefaultSelector()
    end.register(sys.stdin, selectors.EVENT_READ)
    while not end.select(0):
        stranger.look()
        stranger.read()
        time.sleep(PAUSE_S)
    print(json.dumps(stranger.figures), flush=True)


if __name__ == "__main__":
    main()
