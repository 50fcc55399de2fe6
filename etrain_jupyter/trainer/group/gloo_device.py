"""A gloo device whose sockets are known: they can be shut down, listed, held back and sealed.

Shutting them down is the only way to break a stuck collective. Listing them is the only way to know
who is connected, because gloo gives a rank's place to the first connection that sends its number.
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
"""``EPOLLONESHOT``: gloo has not given a rank's place to this connection. It still waits for the
8-byte number of a pair, or no pair waits for the number that came. A test holds gloo to that."""


class Connection(NamedTuple):
    """A connection that a device has made or accepted."""

    fd: int
    pair: Pair
    is_claimed: bool
    """Whether gloo uses it for a rank."""


OnListening = Callable[[socket.socket], None]


class GlooDevice:
    """A gloo device whose epoll descriptor is known, and so the sockets of one generation."""

    _making = threading.Lock()

    def __init__(self, host: str, *, on_listening: OnListening | None = None) -> None:
        """Listen.

        Args:
            host: The address to listen on.
            on_listening: Called with the listener as soon as possible. It is not called if the
                listener's descriptor cannot be told at once from those of other threads.
        """
        with self._making:
            before, known = set(_links().values()), set(_descriptors())
            # Lazy connections would be made after the ranks have authenticated each other.
            self.device = dist.ProcessGroupGloo.create_device(hostname=host, lazy_init=False)
            if on_listening is not None:
                _call_with_listener(on_listening, set(_descriptors()) - known)
            self._epoll = _find_epoll(before)

    def connections(self) -> list[Connection]:
        """Return every connection that exists at this moment, without the listener.

        Raises:
            CommunicationError: Nobody can say, because this system does not list a process's
                sockets.
        """
        found = []
        for fd, events in self._sockets():
            with contextlib.suppress(OSError), _socket_of(fd) as connection:
                is_claimed = not events & _ONESHOT
                found.append(Connection(fd, pair_of(connection), is_claimed))
        return found

    def num_unclaimed(self) -> int:
        """Return the number of connections that gloo has accepted but not given to a rank."""
        return sum(bool(events & _ONESHOT) for _, events in self._sockets())

    @contextlib.contextmanager
    def socket_at(self, fd: int, pair: Pair) -> Iterator[socket.socket]:
        """Give the socket of a connection. Raises ``OSError`` if the descriptor is another's."""
        with _socket_of(fd) as connection:
            if pair_of(connection) != pair:
                raise OSError(f"descriptor {fd} is another connection's now")
            yield connection

    @contextlib.contextmanager
    def listener(self) -> Iterator[socket.socket]:
        """Give the listening socket. Raises CommunicationError if there is none."""
        for fd, _ in self._sockets():
            with contextlib.suppress(OSError):
                found = _socket_of(fd)
                if _is_listening(found):
                    break
                found.close()
        else:
            raise CommunicationError("the listener of this rank is gone")
        with found:
            yield found

    def seal(self) -> None:
        """Let nobody else connect. Connections that exist are not affected.

        The listener itself stays: gloo would terminate the process if ``accept`` failed.

        Raises:
            CommunicationError: The listener cannot be found.
        """
        with self.listener() as listener:
            drop_everything(listener)

    def shut_down(self) -> None:
        """Shut down the device's connections and seal its listener, which is never shut down.

        Without /proc (not Linux) it does nothing. Waits are abandoned all the same, and the peers
        learn of it by the coordinator.

        For reading only: gloo sees the end, tells everybody who waits, and closes the connection by
        itself. A write that failed in its own thread meanwhile would be told to nobody.
        """
        if self._epoll is None:
            return
        for fd, _ in _watched(self._epoll):
            with contextlib.suppress(OSError), _socket_of(fd) as connection:
                if _is_listening(connection):
                    # A thread that stays inside gloo keeps it open: a flood must not reach it.
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
    """Return the epoll descriptor that watches a listener which was not there ``before``.

    A new descriptor alone tells nothing: while the device of an earlier generation is being freed
    in another thread, the new one may get its number. A socket's inode is not used again.
    """
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
    """Return a socket object for a copy of a descriptor. Raises ``OSError`` if it is no socket."""
    copy = os.dup(fd)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)  # the loop's own pipe: no socket took the copy over
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
    """Return what each descriptor of this process is."""
    found = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(_DESCRIPTORS):
            with contextlib.suppress(OSError):
                found[int(name)] = os.readlink(f"{_DESCRIPTORS}/{name}")
    return found


def _watched(epoll: int) -> list[tuple[int, int]]:
    """Return the descriptors that an epoll descriptor watches, and for which events."""
    with contextlib.suppress(OSError), open(f"/proc/self/fdinfo/{epoll}") as info:
        lines = [line.split() for line in info if line.startswith("tfd")]
        return [(int(fields[1]), int(fields[3], 16)) for fields in lines]
    return []
