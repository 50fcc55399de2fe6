"""Rendezvous of the ranks of a generation: a key-value store without a server.

A key is sent to all ranks on its own, or together with all other keys of its topic. gloo and
``authentication`` set one key per rank and topic, ``TOPIC/RANK``, and every rank reads all of these
keys. If they were relayed one by one, they would take W^2 messages, and W^3 bytes because gloo's
key grows with W. For 1,000 ranks, that is 8 GB. Instead, the coordinator collects the W keys of a
topic, and sends them to each rank in one message.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d as c10d

from etrain_jupyter.wire.messages import RankKey, RankKeys, StoreEntry
from etrain_jupyter.wire.rank_values import CONNECTIONS, WHOLE, unpack_values

FORM_TIMEOUT_S = 120.0
"""Timeout of last resort: normally, the coordinator detects a rank that does not connect much
earlier."""

GLOO_TOPIC = "0"
"""Prefix of gloo's keys: the number of gloo's device, of which a generation has only one."""

TOPICS = frozenset({GLOO_TOPIC, CONNECTIONS})
"""Topics under which every rank sets exactly one key, and needs the keys of all ranks."""

_SHORTENED = b"\x01"


class CommunicationError(RuntimeError):
    """A collective did not complete: a peer was lost, or the generation was aborted."""


class BroadcastStore(c10d.Store):
    """A rendezvous store without a server: the coordinator forwards every key that a rank sets.

    Keys that every rank sets arrive together; see ``message_for_key``.

    It uses the authenticated control channel, so it needs no open port, and it survives the loss of
    any rank. Keys from other generations are dropped before they reach it.

    Args:
        publish: Sends a key and its value to the other ranks.
    """

    def __init__(self, publish: Callable[[str, bytes], None]) -> None:
        super().__init__()
        self._publish = publish
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._aborted = False

    def put(self, key: str, value: bytes) -> None:
        """Store a key that another rank has set."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def put_all(self, values: Mapping[str, bytes]) -> None:
        """Store keys of all ranks."""
        with self._changed:
            self._values.update(values)
            self._changed.notify_all()

    def drop(self, prefix: str) -> None:
        """Forget the keys with this prefix, on this rank only."""
        # Used for keys that are set for each checkpoint, because a generation may last for days.
        with self._changed:
            self._values = {k: v for k, v in self._values.items() if not k.startswith(prefix)}

    def abort(self) -> None:
        """Raise an error from all current and future waits."""
        with self._changed:
            self._aborted = True
            self._changed.notify_all()

    def set(self, key: str, value: Any) -> None:
        """Set a key for all ranks of the generation."""
        # rank 1         set ─ StoreEntry ─┐
        # coordinator                      └─ to all other ranks of the generation
        # ranks 0, 2                            put, wakes their waits
        data = value.encode() if isinstance(value, str) else bytes(value)
        # Set the key here first, because the coordinator does not send it back.
        self.put(key, data)
        self._publish(key, data)

    def clone(self) -> BroadcastStore:
        """Return this store, which does not need the second connection that torch requests."""
        return self

    def get(self, key: str) -> bytes:
        """Return a key's value, once a rank has set it."""
        self.wait([key])
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        """Return True if all keys are set."""
        with self._changed:
            return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Block until all keys are set."""
        # gloo calls this from C++ while it connects, often with its own timeout. An abort must end
        # the call. Otherwise, the builder thread would be stuck in it for two minutes.
        deadline = time.monotonic() + (timeout.total_seconds() if timeout else FORM_TIMEOUT_S)
        with self._changed:
            while not all(key in self._values for key in keys):
                left = deadline - time.monotonic()
                if self._aborted or left <= 0 or not self._changed.wait(left):
                    why = "the generation was aborted" if self._aborted else "timed out"
                    missing = [key for key in keys if key not in self._values]
                    raise CommunicationError(f"no value for {missing}: {why}")


def message_for_key(
    key: str, value: bytes, *, generation: int, rank: int, world_size: int
) -> StoreEntry | RankKey:
    """Return the message that publishes a key that this rank has set."""
    topic, _, name = key.rpartition("/")
    if topic not in TOPICS or name != str(rank):
        return StoreEntry(generation=generation, key=key, value=value)
    return RankKey(generation=generation, topic=topic, value=_shorten(value, world_size))


def keys_in(message: RankKeys) -> Iterator[tuple[str, bytes]]:
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
