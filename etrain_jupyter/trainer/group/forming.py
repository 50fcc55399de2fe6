"""Connect one rank to the other ranks of its generation, in a thread that can be abandoned.

::

    builder thread   gloo connects | authentication | NCCL connects (if the ranks use it)
    caller           counts strangers               | waits until ready, timed out or aborted

The caller returns as soon as the generation is aborted, even if the builder is stuck in torch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from etrain_jupyter.trainer.group.authentication import authenticate, give_up, raise_if_flooded
from etrain_jupyter.trainer.group.backends import GLOO, NCCL, connect_gloo
from etrain_jupyter.trainer.group.gloo_device import GlooDevice
from etrain_jupyter.trainer.group.pending import Waiters, text_of
from etrain_jupyter.trainer.group.rendezvous import (
    FORM_TIMEOUT_S,
    BroadcastStore,
    CommunicationError,
)

WATCH_EVERY_S = 0.02
"""Interval at which a rank counts connections from strangers while it connects."""


@dataclass(kw_only=True)
class _Building:
    # Only the builder thread writes these attributes, each at most once after initialization, so
    # the caller may read them without a lock.
    stage: str = GLOO
    """The backend that is connecting."""
    is_authenticated: bool = False
    backend: Any = None
    """The gloo backend, once everything is connected."""
    error: Exception | None = None


class Forming:
    """Connects one rank."""

    def __init__(
        self,
        *,
        store: BroadcastStore,
        rank: int,
        world_size: int,
        secret: bytes,
        waiters: Waiters,
        connect_nccl: Callable[[], None] | None,
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._secret = secret
        self._waiters = waiters
        self._connect_nccl = connect_nccl
        self._building = _Building()
        self._ready = threading.Event()

    def connect(self, device: GlooDevice) -> Any:
        """Return the connected gloo backend.

        Raises:
            CommunicationError: If connecting fails, times out or is aborted.
        """
        token = self._waiters.register(self._ready.set)
        builder = threading.Thread(
            target=self._build, args=(device,), daemon=True, name="etrain-form"
        )
        builder.start()
        self._watch_strangers(device)
        self._waiters.forget(token)
        building = self._building
        # Failed, timed out, or aborted: ``fail`` keeps the first reason. The builder may still be
        # inside torch. It keeps the device alive, and ends when the device's sockets are shut down.
        if building.backend is None:
            error, stage = building.error, building.stage
            timeout = f"{stage} did not connect within {FORM_TIMEOUT_S:.0f} s"
            why = text_of(error) if error is not None else timeout
            raise self._waiters.fail(why, backend=stage)
        return building.backend

    def _watch_strangers(self, device: GlooDevice) -> None:
        # Waits until ready. The listener is open until the ranks are authenticated, and gloo
        # terminates the process if ``accept`` fails because the descriptors are used up:
        #
        #     builder   gloo connects ───────────────── authenticate ─ sealed ─ NCCL connects
        #     caller    count, count, count ...                        only wait
        deadline = time.monotonic() + FORM_TIMEOUT_S
        try:
            while not (self._ready.wait(WATCH_EVERY_S) or self._building.is_authenticated):
                if time.monotonic() > deadline:
                    break
                raise_if_flooded(device)
        except CommunicationError as exc:
            raise self._waiters.fail(str(exc), backend=GLOO) from exc
        # Set by the builder, or by an abort.
        self._ready.wait(max(0.0, deadline - time.monotonic()))

    def _build(self, device: GlooDevice) -> None:
        building = self._building
        try:
            gloo = self._connect_gloo(device)
            building.is_authenticated = True
            if self._connect_nccl is not None:
                building.stage = NCCL
                self._connect_nccl()
            building.backend = gloo
        except Exception as exc:
            building.error = exc
        self._ready.set()

    def _connect_gloo(self, device: GlooDevice) -> Any:
        try:
            gloo = connect_gloo(self._store, self._rank, self._world_size, device)
        except RuntimeError as exc:
            # The other ranks wait for this rank's list of connections. Make them fail now, with
            # this rank's error, instead of letting them time out.
            give_up(self._store, self._rank, exc)
            raise
        authenticate(
            device,
            self._store,
            rank=self._rank,
            world_size=self._world_size,
            secret=self._secret,
        )
        return gloo
