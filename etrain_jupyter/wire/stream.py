"""Send messages over Dask's connection between the scheduler and a worker, in Dask's format.

Dask queues each message, wakes a coroutine for it, measures and packs it, and then writes. For a
message to each of 1,000 workers, that takes longer than the writes themselves. Here, the messages
of one turn of the event loop are written together, and fields that all recipients share are packed
once. The receiver reads them as any of Dask's messages::

    Q: length of the rest | Q: 1 frame | Q: its length | msgpack: [{"op": ..., "message": ...}, ...]
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import struct
from collections.abc import Mapping
from typing import Any

import msgpack

from etrain_jupyter.wire.codec import Encoded

_HEADER = struct.Struct("QQQ")
_NUM_LENGTHS = 16
"""Size in bytes of the part of the header that is included in the length of the rest."""

START_POLL_S = 0.002
"""Seconds between checks for a connection that Dask has not started yet; messages wait for it."""


_OPTIONS: dict[str, Any] = {"use_bin_type": True, "unicode_errors": "backslashreplace"}
"""Options with which Dask packs values, except that invalid UTF-8 is escaped and not refused."""


def pack(value: Any) -> bytes:
    """Pack a value."""
    packed: bytes = msgpack.packb(value, **_OPTIONS)
    return packed


class SharedFields:
    """The fields of a message that are the same for all recipients, packed once.

    >>> shared = SharedFields({"kind": "BreakGeneration", "generation": 3})
    >>> msgpack.unpackb(b"".join(shared.pack_with({"trainer": "j/w1/1"})))
    {'trainer': 'j/w1/1', 'kind': 'BreakGeneration', 'generation': 3}
    """

    def __init__(self, fields: Encoded) -> None:
        self._fields = fields
        # For short values, eight times faster than ``packb``, which allocates a buffer for each.
        self._pack = pack = msgpack.Packer(**_OPTIONS).pack
        self._packed = b"".join([pack(part) for pair in fields.items() for part in pair])

    def pack_with(self, own: Mapping[str, Any]) -> list[bytes]:
        """Return the parts of the packed message with a recipient's own fields."""
        pack = self._pack
        parts = [_map_header(len(own) + len(self._fields))]
        parts += [pack(part) for pair in own.items() for part in pair]
        # The shared part is not copied here, because the values of all ranks are long.
        parts.append(self._packed)
        return parts

    def merge(self, own: Mapping[str, Any]) -> Encoded:
        """Return the message with a recipient's own fields, not packed."""
        return {**self._fields, **own}


class MessageStream:
    """Messages to one peer, in order, over the connection of one of Dask's ``BatchedSend``.

    Dask's own messages on the connection may overtake them, or fall behind; each is written whole.

    Args:
        batched: Dask's queue for the connection. Any other object gets each message by ``send``.
        op: Name of the peer's stream handler.
    """

    def __init__(self, batched: Any, op: str) -> None:
        self.batched = batched
        self._op = op
        self._prefix = _map_header(2) + pack("op") + pack(op) + pack("message")
        self._is_direct = hasattr(batched, "comm")
        self._waiting: list[list[bytes]] = []
        """The parts of each message."""

    @property
    def is_closed(self) -> bool:
        """True if the connection has ended."""
        return self._is_direct and self.batched.comm is not None and self.batched.comm.closed()

    def send(self, message: Encoded) -> None:
        """Send a message at the end of this turn of the event loop; drop it if that is too late."""
        if self._is_direct:
            self._put([pack(message)])
        else:
            self.batched.send({"op": self._op, "message": message})

    def send_shared(self, shared: SharedFields, own: Mapping[str, Any]) -> None:
        """Send a message to one of several recipients."""
        if self._is_direct:
            self._put(shared.pack_with(own))
        else:
            self.send(shared.merge(own))

    def _put(self, parts: list[bytes]) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting.append([self._prefix, *parts])

    def _flush(self) -> None:
        comm = self.batched.comm
        if comm is None:  # the peer's registration has not been answered yet
            asyncio.get_running_loop().call_later(START_POLL_S, self._flush)
            return
        waiting, self._waiting = self._waiting, []
        # Dask writes a whole message without waiting, so none is cut in two here.
        if not comm.closed() and not comm.stream.closed():
            comm.stream.write(frame_of(waiting))


def frame_of(messages: list[list[bytes]]) -> bytes:
    """Return a frame in Dask's format, given the packed parts of each message."""
    parts = [_array_header(len(messages)), *itertools.chain.from_iterable(messages)]
    length = sum(map(len, parts))
    return b"".join([_HEADER.pack(_NUM_LENGTHS + length, 1, length), *parts])


@functools.cache
def _map_header(num: int) -> bytes:
    header: bytes = msgpack.Packer().pack_map_header(num)
    return header


@functools.cache
def _array_header(num: int) -> bytes:
    header: bytes = msgpack.Packer().pack_array_header(num)
    return header
