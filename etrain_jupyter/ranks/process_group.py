"""One process group a generation, formed and broken inside living processes.

Three facts (measured, see ``benchmarks/README.md``) shape this file:

* No call of torch unblocks a gloo collective whose peer is silent; only the group's own time-out
does. Shutting down
  the sockets of the group's device does it in milliseconds. Hence a device of its own for each
  generation.
* Even then a thread can stay inside gloo. So nobody ever waits there: a wait ends when the
operation's future
  completes *or* when the generation is aborted, whichever comes first, and the operation is left
  to time out.
* The constructor of ``ProcessGroupGloo`` may block without any time-out, so it runs in a thread
that can be abandoned.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

BACKEND = "etgloo"
FORM_TIMEOUT_S = 30.0
COLLECTIVE_TIMEOUT_S = 1800.0
"""Only a backstop: lost peers are noticed by the coordinator, long before."""


class CommunicationError(RuntimeError):
    """A collective did not complete: a peer is gone, or the generation was aborted."""


class BroadcastStore(c10d.Store):
    """A rendezvous store without a server: the coordinator passes on what each rank sets.

    It speaks over the authenticated control channel, so no port is open for it, and it lives with
    the coordinator: any rank may die. Keys of another generation never arrive here.
    """

    def __init__(self, publish: Callable[[str, bytes], None]) -> None:
        super().__init__()
        self._publish = publish
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._aborted = False

    def put(self, key: str, value: bytes) -> None:
        """Take over what another rank has set."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def abort(self) -> None:
        """Make every wait raise, now and later."""
        with self._changed:
            self._aborted = True
            self._changed.notify_all()

    def set(self, key: str, value: Any) -> None:
        """Set a key for all ranks of the generation."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.put(key, data)
        self._publish(key, data)

    def get(self, key: str) -> bytes:
        """Return a key's value as soon as some rank has set it."""
        self.wait([key])
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are set."""
        with self._changed:
            return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Block until all keys are set."""
        deadline = time.monotonic() + (timeout.total_seconds() if timeout else FORM_TIMEOUT_S)
        with self._changed:
            while not all(key in self._values for key in keys):
                left = deadline - time.monotonic()
                if self._aborted or left <= 0 or not self._changed.wait(left):
                    why = "the generation was aborted" if self._aborted else "time is over"
                    missing = [key for key in keys if key not in self._values]
                    raise CommunicationError(f"no value for {missing}: {why}")


class RankGroup:
    """The process group of one rank in one generation, abortable from another thread."""

    def __init__(
        self, *, generation: int, rank: int, world_size: int, store: BroadcastStore, host: str
    ) -> None:
        self.generation = generation
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self._host = host
        self._device: GlooDevice | None = None
        self._lock = threading.Lock()
        self._waiters: dict[int, Callable[[], None]] = {}
        self._num_waiters = 0
        self._closed = False
        self.contributes = True
        """Whether this rank has samples in the present step; if not, its gradients are zero."""
        self.failure = ""
        """Why the generation cannot go on; empty while it can."""

    # --- life ---

    def form(self) -> None:
        """Connect with the other ranks. Raises CommunicationError if that fails or is aborted."""
        if self.world_size == 1:
            return
        self._device = GlooDevice(self._host)
        box: dict[str, Any] = {}
        ready = threading.Event()
        token = self._register(ready.set)
        builder = threading.Thread(
            target=self._build, args=(box, ready), daemon=True, name="etrain-form"
        )
        builder.start()
        ready.wait(FORM_TIMEOUT_S)
        self._forget(token)
        if "backend" not in box:
            raise self._fail(str(box.get("error", "no connection in time")))
        _register_backend()
        _PREBUILT.backend = box.pop("backend")
        try:
            dist.init_process_group(
                BACKEND,
                store=self._store,
                rank=self.rank,
                world_size=self.world_size,
                timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
            )
        finally:
            _PREBUILT.backend = None

    def _build(self, box: dict[str, Any], ready: threading.Event) -> None:
        assert self._device is not None
        try:
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [self._device.device]
            options._timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
            options._threads = 2
            box["backend"] = dist.ProcessGroupGloo(self._store, self.rank, self.world_size, options)
        except Exception as exc:
            box["error"] = exc
        ready.set()

    def abort(self, why: str = "aborted") -> None:
        """Break the collectives of this rank and of its peers. Safe from any thread."""
        self._fail(why)
        self._store.abort()
        with self._lock:
            waiters = list(self._waiters.values())
            self._waiters.clear()
            closed = self._closed
        for wake in waiters:
            wake()
        if self._device is not None and not closed:
            self._device.shut_down()

    def close(self) -> None:
        """Leave the group and free it; the slow part runs in a thread, off the critical path.

        The connections are not shut down here: a peer may still be reading the end of the last
        collective.
        """
        self._fail("closed")
        with self._lock:
            self._closed = True
        if self.world_size == 1 or not dist.is_initialized():
            return
        group = c10d._get_default_group()
        remains: list[Any] = [group, group._get_backend(torch.device("cpu")), self._device]
        del group
        self._device = None
        dist.destroy_process_group()
        # gloo's destructor waits for its 10 ms epoll ticks, or for an operation that is stuck.
        threading.Thread(target=remains.clear, daemon=True, name="etrain-free").start()

    # --- collectives ---

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        """Start to sum ``tensor`` over the ranks, in place."""
        if self.world_size == 1:
            return Pending(self, None)
        return Pending(self, self._start(dist.all_reduce, tensor))

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> Pending:
        """Start to copy rank ``src``'s ``tensor`` into everybody's."""
        if self.world_size == 1:
            return Pending(self, None)
        return Pending(self, self._start(dist.broadcast, tensor, src))

    def _start(self, collective: Callable[..., Any], *args: Any) -> Any:
        self.raise_if_failed()
        try:
            return collective(*args, async_op=True)
        except RuntimeError as exc:
            raise self._fail(_first_line(exc)) from exc

    def ddp_hook(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Sum a bucket of gradients over the ranks; the loss was scaled, so nothing is divided.

        The future that DDP waits for is completed by the collective or by ``abort``, whichever
        comes first; after the backward pass ``raise_if_failed`` tells them apart.
        """
        buffer = bucket.buffer()
        if not self.contributes:
            buffer.zero_()
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        once = threading.Lock()

        def complete() -> None:
            if once.acquire(blocking=False):
                done.set_result(buffer)

        try:
            work = self._start(dist.all_reduce, buffer)
        except CommunicationError:
            complete()
            return done
        token = self._register(complete)

        def completed(future: torch.futures.Future[Any]) -> None:
            self._forget(token)
            try:
                future.value()
            except RuntimeError as exc:
                self._fail(_first_line(exc))
            complete()

        work.get_future().add_done_callback(completed)
        return done

    def raise_if_failed(self) -> None:
        """Raise CommunicationError if a collective failed or the generation was aborted."""
        if self.failure:
            raise CommunicationError(self.failure)

    # --- waiters ---

    def _fail(self, why: str) -> CommunicationError:
        self.failure = self.failure or why
        return CommunicationError(self.failure)

    def _register(self, wake: Callable[[], None]) -> int:
        with self._lock:
            if not self.failure:
                self._num_waiters += 1
                self._waiters[self._num_waiters] = wake
                return self._num_waiters
        wake()
        return 0

    def _forget(self, token: int) -> None:
        with self._lock:
            self._waiters.pop(token, None)


class Pending:
    """A collective under way."""

    def __init__(self, group: RankGroup, work: Any) -> None:
        self._group = group
        self._work = work

    def wait(self) -> None:
        """Block until it is complete. Raises CommunicationError if it failed or was aborted."""
        if self._work is None:
            return
        group = self._group
        # The future is complete before Work.is_completed() turns true: ask the future.
        future = self._work.get_future()
        ready = threading.Event()
        token = group._register(ready.set)
        future.add_done_callback(lambda _: ready.set())
        ready.wait()
        group._forget(token)
        if not future.done():
            raise group._fail("aborted")
        try:
            future.value()
        except RuntimeError as exc:
            raise group._fail(_first_line(exc)) from exc


class GlooDevice:
    """A gloo device whose epoll descriptor is known, and so the sockets of one generation."""

    _making = threading.Lock()

    def __init__(self, host: str) -> None:
        with self._making:
            before = _eventpolls()
            self.device = dist.ProcessGroupGloo.create_device(hostname=host)
            after = _eventpolls()
        fresh = [fd for fd in after if fd not in before]
        # Without /proc (not Linux) the waits are still abandoned; only the peers learn of it later.
        self._epoll = fresh[0] if len(fresh) == 1 else None

    def shut_down(self) -> None:
        """Shut down the device's connections, never its listener: gloo would terminate."""
        if self._epoll is None:
            return
        for fd in _watched(self._epoll):
            with contextlib.suppress(OSError):
                _shut_down_connection(fd)


def _shut_down_connection(fd: int) -> None:
    copy = os.dup(fd)
    try:
        connection = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)  # the loop's own pipe: no socket took the copy over
        raise
    with connection:
        if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            connection.shutdown(socket.SHUT_RDWR)


def _eventpolls() -> set[int]:
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if "eventpoll" in os.readlink(f"/proc/self/fd/{name}"):
                    found.add(int(name))
    return found


def _watched(epoll: int) -> list[int]:
    with contextlib.suppress(OSError), open(f"/proc/self/fdinfo/{epoll}") as info:
        return [int(line.split()[1]) for line in info if line.startswith("tfd")]
    return []


class _Prebuilt(threading.local):
    backend: Any = None


_PREBUILT = _Prebuilt()


def _register_backend() -> None:
    """Make torch use the group built beforehand, so that ``init_process_group`` never blocks."""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(
            BACKEND,
            lambda *_: _PREBUILT.backend,
            extended_api=True,
            devices=["cpu", "cuda"],
        )


def _first_line(exc: BaseException) -> str:
    return str(exc).strip().splitlines()[0] if str(exc).strip() else type(exc).__name__
