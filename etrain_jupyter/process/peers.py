"""Restrict what a Dask peer may send: plain values only, and only the requests of its role.

Dask trusts every peer that completes the TLS handshake: the holder of any of the cluster's
certificates may call ``run_function`` on the scheduler, and any message may contain a pickle. For a
cluster with remote machines that is too permissive, because code on a worker machine could run as
the notebook's user, who runs the scheduler. Three rules prevent that:

* **Plain values.** Messages are decoded as msgpack and nothing else. Pickles are refused, and
  objects serialized by Dask stay opaque. Our processes exchange no objects.
* **Roles.** The peer's certificate names its role. A worker may register, send heartbeats and
  report; it may not send the kernel's requests. Workers communicate only with the scheduler, so
  they accept no connections from other workers.
* **Names.** The kernel connects only to servers that present a scheduler's certificate; see
  ``pinned_to_scheduler``.

A foreign scheduler (pool kind ``address``) is Dask's own and cannot be restricted. The kernel
decodes only plain values in its replies, too.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import struct
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

logger = logging.getLogger(__name__)

WORKER_REQUESTS = frozenset(
    {
        # Requests from a Dask worker that runs no tasks.
        "register-worker",
        "heartbeat_worker",
        "identity",
        "close",
        # Pieces of the bundles of active jobs.
        "etrain_bundle",
        # Messages on the stream opened by its registration.
        "close-stream",
        "keep-alive",
        "log-event",
        "worker-status-change",
        "etrain_report",
    }
)
"""Requests and messages that a peer with a worker's certificate may send to the scheduler."""

_plain_only: contextvars.ContextVar[bool] = contextvars.ContextVar("plain_only", default=False)
_is_process_plain = False
_dask_loads: Callable[..., Any] | None = None
CHUNK_BYTES = 1 << 20
"""Maximum number of bytes per read."""

MAX_FRAMES = 10_000
"""Maximum number of frames of a message; plain values take one."""

_LENGTHS = struct.Struct("QQ")


class RefusedMessageError(ConnectionError):
    """A peer sent something that its role forbids; the connection is closed."""


class Opaque:
    """Placeholder for a serialized object, which is neither deserialized nor passed on."""


def read_plain_values_only() -> None:
    """Refuse pickles in every Dask message that this process receives from now on."""
    global _is_process_plain
    _install()
    _is_process_plain = True


@contextlib.contextmanager
def plain_values_only() -> Iterator[None]:
    """Refuse pickles in messages received in this context.

    For processes that also use Dask for other purposes, such as notebook kernels.
    """
    _install()
    token = _plain_only.set(True)
    try:
        yield
    finally:
        _plain_only.reset(token)


def _install() -> None:
    # Dask has no setting for this: its ``comm`` calls ``distributed.protocol.loads`` directly.
    global _dask_loads
    if _dask_loads is None:
        import distributed.protocol

        protocol: Any = distributed.protocol
        _dask_loads, protocol.loads = protocol.loads, _loads


def _loads(frames: Any, deserialize: bool = True, deserializers: Any = None) -> Any:
    if not (_is_process_plain or _plain_only.get()):
        assert _dask_loads is not None
        return _dask_loads(frames, deserialize=deserialize, deserializers=deserializers)
    return decode_plain(frames)


def decode_plain(frames: Any) -> Any:
    """Decode a Dask message without executing anything.

    Args:
        frames: The message as Dask's ``comm`` reads it: msgpack first, then serialized objects.

    Raises:
        RefusedMessageError: If the message contains a pickle.
    """
    import distributed.protocol.core

    core: Any = distributed.protocol.core
    # Same options as Dask's own ``loads``; frames[1:] would be the serialized objects.
    return core.msgpack.loads(
        frames[0], object_hook=_decode_object, use_list=False, **core.msgpack_opts
    )


def _decode_object(value: dict[str, Any]) -> Any:
    if "__Pickled__" in value:
        raise RefusedMessageError("a peer sent a pickled object, which was not unpickled")
    if "__Serialized__" in value:
        return Opaque()
    if "__Set__" in value:
        return set(value["as-list"])
    if "__Enum__" in value:
        from distributed.core import Status

        return Status[str(value["name"])]  # the only enum that our processes send
    return value


def restricted(server: type[Any], *, worker_may: frozenset[str] = frozenset()) -> type[Any]:
    """Return a subclass of a Dask ``Scheduler`` or ``Worker`` that enforces its peers' roles.

    Args:
        server: The class.
        worker_may: Requests that a peer with a worker's certificate may send; every other role in
            the cluster may send all requests.
    """
    read_plain_values_only()

    def handle_comm(self: Any, comm: Any) -> Any:
        # Dask dispatches requests in ``handle_comm`` and, on the same connection after a worker has
        # registered, stream messages in ``handle_stream``. Both read through ``comm.read``.
        role = role_of(comm)
        if role not in ("scheduler", "client"):
            # Peers with any other role, or without a certificate, may send nothing.
            _limit(comm, role, worker_may if role == "worker" else frozenset())
        return server.handle_comm(self, comm)

    return type(server.__name__, (server,), {"handle_comm": handle_comm})


def role_of(comm: Any) -> str:
    """Return the role in the peer's certificate; empty if it has no certificate."""
    stream = getattr(comm, "stream", None)
    get_certificate = getattr(getattr(stream, "socket", None), "getpeercert", None)
    certificate = get_certificate() if get_certificate is not None else None
    if not certificate:
        return ""
    names = dict(pair for part in certificate.get("subject", ()) for pair in part)
    return str(names.get("commonName", ""))


def _limit(comm: Any, role: str, allowed: frozenset[str]) -> None:
    # A connection within a process has no stream.
    is_socket = getattr(comm, "stream", None) is not None
    read = FrameReader(comm, decode_plain).read if is_socket else comm.read

    async def read_allowed(deserializers: Any = None) -> Any:
        message = await read(deserializers)
        # Streams deliver batches of messages, and requests arrive one at a time. Close the
        # connection on anything that is not allowed, because its sender is broken or hostile.
        for part in message if isinstance(message, list | tuple) else (message,):
            operation = part.get("op") if isinstance(part, dict) else None
            # Dask adds the sender's address to a report, unless the report already has one: with
            # that field, a worker could report under another worker's name.
            is_forged = operation == "etrain_report" and "worker" in part
            if isinstance(part, dict) and (operation not in allowed or is_forged):
                who = f"a peer with the certificate of a {role}" if role else "an unknown peer"
                text = f"{who} at {comm.peer_address} may not send {str(operation)[:80]!r}"
                logger.warning("%s: its connection is closed", text)
                comm.abort()
                raise RefusedMessageError(text)
        return message

    comm.read = read_allowed


def pinned_to_scheduler(connection_args: dict[str, Any]) -> dict[str, Any]:
    """Return connection arguments that make TLS accept only a scheduler's certificate.

    Args:
        connection_args: Arguments for one of our clusters, whose certificates name their role.
    """
    # One authority signs all of a cluster's certificates. Without the host name check, a machine
    # with a worker's certificate could impersonate the scheduler.
    connection_args["ssl_context"].check_hostname = True
    return connection_args | {"server_hostname": "scheduler"}


class MalformedFramesError(ValueError):
    """A peer sent bytes that are not one of Dask's messages."""


def split_messages(buffer: bytearray) -> Iterator[bytes]:
    """Remove each complete message from the start of a buffer, and yield its first frame.

    ::

        Q: length of some of the frames | Q: number of frames | Q: length of each | frames

    Raises:
        MalformedFramesError: If the buffer does not start with a message.
    """
    while len(buffer) >= _LENGTHS.size:
        _, num_frames = _LENGTHS.unpack_from(buffer)
        if not 1 <= num_frames <= MAX_FRAMES:
            raise MalformedFramesError(f"a message has {num_frames} frames")
        start = _LENGTHS.size + 8 * num_frames
        if len(buffer) < start:
            return
        lengths = struct.unpack_from(f"{num_frames}Q", buffer, _LENGTHS.size)
        end = start + sum(lengths)
        if len(buffer) < end:
            return
        first = bytes(buffer[start : start + lengths[0]])
        del buffer[:end]
        yield first


class FrameReader:
    """Read and decode the messages of one connection, one at a time and in order.

    All messages that have arrived are taken from the socket together. Dask's ``comm.read`` waits
    for the length of a message and then for the rest, and unregisters the socket from the event
    loop in between. That costs the scheduler more than handling a short message.

    Args:
        comm: Dask's connection over TCP or TLS, at the start of a message. Nothing else reads it.
        decode: Decodes a message, given its frames.
    """

    def __init__(self, comm: Any, decode: Callable[[list[bytes]], Any]) -> None:
        self._comm = comm
        self._decode = decode
        self._buffer = bytearray()
        self._ready: deque[bytes] = deque()

    async def read(self, deserializers: Any = None) -> Any:
        """Return the next message.

        Raises:
            CommClosedError: If the connection has ended.
        """
        from distributed.comm.core import CommClosedError

        try:
            while not self._ready:
                if (stream := self._comm.stream) is None:
                    raise CommClosedError(f"in {self._comm}: the connection is closed")
                self._buffer += await stream.read_bytes(CHUNK_BYTES, partial=True)
                self._ready.extend(split_messages(self._buffer))
            return self._decode([self._ready.popleft()])
        except OSError as exc:  # also tornado's StreamClosedError and TLS errors
            self._comm.abort()
            if isinstance(exc, CommClosedError):
                raise
            raise CommClosedError(f"in {self._comm}: {type(exc).__name__}: {exc}") from exc
        except BaseException:
            # Perhaps some bytes of a message are lost, so the rest cannot be read.
            self._comm.abort()
            raise
