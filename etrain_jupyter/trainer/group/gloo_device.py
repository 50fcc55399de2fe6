"""Gloo device whose sockets can be listed and shut down, and whose listener can be sealed.

Shutting the sockets down is the only way to break a stuck collective. Listing them is the only way
to verify the peers, because gloo gives a rank's place to the first connection that sends the rank's
number.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch.distributed as dist

from etrain_jupyter.trainer.group.connections import Pair, pair_of
from etrain_jupyter.trainer.group.rendezvous import CommunicationError
from etrain_jupyter.trainer.group.socket_filters import drop_everything

_DESCRIPTORS = "/proc/self/fd"
_ONESHOT = 1 << 30
"""``EPOLLONESHOT`` is set until gloo assigns a connection to a rank. Until then, gloo is waiting
for the 8-byte number of a pair, or it has received a number that belongs to no pair. A test checks
this."""


class Connection(NamedTuple):
    """A connection that a device has opened or accepted."""

    fd: int
    pair: Pair
    is_claimed: bool
    """True if gloo uses the connection for a rank."""


OnListening = Callable[[socket.socket], None]


class GlooDevice:
    """A gloo device whose sockets are found through its epoll descriptor."""

    _making = threading.Lock()

    def __init__(self, host: str, *, on_listening: OnListening | None = None) -> None:
        """Listen.

        Args:
            host: The address to listen on.
            on_listening: Called with the listener as soon as possible. It is not called if the
                listener's descriptor cannot be distinguished from those of other threads.
        """
        # gloo does not expose its descriptors. They are found by comparing /proc/self/fd before and
        # after; the lock keeps two devices from being created at the same time.
        with self._making:
            before, known = set(_links().values()), set(_descriptors())
            # Connections are not lazy, because all of them must exist before the ranks authenticate
            # each other.
            self.device = dist.ProcessGroupGloo.create_device(hostname=host, lazy_init=False)
            if on_listening is not None:
                _call_with_listener(on_listening, set(_descriptors()) - known)
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
                found.append(Connection(fd, pair_of(connection), is_claimed))
        return found

    def num_unclaimed(self) -> int:
        """Return the number of connections that gloo has accepted but not assigned to a rank."""
        return sum(bool(events & _ONESHOT) for _, events in self._sockets())

    @contextlib.contextmanager
    def socket_at(self, fd: int, pair: Pair) -> Iterator[socket.socket]:
        """Yield the socket of a connection. Raises ``OSError`` if the descriptor was reused."""
        # gloo may have closed the connection since we listed it, and the descriptor may already
        # have been reused.
        with _socket_of(fd) as connection:
            if pair_of(connection) != pair:
                raise OSError(f"descriptor {fd} now belongs to another connection")
            yield connection

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
            drop_everything(listener)

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
                    # A thread stuck inside gloo keeps the listener open: seal it, so that it cannot
                    # be flooded with connections.
                    drop_everything(connection)
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


def _call_with_listener(act: OnListening, new: set[int]) -> None:
    for fd in new:
        with contextlib.suppress(OSError), _socket_of(fd) as connection:
            if _is_listening(connection):
                act(connection)


def _descriptors() -> list[int]:
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir(_DESCRIPTORS)]
    return []


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
