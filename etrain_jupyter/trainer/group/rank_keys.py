"""Choose how a key of the rendezvous store travels: to all ranks on its own, or with all others.

gloo and ``authentication`` set one key per rank and topic, ``TOPIC/RANK``, and every rank reads
them all. Relayed one by one to each other rank, they would take W^2 messages, and W^3 bytes because
gloo's key grows with W: 8 GB for 1,000 ranks. Instead, the coordinator collects the W keys of a
topic, and sends them to each rank in one message.
"""

from __future__ import annotations

from collections.abc import Iterator

from etrain_jupyter.wire.messages import RankKey, RankKeys, StoreEntry
from etrain_jupyter.wire.rank_values import CONNECTIONS, WHOLE, unpack_values

GLOO = "0"
"""Prefix of gloo's keys: the number of its device, and a generation has one."""

TOPICS = frozenset({GLOO, CONNECTIONS})
"""Topics under which every rank sets exactly one key, and needs those of all ranks."""

_SHORTENED = b"\x01"


def message_of(
    key: str, value: bytes, *, generation: int, rank: int, world_size: int
) -> StoreEntry | RankKey:
    """Return the message that publishes a key which this rank has set."""
    topic, _, name = key.rpartition("/")
    if topic not in TOPICS or name != str(rank):
        return StoreEntry(generation=generation, key=key, value=value)
    return RankKey(generation=generation, topic=topic, value=_shorten(value, world_size))


def keys_of(message: RankKeys) -> Iterator[tuple[str, bytes]]:
    """Yield the keys of all ranks with their values."""
    values = unpack_values(message.values)
    numbers = _numbers(len(values))
    for rank, value in enumerate(values):
        tail = numbers if value[:1] == _SHORTENED else b""
        yield f"{message.topic}/{rank}", value[1:] + tail


def _shorten(value: bytes, world_size: int) -> bytes:
    # gloo's key ends with the number of this rank's connection to each rank, which it counts from 0
    # on a new device. So the other ranks know that part:
    #
    #     address, 154 bytes | 0 | 1 | 2 | ... | W - 1, 8 bytes each
    numbers = _numbers(world_size)
    if value.endswith(numbers):
        return _SHORTENED + value[: -len(numbers)]
    return WHOLE + value


def _numbers(world_size: int) -> bytes:
    return b"".join(number.to_bytes(8, "little") for number in range(world_size))
