"""Read Dask's messages from a connection: all that have arrived at once, instead of in parts.

Dask's ``comm.read`` waits for the length of a message and then for the rest, and unregisters the
socket from the event loop in between. That costs the scheduler more than to handle a short message.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

CHUNK_BYTES = 1 << 20
"""Maximum number of bytes per read."""

MAX_FRAMES = 10_000
"""Maximum number of frames of a message; plain values take one."""

_LENGTHS = struct.Struct("QQ")


class MalformedFramesError(ValueError):
    """A peer sent bytes that are not one of Dask's messages."""


def split_messages(buffer: bytearray) -> Iterator[bytes]:
    """Remove each complete message from the start of a buffer, and yield its first frame.

    ::

        Q: length of some of the frames | Q: number of frames | Q: length of each | frames

    Raises:
        MalformedFramesError: If the buffer does not start with a message.
    """
    while len(buffer) >= _LENGTHS.size:
        _, num_frames = _LENGTHS.unpack_from(buffer)
        if not 1 <= num_frames <= MAX_FRAMES:
            raise MalformedFramesError(f"a message has {num_frames} frames")
        start = _LENGTHS.size + 8 * num_frames
        if len(buffer) < start:
            return
        lengths = struct.unpack_from(f"{num_frames}Q", buffer, _LENGTHS.size)
        end = start + sum(lengths)
        if len(buffer) < end:
            return
        first = bytes(buffer[start : start + lengths[0]])
        del buffer[:end]
        yield first


class FrameReader:
    """Read and decode the messages of one connection, one at a time and in order.

    Args:
        comm: Dask's connection over TCP or TLS, at the start of a message. Nothing else reads it.
        decode: Decodes a message, given its frames.
    """

    def __init__(self, comm: Any, decode: Callable[[list[bytes]], Any]) -> None:
        self._comm = comm
        self._decode = decode
        self._buffer = bytearray()
        self._ready: deque[bytes] = deque()

    async def read(self, deserializers: Any = None) -> Any:
        """Return the next message.

        Raises:
            CommClosedError: If the connection has ended.
        """
        from distributed.comm.core import CommClosedError

        try:
            while not self._ready:
                if (stream := self._comm.stream) is None:
                    raise CommClosedError(f"in {self._comm}: the connection is closed")
                self._buffer += await stream.read_bytes(CHUNK_BYTES, partial=True)
                self._ready.extend(split_messages(self._buffer))
            return self._decode([self._ready.popleft()])
        except OSError as exc:  # also tornado's StreamClosedError and those of TLS
            self._comm.abort()
            if isinstance(exc, CommClosedError):
                raise
            raise CommClosedError(f"in {self._comm}: {type(exc).__name__}: {exc}") from exc
        except BaseException:
            # Perhaps some bytes of a message are lost, so the rest cannot be read.
            self._comm.abort()
            raise
