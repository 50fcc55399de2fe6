r"""Walk the messages of an Arrow IPC file or stream by their headers, without their bodies.

pyarrow reads whole messages and does not report their offsets, which are needed to fetch one record
batch out of a file. The layout is fixed by the Arrow columnar format::

    file      "ARROW1\0\0"  message message ...  end  footer  footer size  "ARROW1"
    stream                   message message ...  end
    message   FF FF FF FF  metadata size (int32)  metadata (flatbuffer)  body
    end       FF FF FF FF  0
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

MAGIC = b"ARROW1"
_CONTINUATION = b"\xff\xff\xff\xff"
_FILE_START = 8
_HEADER_BYTES = 4096
"""Bytes to read at once: the metadata of a record batch with few columns."""
_KINDS: dict[int, Literal["schema", "dictionary", "batch"]] = {
    1: "schema",
    2: "dictionary",
    3: "batch",
}

Read = Callable[[int, int], bytes]
"""Returns ``size`` bytes from ``first``."""


class Message(NamedTuple):
    """A message in a file."""

    kind: Literal["schema", "dictionary", "batch"]
    first: int
    """Offset of its first byte."""
    size: int
    """Number of bytes, with its body."""
    rows: int
    """Rows of a record batch, otherwise 0."""


class InvalidMessageError(ValueError):
    """The bytes are not a message, or the file ends within one."""


def walk_messages(read: Read, size: int) -> Iterator[Message]:
    """Yield the messages of an IPC file or stream of ``size`` bytes.

    Raises:
        InvalidMessageError: If the file is truncated, or is not in this format.
    """
    position = 0
    if size >= _FILE_START and read(0, len(MAGIC)) == MAGIC:
        if read(size - len(MAGIC), len(MAGIC)) != MAGIC:
            raise InvalidMessageError("it has no footer")
        position = _FILE_START
    while position < size:
        head = read(position, min(_HEADER_BYTES, size - position))
        if len(head) < 8 or head[:4] != _CONTINUATION:
            raise InvalidMessageError(f"byte {position} does not begin a message")
        (metadata_size,) = struct.unpack_from("<i", head, 4)
        if metadata_size == 0:
            return
        if metadata_size < 0 or position + 8 + metadata_size > size:
            raise InvalidMessageError(f"it ends within the message at byte {position}")
        if len(head) < 8 + metadata_size:
            head = read(position, 8 + metadata_size)
        message = _parse(head[8 : 8 + metadata_size], position)
        if position + message.size > size:
            raise InvalidMessageError(f"it ends within the message at byte {position}")
        yield message
        position += message.size


def _parse(metadata: bytes, position: int) -> Message:
    # The flatbuffer table Message: version, header type, header, body length.
    try:
        table = _uint32(metadata, 0)
        kind_at, header_at, body_at = (_field(metadata, table, slot) for slot in (1, 2, 3))
        kind = _KINDS.get(metadata[kind_at]) if kind_at else None
        if kind is None or not header_at:
            raise InvalidMessageError(f"the message at byte {position} has an unknown type")
        (body,) = struct.unpack_from("<q", metadata, body_at) if body_at else (0,)
        rows = 0
        if kind == "batch":
            header = header_at + _uint32(metadata, header_at)
            rows_at = _field(metadata, header, 0)
            (rows,) = struct.unpack_from("<q", metadata, rows_at) if rows_at else (0,)
    except (struct.error, IndexError) as exc:
        raise InvalidMessageError(f"the message at byte {position} is malformed") from exc
    if body < 0 or rows < 0:
        raise InvalidMessageError(f"the message at byte {position} is malformed")
    return Message(kind, position, 8 + len(metadata) + body, rows)


def _field(data: bytes, table: int, slot: int) -> int:
    """Return the position of a field of a flatbuffer table; 0 if it has its default value."""
    (back,) = struct.unpack_from("<i", data, table)
    vtable = table - back
    (vtable_size,) = struct.unpack_from("<H", data, vtable)
    if 4 + 2 * slot >= vtable_size:
        return 0
    (offset,) = struct.unpack_from("<H", data, vtable + 4 + 2 * slot)
    return table + int(offset) if offset else 0


def _uint32(data: bytes, at: int) -> int:
    return int(struct.unpack_from("<I", data, at)[0])
