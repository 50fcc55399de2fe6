"""Admit only the connections that ranks have announced, in a generation that is guarded.

``authentication`` alone makes a stranger harmless, but one that connects first every time prevents
every group from forming. So after a failure the next generations are guarded: a listener accepts
connections and gloo does not see what they say (a receive low-water mark and a packet filter, which
accepted sockets inherit). Each rank announces the connections that it made, over the control
channel, and the other end lets gloo read exactly these. That takes some milliseconds longer.

A stranger that connects within the millisecond before the listener is held, for every listener, can
still prevent forming. That is bounded, and visible: see ``hold``.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from typing import Any

from etrain_jupyter.trainer.group.authentication import (
    MAX_DESCRIBED,
    MAX_UNCLAIMED,
    UnknownPeerError,
    list_ends,
)
from etrain_jupyter.trainer.group.connections import Pair, decode, encode
from etrain_jupyter.trainer.group.gloo_device import Connection, GlooDevice
from etrain_jupyter.trainer.group.socket_filters import detach_filter, pass_only_a_number

ADMIT_EVERY_S = 0.001
TIMEOUT_S = 10.0
"""How long a guarded generation may take to connect: one whose connections pass through a relay
never does. Less than the coordinator allows before it declares a rank hung."""

MAX_DEVICES = 50
"""Listeners to try before the group is refused: strangers had connected to all of them."""

_LOW_WATER = 32768
"""Bytes: above what the filter passes, below half of any receive buffer. With more, the kernel
enlarges the buffer and clamps the window."""

_SETTLE_S = 0.001
"""Time in which gloo accepts a connection that came before the filter."""


def make_held_device(host: str) -> GlooDevice:
    """Return a device whose listener is held, and to which no stranger is connected.

    Raises:
        UnknownPeerError: Strangers had connected to every listener before it was held.
    """
    reached: list[GlooDevice] = []  # not freed meanwhile: a descriptor's number tells the new ones
    try:
        for _ in range(MAX_DEVICES):
            device = GlooDevice(host, on_listening=_hold_back)
            if hold(device):
                return device
            reached.append(device)
            device.seal()
            if sum(each.num_unclaimed() for each in reached) > MAX_UNCLAIMED:
                break  # they hold descriptors until they are freed
        described = list_ends([each.pair for each in device.connections()][:MAX_DESCRIBED])
        num_reached = len(reached)
    finally:
        for each in reached:
            each.shut_down()
        # gloo's destructors wait for its 10 ms epoll ticks.
        threading.Thread(target=reached.clear, daemon=True, name="etrain-free").start()
    raise UnknownPeerError(
        f"an unknown process connects to this job's ports: it reached {num_reached} new ports "
        f"within about a millisecond each (the last from {described or 'an address now unknown'})"
    )


def hold(device: GlooDevice) -> bool:
    """Keep gloo from reading what connections say. Call it before the address is published.

    Returns:
        False if gloo may have read what somebody said already. Use another device then.
    """
    with device.listener() as listener:
        _hold_back(listener)
    time.sleep(_SETTLE_S)
    return all(_is_held(device, each) for each in device.connections())


def _hold_back(listener: socket.socket) -> None:
    pass_only_a_number(listener)
    # After the filter: whatever inherits the mark has inherited the filter, too.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _LOW_WATER)


def _is_held(device: GlooDevice, connection: Connection) -> bool:
    """Whether it came when the listener was held back."""
    with contextlib.suppress(OSError), device.socket_at(connection.fd, connection.pair) as found:
        return found.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == _LOW_WATER
    return True  # it has ended


class Admission:
    """Announces this rank's connections, and releases those that other ranks announce.

    Args:
        device: Held; see ``hold``.
        store: Where the ranks announce: authenticated, and of one generation.
        rank: This rank.
        world_size: Ranks of the generation.
    """

    def __init__(self, device: GlooDevice, store: Any, *, rank: int, world_size: int) -> None:
        self._device, self._store, self._rank = device, store, rank
        self._keys = [f"made/{other}" for other in range(world_size) if other != rank]
        self._announced: list[Pair] = []
        self._released: set[Pair] = set()
        self._deadline = time.monotonic() + TIMEOUT_S
        with device.listener() as listener:
            self._port = listener.getsockname()[1]

    def admit(self) -> None:
        """Do what is due. Call it often while gloo connects, and once after that.

        Raises:
            UnknownPeerError: It takes too long.
        """
        connections = self._device.connections()
        made = sorted(each.pair for each in connections if each.pair[0][1] != self._port)
        taken = {each.pair: each.fd for each in connections if each.pair[0][1] == self._port}
        if made != self._announced:
            self._announced = made
            self._store.set(f"made/{self._rank}", json.dumps(encode(made)))
        waiting = taken.keys() - self._released
        if waiting:
            for near, far in self._pairs_of_others():
                if (far, near) in waiting:
                    self._release(taken[far, near], (far, near))
        if time.monotonic() > self._deadline:
            unknown = sorted(taken.keys() - self._released)
            text = f"the ranks were not connected within {TIMEOUT_S:.0f} s"
            if unknown:
                text += f"; an unknown process connects to this job's ports ({list_ends(unknown)})"
            raise UnknownPeerError(text)

    def _pairs_of_others(self) -> list[Pair]:
        there = [key for key in self._keys if self._store.check([key])]
        return [pair for key in there for pair in decode(json.loads(self._store.get(key)))]

    def _release(self, fd: int, pair: Pair) -> None:
        with contextlib.suppress(OSError), self._device.socket_at(fd, pair) as connection:
            detach_filter(connection)
            # Also wakes gloo, if the number is there already.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            self._released.add(pair)
