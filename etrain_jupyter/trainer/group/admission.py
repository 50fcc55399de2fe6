"""In a guarded generation, admit only the connections that ranks have announced.

``authentication`` alone makes a stranger harmless, but a stranger that always connects first
prevents every group from forming. So after a failure the next generations are guarded: a listener
accepts connections, but gloo does not see their data (a receive low-water mark and a packet filter,
which accepted sockets inherit)::

    rank A   connects to B, and announces the connection over the authenticated control channel
    rank B   releases exactly the announced connections, whose data gloo then reads
    stranger is never released, and so never gets a rank's place

This takes a few milliseconds longer. A stranger can still prevent the group from forming if it
connects to every listener within the millisecond before ``hold`` takes effect. The number of
attempts is limited, and the failure is reported, see ``make_held_device``.
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
"""Interval at which new connections are announced and released; each round trip delays forming."""
TIMEOUT_S = 10.0
"""Timeout for connecting a guarded generation, since connections through a relay never succeed. It
is shorter than the time after which the coordinator declares a rank hung."""

MAX_DEVICES = 50
"""Number of listeners to try before giving up if strangers connect to each of them."""

_LOW_WATER = 32768
"""Receive low-water mark in bytes: more than the filter passes, and less than half of any receive
buffer. A higher mark would make the kernel enlarge the buffer and clamp the window."""

_SETTLE_S = 0.001
"""Time for gloo to accept connections that arrived before the filter was set."""


def make_held_device(host: str) -> GlooDevice:
    """Return a device with a held listener and no connections from strangers.

    Raises:
        UnknownPeerError: Strangers connected to every listener before it was held.
    """
    # gloo creates the socket and listens in one call, so there is a gap before the filter is set:
    #
    #     gloo       bind, listen ────────────────── accepts, reads 8 bytes
    #     stranger                 connects, sends ──^
    #     this rank                        hold ─ a connection without the mark? next device
    #
    # Rejected devices are not freed until the end, because a new device is recognized by its new
    # descriptor numbers.
    reached: list[GlooDevice] = []
    try:
        for _ in range(MAX_DEVICES):
            device = GlooDevice(host, on_listening=_hold_back)
            if hold(device):
                return device
            reached.append(device)
            device.seal()
            if sum(each.num_unclaimed() for each in reached) > MAX_UNCLAIMED:
                break  # their descriptors stay open until the devices are freed
        described = list_ends([each.pair for each in device.connections()][:MAX_DESCRIBED])
        num_reached = len(reached)
    finally:
        for each in reached:
            each.shut_down()
        # Free the devices in a thread, because gloo's destructors wait for its 10 ms epoll ticks.
        threading.Thread(target=reached.clear, daemon=True, name="etrain-free").start()
    raise UnknownPeerError(
        f"an unknown process connects to this job's ports: it reached {num_reached} new ports "
        f"within about a millisecond each (the last from {described or 'an unknown address'})"
    )


def hold(device: GlooDevice) -> bool:
    """Prevent gloo from reading data from connections. Call this before publishing the address.

    Returns:
        False if gloo may already have read data from a stranger. In that case, use another device.
    """
    # ``on_listening`` may have done this already, but it is not called if another thread opened a
    # socket at the same time.
    with device.listener() as listener:
        _hold_back(listener)
    # A connection without the mark may be queued. It becomes visible once gloo accepts it.
    time.sleep(_SETTLE_S)
    return all(_is_held(device, each) for each in device.connections())


def _hold_back(listener: socket.socket) -> None:
    pass_only_a_number(listener)
    # gloo's epoll does not report a socket below the low-water mark as readable. The filter drops
    # FIN and RST segments, which would wake gloo, and packets of more than 8 bytes. The filter is
    # set before the mark, so that a socket that inherits the mark also inherits the filter.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _LOW_WATER)


def _is_held(device: GlooDevice, connection: Connection) -> bool:
    """Return True if the connection arrived while the listener was held."""
    with contextlib.suppress(OSError), device.socket_at(connection.fd, connection.pair) as found:
        return found.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == _LOW_WATER
    return True  # the connection has ended


class Admission:
    """Announce this rank's connections, and release those announced by other ranks.

    Args:
        device: A held device, see ``hold``.
        store: The authenticated rendezvous store of the generation.
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
        """Announce and release new connections. Call this often while gloo connects.

        Raises:
            UnknownPeerError: The ranks have not connected within the timeout.
        """
        connections = self._device.connections()
        # A connection whose near end is the listener's port was accepted; this rank opened all
        # others.
        made = sorted(each.pair for each in connections if each.pair[0][1] != self._port)
        taken = {each.pair: each.fd for each in connections if each.pair[0][1] == self._port}
        if made != self._announced:
            self._announced = made
            self._store.set(f"made/{self._rank}", json.dumps(encode(made)))
        waiting = taken.keys() - self._released
        if waiting:
            # The other rank lists the connection from its own end: its (near, far) is our (far,
            # near). A stranger cannot announce a connection, because the store is authenticated.
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
        # Use ``check``, which does not block, because some ranks may not have connected yet.
        there = [key for key in self._keys if self._store.check([key])]
        return [pair for key in there for pair in decode(json.loads(self._store.get(key)))]

    def _release(self, fd: int, pair: Pair) -> None:
        # An OSError means that the connection has ended; its descriptor may have been reused.
        with contextlib.suppress(OSError), self._device.socket_at(fd, pair) as connection:
            detach_filter(connection)
            # This also wakes gloo if the rank's number has already arrived.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            self._released.add(pair)
