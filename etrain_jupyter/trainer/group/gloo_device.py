"""Gloo device whose sockets can be listed and shut down, and whose listener can be sealed.

Shutting the sockets down is the only way to break a stuck collective. Listing them is the only way
to verify the peers, because gloo gives a rank's place to the first connection that sends the rank's
number.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from typing import NamedTuple

import torch.distributed as dist

from etrain_jupyter.trainer.group.connections import Pair, pair_of
from etrain_jupyter.trainer.group.rendezvous import CommunicationError

_DESCRIPTORS = "/proc/self/fd"
_SO_ATTACH_FILTER = 26
_ONESHOT = 1 << 30
"""``EPOLLONESHOT`` is set until gloo assigns a connection to a rank. Until then, gloo is waiting
for the 8-byte number of a pair, or it has received a number that belongs to no pair. A test checks
this."""


class Connection(NamedTuple):
    """A connection that a device has opened or accepted."""

    pair: Pair
    is_claimed: bool
    """True if gloo uses the connection for a rank."""


class GlooDevice:
    """A gloo device whose sockets are found through its epoll descriptor."""

    _making = threading.Lock()

    def __init__(self, host: str) -> None:
        """Listen on this address."""
        # gloo does not expose its descriptors. They are found by comparing /proc/self/fd before and
        # after; the lock keeps two devices from being created at the same time.
        with self._making:
            before = set(_links().values())
            # Connections are not lazy, because all of them must exist before the ranks authenticate
            # each other.
            self.device = dist.ProcessGroupGloo.create_device(hostname=host, lazy_init=False)
            self._epoll = _find_epoll(before)

    def connections(self) -> list[Connection]:
        """Return all current connections, excluding the listener.

        Raises:
            CommunicationError: The sockets of a process cannot be listed on this system.
        """
        found = []
        for fd, events in self._sockets():
            # OSError: the listener, gloo's own pipe and closed connections have no peer.
            with contextlib.suppress(OSError), _socket_of(fd) as connection:
                is_claimed = not events & _ONESHOT
                found.append(Connection(pair_of(connection), is_claimed))
        return found

    def num_unclaimed(self) -> int:
        """Return the number of connections that gloo has accepted but not assigned to a rank."""
        return sum(bool(events & _ONESHOT) for _, events in self._sockets())

    @contextlib.contextmanager
    def listener(self) -> Iterator[socket.socket]:
        """Yield the listening socket. Raises CommunicationError if there is none."""
        for fd, _ in self._sockets():
            with contextlib.suppress(OSError):
                found = _socket_of(fd)
                if _is_listening(found):
                    break
                found.close()
        else:
            raise CommunicationError("this rank's listener no longer exists")
        with found:
            yield found

    def seal(self) -> None:
        """Refuse further connections. Existing connections are not affected.

        Raises:
            CommunicationError: The listener cannot be found.
        """
        # Do not close the listener, because gloo terminates the process if ``accept`` fails.
        with self.listener() as listener:
            _drop_everything(listener)

    def shut_down(self) -> None:
        """Shut down the device's connections and seal its listener."""
        # Without /proc (on systems other than Linux) this has no effect. Waits are still abandoned,
        # and the coordinator notifies the peers.
        if self._epoll is None:
            return
        # Shut down only the reading side: gloo then sees the end of the stream, fails all waits,
        # and closes the connection itself. gloo would not report a write that fails in its own
        # thread.
        for fd, _ in _watched(self._epoll):
            with contextlib.suppress(OSError), _socket_of(fd) as connection:
                if _is_listening(connection):
                    # A thread stuck inside gloo keeps the listener open. Seal the listener, so that
                    # it cannot be flooded with connections.
                    _drop_everything(connection)
                else:
                    connection.shutdown(socket.SHUT_RD)

    def _sockets(self) -> list[tuple[int, int]]:
        if self._epoll is None:
            raise CommunicationError(
                "cannot check who is connected to this rank: /proc/self/fdinfo does not list the "
                f"sockets of gloo (platform {sys.platform}). Ranks exchange tensors only over "
                "checked connections. Train with one worker, or on Linux with /proc mounted."
            )
        return _watched(self._epoll)


def _find_epoll(before: set[str]) -> int | None:
    # Returns the epoll descriptor that watches a listener opened since ``before``. A new descriptor
    # number alone is not enough: if another thread frees the device of an earlier generation, the
    # new device may get that device's number. The link of a socket contains its inode, which is not
    # reused.
    links = _links()
    found = [
        fd
        for fd, link in links.items()
        if "eventpoll" in link and any(_is_new_listener(w, links, before) for w, _ in _watched(fd))
    ]
    return found[0] if len(found) == 1 else None


def _is_new_listener(fd: int, links: dict[int, str], before: set[str]) -> bool:
    link = links.get(fd, "")
    if not link.startswith("socket:") or link in before:
        return False
    with contextlib.suppress(OSError), _socket_of(fd) as connection:
        return _is_listening(connection)
    return False


def _socket_of(fd: int) -> socket.socket:
    # Uses a duplicate, so that closing the Python object leaves gloo's descriptor open. Both refer
    # to the same socket, so options and shutdowns still apply. Raises OSError if ``fd`` is not a
    # socket.
    copy = os.dup(fd)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)  # for example gloo's own pipe
        raise


def _is_listening(connection: socket.socket) -> bool:
    return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _drop_everything(listener: socket.socket) -> None:
    # A classic BPF filter, which needs no privileges. It does not affect accepted connections.
    code = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # ret #0
    program = struct.pack("HP", 1, ctypes.addressof(code))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def _links() -> dict[int, str]:
    # For example {7: "socket:[48213]", 8: "anon_inode:[eventpoll]"}. Other threads may close
    # descriptors while they are being listed.
    found = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(_DESCRIPTORS):
            with contextlib.suppress(OSError):
                found[int(name)] = os.readlink(f"{_DESCRIPTORS}/{name}")
    return found


def _watched(epoll: int) -> list[tuple[int, int]]:
    # Reads lines such as "tfd:       12 events: 40000019 data: ...": a descriptor, and its events
    # in hexadecimal.
    with contextlib.suppress(OSError), open(f"/proc/self/fdinfo/{epoll}") as info:
        lines = [line.split() for line in info if line.startswith("tfd")]
        return [(int(fields[1]), int(fields[3], 16)) for fields in lines]
    return []
