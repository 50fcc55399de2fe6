"""Rendezvous of the ranks of a generation: a key-value store without a server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d as c10d

FORM_TIMEOUT_S = 120.0
"""Timeout of last resort: normally, the coordinator detects a rank that does not connect much
earlier."""


class CommunicationError(RuntimeError):
    """A collective did not complete: a peer was lost, or the generation was aborted."""


class BroadcastStore(c10d.Store):
    """A rendezvous store without a server: the coordinator forwards every key that a rank sets.

    Keys that every rank sets arrive together, see ``rank_keys``.

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
        """Return this store: torch asks for a second connection, which this store does not need."""
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
