"""The control channel of a supervisor and its trainer: length-prefixed msgpack.

Imports no torch, because the supervisor's process reads the other end of it.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import msgpack

_LENGTH = struct.Struct("!I")

Message = dict[str, Any]


def encode(message: Message) -> bytes:
    """Return one frame: four bytes of length, then msgpack.

    Texts of users may contain what UTF-8 cannot encode, such as a file name with a lone surrogate;
    it is escaped.
    """
    body: bytes = msgpack.packb(message, use_bin_type=True, unicode_errors="backslashreplace")
    return _LENGTH.pack(len(body)) + body


class FrameDecoder:
    """Cuts a stream of bytes into messages, wherever the pieces end."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yield the messages that are whole now."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield msgpack.unpackb(body, raw=False, strict_map_key=False)


class Channel:
    """The trainer's end: blocking reads by one thread, writes by any."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._decoder = FrameDecoder()
        self._ready: deque[Message] = deque()

    def send(self, message: Message) -> None:
        """Write one message. Raises ``OSError`` once the supervisor is gone."""
        frame = encode(message)
        with self._lock:
            self._sock.sendall(frame)

    def messages(self) -> Iterator[Message]:
        """Yield messages until the supervisor closes its end or dies. One reader at a time."""
        while True:
            while self._ready:
                yield self._ready.popleft()
            try:
                data = self._sock.recv(1 << 20)
            except OSError:
                return
            if not data:
                return
            self._ready.extend(self._decoder.feed(data))
