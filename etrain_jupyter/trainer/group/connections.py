"""Check that each pair of ranks has one connection, listed from both ends."""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from etrain_jupyter.wire.rank_values import DIGEST_BYTES, DIGEST_MODULUS

End = tuple[str, int]
"""Address and port."""

Pair = tuple[End, End]
"""The two ends of a connection, as returned by ``getsockname`` and ``getpeername``."""


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """Difference between the listed connections and exactly one connection per pair of ranks."""

    unknown: tuple[tuple[int, Pair], ...]
    """Connections that no other rank lists from the other end, each with the rank that lists it."""
    ranks: tuple[int, ...]
    """Ranks that are not connected to every other rank exactly once."""


def find_mismatch(listed: Mapping[int, Sequence[Pair]]) -> Mismatch | None:
    """Return how the lists differ from one connection per pair of ranks; None if they do not.

    A connection to a stranger or a relay has an end that no rank lists.

    >>> a, b, c = ("h", 1), ("h", 2), ("h", 3)
    >>> find_mismatch({0: [(a, b)], 1: [(b, a)]})
    >>> find_mismatch({0: [(a, c)], 1: [(b, a)]}).ranks
    (0, 1)
    """
    # Both ends of a connection list it, in opposite order. So the rank at the far end of (near,
    # far) is the rank that lists (far, near).
    rank_of = {pair: rank for rank, pairs in listed.items() for pair in pairs}
    unknown, wrong = [], []
    for rank, pairs in listed.items():
        peers = [rank_of.get((far, near)) for near, far in pairs]
        unknown += [
            (rank, pair)
            for pair, peer in zip(pairs, peers, strict=True)
            if peer is None or peer == rank
        ]
        # gloo makes exactly one connection per pair of ranks.
        others = sorted(set(listed) - {rank})
        if sorted(-1 if peer is None else peer for peer in peers) != others:
            wrong.append(rank)
    if not wrong:
        return None
    return Mismatch(unknown=tuple(unknown), ranks=tuple(wrong))


def digest_of(pairs: Sequence[Pair], secret: bytes) -> int:
    """Return a digest of one rank's connections; all digests sum to 0 modulo DIGEST_MODULUS.

    The sum is 0 only if each connection is listed as often from one end as from the other, as are
    all connections between ranks. A connection to a stranger or a relay is listed from one end
    only. The secret keeps strangers from choosing addresses whose digests cancel out.

    >>> a, b, c = ("h", 1), ("h", 2), ("h", 3)
    >>> (digest_of([(a, b)], b"s") + digest_of([(b, a)], b"s")) % DIGEST_MODULUS
    0
    >>> (digest_of([(a, c)], b"s") + digest_of([(b, a)], b"s")) % DIGEST_MODULUS == 0
    False
    """
    total = 0
    for near, far in pairs:
        first, second = sorted((near, far))
        hashed = blake2b(repr((first, second)).encode(), key=secret, digest_size=DIGEST_BYTES)
        sign = 1 if near == first else -1
        total += sign * int.from_bytes(hashed.digest(), "little")
    return total % DIGEST_MODULUS


def pair_of(connection: socket.socket) -> Pair:
    """Return both ends of a connection. Raises ``OSError`` if the socket is not connected."""
    return _end(connection.getsockname()), _end(connection.getpeername())


def _end(address: tuple[str, int]) -> End:
    # Normalized because both ends must list the same text. The interface in a link-local address
    # (fe80::1%eth0) differs between machines, and one end may see IPv4 mapped to IPv6.
    host = address[0].partition("%")[0]
    return host.removeprefix("::ffff:"), int(address[1])


def encode(pairs: Sequence[Pair]) -> list[list[list[object]]]:
    """Return the connections as lists for JSON."""
    return [[list(near), list(far)] for near, far in pairs]


def decode(values: object) -> list[Pair]:
    """Undo ``encode``."""
    assert isinstance(values, list)
    return [((a, int(b)), (c, int(d))) for (a, b), (c, d) in values]


def format_end(end: End) -> str:
    """Return ``address:port``.

    >>> format_end(("::1", 80))
    '[::1]:80'
    """
    host, port = end
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def find_uid(pair: Pair) -> int | None:
    """Return the user ID of the process at the far end, if it runs on this machine."""
    near, far = pair
    # Find the row of the far end's socket, whose local address is our far end. There is no such row
    # if the process runs on another machine or in another network namespace.
    for file, is_ipv6 in (("/proc/net/tcp", False), ("/proc/net/tcp6", True)):
        try:
            wanted = [_as_listed(far, is_ipv6), _as_listed(near, is_ipv6)]
            with open(file) as table:
                rows = [line.split() for line in table]
        except (OSError, ValueError):
            continue
        for row in rows:
            if row[1:3] == wanted and row[9] != "0":  # a closed socket has no owner: inode 0, uid 0
                return int(row[7])
    return None


def _as_listed(end: End, is_ipv6: bool) -> str:
    # As in the kernel's tables: 32-bit words in the machine's byte order.
    host, port = end
    address = ipaddress.ip_address(host)
    if is_ipv6 and address.version == 4:
        address = ipaddress.ip_address(f"::ffff:{host}")
    if not is_ipv6 and address.version == 6:
        raise ValueError(f"{host} is an IPv6 address")
    packed = address.packed
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"
