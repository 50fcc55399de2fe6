"""The values of all ranks in one message: packed and compressed once, and sent to each rank."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence

import msgpack

CONNECTIONS = "connections"
"""Topic of the digests of the ranks' connections; see ``trainer.group.authentication``."""

WHOLE = b"\x00"
"""First byte of a value that is complete; see ``trainer.group.rendezvous``."""

DIGEST_BYTES = 16
DIGEST_MODULUS = 1 << 8 * DIGEST_BYTES
"""Digests of connections are summed modulo this number."""

_LEVEL = 1
"""Compression level. The fastest suffices, because the ranks' values resemble each other."""


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


def pack_digest(*, num: int, digest: int, error: str = "") -> bytes:
    """Return a rank's value under ``CONNECTIONS``."""
    return json.dumps({"num": num, "digest": f"{digest:x}", "error": error}).encode()


def sum_digests(values: Sequence[bytes]) -> list[bytes]:
    """Return values under ``CONNECTIONS`` with the same sum of digests, which compress well.

    The ranks need only the sum, and random digests cannot be compressed. The first value gets the
    sum, and the others get 0; counts and errors do not change. If any value is malformed, all
    values are returned unchanged, and the ranks refuse the malformed one.

    >>> parts = [pack_digest(num=1, digest=digest) for digest in (5, DIGEST_MODULUS - 5)]
    >>> sum_digests([WHOLE + part for part in parts]) == [WHOLE + pack_digest(num=1, digest=0)] * 2
    True
    """
    try:
        read = [json.loads(value.removeprefix(WHOLE)) for value in values]
        total = sum(int(value["digest"], 16) for value in read) % DIGEST_MODULUS
        return [
            WHOLE + pack_digest(num=value["num"], digest=0 if rank else total, error=value["error"])
            for rank, value in enumerate(read)
        ]
    except (ValueError, KeyError, TypeError, RecursionError):
        return list(values)
