"""A gloo device whose connections can be shut down: the only way to break a stuck collective."""

from __future__ import annotations

import contextlib
import os
import socket
import threading

import torch.distributed as dist

_DESCRIPTORS = "/proc/self/fd"


class GlooDevice:
    """A gloo device whose epoll descriptor is known, and so the sockets of one generation."""

    _making = threading.Lock()

    def __init__(self, host: str) -> None:
        with self._making:
            before = set(_links().values())
            self.device = dist.ProcessGroupGloo.create_device(hostname=host)
            self._epoll = _find_epoll(before)

    def shut_down(self) -> None:
        """Shut down the device's connections, never its listener: gloo would terminate.

        Without /proc (not Linux) it does nothing. Waits are abandoned all the same, and the peers
        learn of it by the coordinator.

        For reading only: gloo sees the end, tells everybody who waits, and closes the connection by
        itself. A write that failed in its own thread meanwhile would be told to nobody.
        """
        if self._epoll is None:
            return
        for fd in _watched(self._epoll):
            with contextlib.suppress(OSError), _socket_of(fd) as connection:
                if not _is_listening(connection):
                    connection.shutdown(socket.SHUT_RD)


def _find_epoll(before: set[str]) -> int | None:
    """Return the epoll descriptor that watches a listener which was not there ``before``.

    A new descriptor alone tells nothing: while the device of an earlier generation is being freed
    in another thread, the new one may get its number. A socket's inode is not used again.
    """
    links = _links()
    found = [
        fd
        for fd, link in links.items()
        if "eventpoll" in link and any(_is_new_listener(w, links, before) for w in _watched(fd))
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


def _links() -> dict[int, str]:
    """Return what each descriptor of this process is."""
    found = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(_DESCRIPTORS):
            with contextlib.suppress(OSError):
                found[int(name)] = os.readlink(f"{_DESCRIPTORS}/{name}")
    return found


def _watched(epoll: int) -> list[int]:
    with contextlib.suppress(OSError), open(f"/proc/self/fdinfo/{epoll}") as info:
        return [int(line.split()[1]) for line in info if line.startswith("tfd")]
    return []
