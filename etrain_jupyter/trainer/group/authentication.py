"""Authenticate the ranks' connections before any tensor is sent, to reject strangers and relays.

gloo has no authentication: its listener gives a rank's place to the first connection that sends the
8-byte number of a pair (0, 1, 2 ...). So after gloo has connected, each rank publishes a keyed
digest of both ends of its connections over the authenticated control channel. The digests of all
ranks cancel out if and only if each connection is listed once from each end. All ranks add up the
same digests, so all of them accept the group or all refuse it, before any tensor is sent. The
coordinator, which chose the key, may already have summed them (``wire.rank_values.sum_digests``).

The size of a digest does not depend on the size of the group. If the digests do not cancel out, the
ranks of a small group also publish the connections themselves, so that the error can name the
stranger.

This does not detect an attacker on the path between two machines (a router, ARP spoofing) that
leaves the addresses unchanged; only encryption protects against that. The two ends of a connection
through NAT do not match, so such connections are refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from etrain_jupyter.trainer.group.connections import (
    Pair,
    decode,
    digest_of,
    encode,
    find_mismatch,
    find_uid,
    format_end,
)
from etrain_jupyter.trainer.group.gloo_device import GlooDevice
from etrain_jupyter.trainer.group.rendezvous import FORM_TIMEOUT_S, CommunicationError
from etrain_jupyter.wire.rank_values import CONNECTIONS, DIGEST_MODULUS, pack_digest

MAX_UNCLAIMED = 1024
"""Maximum number of connections that have not sent a rank's number. Each rank opens only one
connection. Many more would exhaust the file descriptors, and gloo terminates the process if
``accept`` fails."""

DESCRIPTION_TIMEOUT_S = 5.0
"""Timeout for receiving other ranks' descriptions of unknown connections."""

MAX_LISTED = 64
"""Maximum size of a group whose ranks publish their connections to name a stranger. The lists grow
with the square of the number of ranks, and each rank reads all lists."""

MAX_DESCRIBED = 3
"""Maximum number of unknown connections listed in a message; the rest are only counted."""


class UnknownPeerError(CommunicationError):
    """A connection in this generation is not between two of its ranks."""


def authenticate(
    device: GlooDevice, store: Any, *, rank: int, world_size: int, secret: bytes
) -> None:
    """Compare the connections of all ranks, and refuse further connections.

    Call this after gloo has connected and before anything is sent. Blocks until every rank has
    called this or ``give_up``.

    Args:
        device: This rank's device.
        store: The authenticated rendezvous store of the generation.
        rank: This rank.
        world_size: Number of ranks.
        secret: Key of the digests; the same on all ranks, and unknown to all other processes.

    Raises:
        UnknownPeerError: A connection is not between two ranks. Raised on all ranks or none.
        CommunicationError: A rank could not connect, or the connections cannot be listed.
    """
    # A stranger that sends a rank's number first takes the rank's place, and the rank's own
    # connection is never claimed. Comparing the ends of all connections reveals this on every rank:
    #
    #     rank 0 lists   (A, S)           S is the stranger: no rank lists (S, A)
    #     rank 1 lists   (B, A)           rank 0 does not list (A, B)
    #     result         mismatch on both ranks, before any tensor is sent
    claimed = [each.pair for each in device.connections() if each.is_claimed]
    _publish(store, rank, num=len(claimed), digest=digest_of(claimed, secret))
    reports = _collect(store, CONNECTIONS, range(world_size))
    # Seal the listener only after all ranks have published, because until then a rank may still
    # have to connect.
    device.seal()
    errors = [
        f"rank {other}: {value['error']}" for other, value in reports.items() if value["error"]
    ]
    if errors:
        raise CommunicationError("; ".join(errors))
    is_complete = all(value["num"] == world_size - 1 for value in reports.values())
    total = sum(int(value["digest"], 16) for value in reports.values()) % DIGEST_MODULUS
    if is_complete and total == 0:
        return
    if world_size > MAX_LISTED:
        raise UnknownPeerError(_refusal([], []))
    store.set(f"listed/{rank}", json.dumps(encode(claimed)))
    lists = _collect(store, "listed", range(world_size))
    mismatch = find_mismatch({other: decode(pairs) for other, pairs in lists.items()})
    if mismatch is None:  # only the digests differ, so some rank has another secret
        raise UnknownPeerError(_refusal([], []))
    # Only the rank that holds an unknown connection can look up the process at its far end. It
    # publishes the description, so that all ranks report the same error.
    mine = [pair for holder, pair in mismatch.unknown if holder == rank]
    if mine:
        store.set(f"unknown/{rank}", json.dumps(_describe(device, rank, mine)))
    holders = sorted({holder for holder, _ in mismatch.unknown})
    descriptions = _collect(store, "unknown", holders, DESCRIPTION_TIMEOUT_S)
    raise UnknownPeerError(_refusal(mismatch.ranks, [*descriptions.values()]))


def give_up(store: Any, rank: int, error: Exception) -> None:
    """Publish that this rank could not connect, so that the other ranks do not wait for it."""
    # Use the key that ``authenticate`` waits for on the other ranks. Publish only the first line,
    # because the following lines of a C++ error are a stack trace.
    text = str(error).strip().partition("\n")[0] or type(error).__name__
    _publish(store, rank, num=0, digest=0, error=text)


def raise_if_flooded(device: GlooDevice) -> None:
    """Refuse the group and seal its listener before the process runs out of descriptors.

    Raises:
        UnknownPeerError: There are far more connections than ranks.
    """
    num_waiting = device.num_unclaimed()
    if num_waiting <= MAX_UNCLAIMED:
        return
    # Seal first, because listing the connections also uses descriptors.
    device.seal()
    waiting = [each.pair for each in device.connections() if not each.is_claimed]
    described = _list_ends(waiting)
    raise UnknownPeerError(
        f"unknown processes have opened {num_waiting} connections to this rank's port ({described})"
    )


def _publish(store: Any, rank: int, *, num: int, digest: int, error: str = "") -> None:
    store.set(f"{CONNECTIONS}/{rank}", pack_digest(num=num, digest=digest, error=error))


def _collect(
    store: Any, what: str, ranks: Sequence[int], timeout_s: float = FORM_TIMEOUT_S
) -> dict[int, Any]:
    keys = {rank: f"{what}/{rank}" for rank in ranks}
    store.wait([*keys.values()], timedelta(seconds=timeout_s))
    return {rank: json.loads(store.get(key)) for rank, key in keys.items()}


def _describe(device: GlooDevice, rank: int, unknown: Sequence[Pair]) -> str:
    # A stranger opens its own connections, whereas a relay redirects those that this rank opens.
    with device.listener() as listener:
        port = listener.getsockname()[1]
    came = [pair for pair in unknown if pair[0][1] == port]
    went = [pair for pair in unknown if pair[0][1] != port]
    parts = []
    if came:
        parts.append(f"rank {rank}, port {port}: a connection from {_list_ends(came)}")
    if went:
        parts.append(f"rank {rank}: its connection to {_list_ends(went)} does not reach a rank")
    return "; ".join(parts)


def _list_ends(pairs: Sequence[Pair]) -> str:
    """List the far ends of connections, with the user ID of processes on this machine."""
    named = []
    for pair in pairs[:MAX_DESCRIBED]:
        uid = find_uid(pair)
        named.append(format_end(pair[1]) + ("" if uid is None else f" (uid {uid})"))
    if len(pairs) > MAX_DESCRIBED:
        named.append(f"{len(pairs) - MAX_DESCRIBED} more")
    return ", ".join(named)


def _refusal(ranks: Sequence[int], descriptions: Sequence[str]) -> str:
    if not ranks:
        return "the ranks are not connected with each other exactly once"
    if not descriptions:
        return f"ranks {list(ranks)} are not connected with every other rank exactly once"
    return f"an unknown process connects to this job's ports ({'; '.join(descriptions)})"
