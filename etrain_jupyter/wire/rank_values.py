"""The values of all ranks in one message: packed and compressed once, and sent to each rank."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import msgpack

_LEVEL = 1
"""Compression level: the values of the ranks resemble each other, so the fastest suffices."""


def pack_values(values: Sequence[bytes]) -> bytes:
    """Pack the ranks' values, in rank order.

    >>> unpack_values(pack_values([b"a", b"", b"c"]))
    [b'a', b'', b'c']
    """
    return zlib.compress(msgpack.packb(list(values)), _LEVEL)


def unpack_values(data: bytes) -> list[bytes]:
    """Undo ``pack_values``."""
    values: list[bytes] = msgpack.unpackb(zlib.decompress(data))
    return values
