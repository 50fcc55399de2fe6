"""Control channel between a supervisor and a trainer: length-prefixed msgpack.

This module does not import torch, because the supervisor also uses it to read the other end.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import msgpack

from etrain_jupyter.wire.codec import Encoded, encode
from etrain_jupyter.wire.messages import TO_TRAINER, Message, ToTrainer

_LENGTH = struct.Struct("!I")


def frame(data: Encoded) -> bytes:
    """Return one frame: the length in four bytes, big-endian, then the message in msgpack."""
    # The user's text may not be valid UTF-8; for example, a file name may contain a lone surrogate.
    # Escape it, because an exception here would lose the message, which may be an error report.
    body: bytes = msgpack.packb(data, use_bin_type=True, unicode_errors="backslashreplace")
    return _LENGTH.pack(len(body)) + body


class FrameDecoder:
    """Split a stream of bytes into encoded messages, regardless of chunk boundaries."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Yield the messages that are complete now; a ``Vocabulary`` decodes them."""
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
    """The trainer's end: one thread blocks on reads, and any thread may write."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        # ``sendall`` may write a large frame in several parts. If another thread's frame came in
        # between, the rest of the stream would be unreadable.
        self._lock = threading.Lock()
        self._decoder = FrameDecoder()
        # Persists between calls to ``messages``: the start-up code reads until LaunchTrainer, the
        # trainer's control thread reads the rest, and a single ``recv`` may have returned both.
        self._ready: deque[Any] = deque()

    def fileno(self) -> int:
        """Return the descriptor, to wait for messages with ``select``."""
        return self._sock.fileno()

    def close(self) -> None:
        """Close this end."""
        self._sock.close()

    def send(self, message: Message) -> None:
        """Write one message. Raises ``OSError`` once the supervisor is gone."""
        data = frame(encode(message))
        with self._lock:
            self._sock.sendall(data)

    def messages(self) -> Iterator[ToTrainer]:
        """Yield messages until the supervisor closes its end or dies. One reader at a time.

        Raises:
            MalformedMessageError: If the supervisor sends anything other than such a message.
        """
        while True:
            while self._ready:
                yield TO_TRAINER.decode(self._ready.popleft())
            try:
                data = self._sock.recv(1 << 20)
            except OSError:  # connection reset: the supervisor died before reading all our messages
                return
            if not data:
                return
            self._ready.extend(self._decoder.feed(data))
