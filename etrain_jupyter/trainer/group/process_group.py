"""One process group a generation, formed and broken inside living processes.

Three facts (measured, see ``benchmarks/README.md``) shape this file:

* No call of torch unblocks a gloo collective whose peer is silent; only the group's own time-out
  does. Shutting down the sockets of the group's device does it in milliseconds. Hence a device of
  its own for each generation.
* Even then a thread can stay inside gloo. So nobody ever waits there: a wait ends when the
  operation's future completes *or* when the generation is aborted, whichever comes first, and the
  operation is left to time out.
* The constructor of ``ProcessGroupGloo`` may block without any time-out, so it runs in a thread
  that can be abandoned.

gloo takes whoever connects first, so no tensor is sent before ``authentication`` has found that
every connection is one between two ranks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist

from etrain_jupyter.trainer.group.admission import ADMIT_EVERY_S, Admission, make_held_device
from etrain_jupyter.trainer.group.authentication import authenticate, give_up, raise_if_flooded
from etrain_jupyter.trainer.group.backends import (
    GLOO,
    NCCL,
    ConnectNccl,
    connect_gloo,
    connect_nccl,
    end_nccl,
    make_default_group,
)
from etrain_jupyter.trainer.group.cuda_buckets import (
    future_for,
    moment_of_device,
    sum_through_host,
)
from etrain_jupyter.trainer.group.exchange import Exchange
from etrain_jupyter.trainer.group.gloo_device import GlooDevice
from etrain_jupyter.trainer.group.pending import Pending, Waiters, error_of, text_of
from etrain_jupyter.trainer.group.rendezvous import (
    FORM_TIMEOUT_S,
    BroadcastStore,
    CommunicationError,
)
from etrain_jupyter.wire.progress_page import ProgressPage

ABORTED = "aborted"
"""Why a generation fails that the coordinator has aborted: somebody else knows more."""

__all__ = ["ABORTED", "BroadcastStore", "CommunicationError", "Pending", "RankGroup"]

WATCH_EVERY_S = 0.02
"""How often a rank counts the connections of strangers while it connects."""


class RankGroup:
    """The process group of one rank in one generation, abortable from another thread.

    Args:
        generation: Its number.
        rank: This rank.
        world_size: Ranks of the generation.
        store: Where the ranks find each other.
        host: The address that other machines reach this one by.
        backend: ``gloo``; or ``nccl``, for ranks with a GPU each: gradients on the GPU then go by
            NCCL, and everything else by gloo as ever.
        is_guarded: Whether strangers are expected, so that ``admission`` keeps them out. All ranks
            of a generation say the same.
        progress: Where each collective that begins is counted.
        connect_nccl: Stands for the real thing in tests.
    """

    def __init__(
        self,
        *,
        generation: int,
        rank: int,
        world_size: int,
        store: BroadcastStore,
        host: str,
        backend: str = GLOO,
        is_guarded: bool = False,
        progress: ProgressPage | None = None,
        connect_nccl: ConnectNccl = connect_nccl,
    ) -> None:
        self.generation = generation
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self._host = host
        self._has_nccl = backend == NCCL
        self._is_guarded = is_guarded
        self._progress = progress
        self._connect_nccl = connect_nccl
        self._device: GlooDevice | None = None
        self._gloo: Any = None
        self._nccl: Any = None
        self._default_group: dist.ProcessGroup | None = None
        self._exchange: Exchange | None = None
        self._lock = threading.Lock()
        self._waiters = Waiters()
        self._closed = False
        self.contributes = True
        """Whether this rank has samples in the present step; if not, its gradients are zero."""

    @property
    def failure(self) -> str:
        """Why the generation cannot go on; empty while it can."""
        return self._waiters.failure

    @property
    def failed_backend(self) -> str:
        """The backend that made it fail, ``gloo`` or ``nccl``; empty after an abort."""
        return self._waiters.failed_backend

    # --- life ---

    def form(self) -> None:
        """Connect with the other ranks and become torch's default group.

        Raises:
            CommunicationError: If that fails or is aborted; at once then, whatever gloo does.
        """
        if self.world_size > 1:
            self.connect()
            self._default_group = make_default_group(
                self._gloo, self._store, self.rank, self.world_size
            )

    def connect(self) -> None:
        """Connect with the other ranks. Raises CommunicationError if that fails or is aborted."""
        self.raise_if_failed()
        self._device = self._make_device()
        box: dict[str, Any] = {"stage": GLOO}
        ready = threading.Event()
        token = self._waiters.register(ready.set)
        builder = threading.Thread(
            target=self._build, args=(self._device, box, ready), daemon=True, name="etrain-form"
        )
        builder.start()
        self._watch_strangers(self._device, box, ready)
        self._waiters.forget(token)
        if "backend" not in box:
            error = box.get("error")
            stage = box["stage"]
            why = text_of(error) if error is not None else f"no connection by {stage} in time"
            raise self._waiters.fail(why, backend=stage)
        self._gloo = box.pop("backend")
        self.raise_if_failed()

    def _make_device(self) -> GlooDevice:
        if not self._is_guarded:
            return GlooDevice(self._host)
        try:
            return make_held_device(self._host)
        except CommunicationError as exc:
            raise self._waiters.fail(str(exc), backend=GLOO) from exc

    def _watch_strangers(
        self, device: GlooDevice, box: dict[str, Any], ready: threading.Event
    ) -> None:
        """Wait until ``ready``. Until gloo has connected, keep strangers from exhausting it."""
        deadline = time.monotonic() + FORM_TIMEOUT_S
        every_s, admission = WATCH_EVERY_S, None
        try:
            if self._is_guarded:
                size = self.world_size
                admission = Admission(device, self._store, rank=self.rank, world_size=size)
                every_s = ADMIT_EVERY_S
            while not (ready.wait(every_s) or "is_authenticated" in box):
                if time.monotonic() > deadline:
                    break
                raise_if_flooded(device)
                if admission is not None:
                    admission.admit()
        except CommunicationError as exc:
            raise self._waiters.fail(str(exc), backend=GLOO) from exc
        ready.wait(max(0.0, deadline - time.monotonic()))

    def _build(self, device: GlooDevice, box: dict[str, Any], ready: threading.Event) -> None:
        try:
            gloo = self._connect_gloo(device)
            box["is_authenticated"] = True
            if self._has_nccl:
                box["stage"] = NCCL
                self._connect_nccl(self._store, self.rank, self.world_size, self._keep_nccl)
            box["backend"] = gloo
        except Exception as exc:
            box["error"] = exc
        ready.set()

    def _connect_gloo(self, device: GlooDevice) -> Any:
        try:
            gloo = connect_gloo(self._store, self.rank, self.world_size, device)
        except RuntimeError as exc:
            give_up(self._store, self.rank, exc)
            raise
        authenticate(device, self._store, rank=self.rank, world_size=self.world_size)
        return gloo

    def _keep_nccl(self, backend: Any) -> None:
        with self._lock:
            is_late = bool(self.failure)
            self._nccl = None if is_late else backend
        if is_late:
            raise CommunicationError(self.failure)

    def abort(self, why: str = ABORTED) -> None:
        """Break the collectives of this rank and of its peers. Safe from any thread."""
        self._waiters.fail(why)
        self._store.abort()
        with self._lock:
            nccl, self._nccl = self._nccl, None
            if self._exchange is not None:
                self._exchange.end()
            self._break_connections()
        # Last: whoever wakes closes the group, and then there is nothing to shut down any more.
        self._waiters.wake_all()
        if nccl is not None:
            end_nccl(nccl, gently=False)

    def _break_connections(self) -> None:
        """Make gloo let go of every thread. Under the lock: a closed group owns no descriptor."""
        if self._device is not None and not self._closed:
            self._device.shut_down()

    def close(self) -> None:
        """Leave the group and free it; the slow part runs in a thread, off the critical path.

        Whatever wraps the model for this group has to be dropped before: if it is the last to hold
        the group, its end waits here for gloo's.

        The connections of a whole group are not shut down: a peer may still be reading the end of
        the last collective.
        """
        is_whole = not self.failure
        self._waiters.fail("closed")
        with self._lock:
            if not is_whole:
                self._break_connections()
            self._closed = True
            nccl, self._nccl = self._nccl, None
        if self._exchange is not None:
            self._exchange.end()
        if nccl is not None:
            end_nccl(nccl, gently=is_whole)
        if self._default_group is not None:
            dist.destroy_process_group(self._default_group)
        remains = [self._default_group, self._gloo, self._device]
        self._default_group = self._gloo = self._device = None
        if any(part is not None for part in remains):
            # gloo's destructor waits for its 10 ms epoll ticks, or for an operation that is stuck.
            threading.Thread(target=remains.clear, daemon=True, name="etrain-free").start()

    # --- collectives ---

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        """Start to sum ``tensor`` over the ranks, in place."""
        return self._pending(dist.all_reduce, tensor)

    def sum_now(self, tensor: torch.Tensor) -> None:
        """Sum a tensor over the ranks, in place and on whatever device; for threads that may wait.

        Raises:
            CommunicationError: A peer is lost.
        """
        if tensor.is_cuda and self._has_nccl:
            self._sum_by_nccl(tensor).wait()
            self.raise_if_failed()
            return
        on_host = tensor.cpu()
        self.all_reduce(on_host).wait()
        if tensor.is_cuda:
            tensor.copy_(on_host)

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> Pending:
        """Start to copy rank ``src``'s ``tensor`` into everybody's."""
        return self._pending(dist.broadcast, tensor, src)

    def _pending(self, collective: Callable[..., Any], *args: Any) -> Pending:
        if self.world_size == 1:
            return Pending(self._waiters, None)
        # The future is complete before Work.is_completed() turns true: ask the future.
        future = self._start(collective, *args).get_future()
        return Pending(self._waiters, future)

    def _start(self, collective: Callable[..., Any], *args: Any) -> Any:
        self.raise_if_failed()
        self._count()
        try:
            return collective(*args, async_op=True)
        except RuntimeError as exc:
            raise self._waiters.fail(text_of(exc), backend=GLOO) from exc

    def wait_for(self, collective: Callable[[], object]) -> None:
        """Do a collective that torch waits for itself; only an abort's broken connections end it.

        Raises:
            CommunicationError: A peer is lost.
        """
        self.raise_if_failed()
        self._count()
        try:
            collective()
        except RuntimeError as exc:
            raise self._waiters.fail(text_of(exc), backend=GLOO) from exc

    def _count(self) -> None:
        if self._progress is not None:
            self._progress.count_collective()

    def beat(self) -> None:
        """Give a sign of life from inside ``work`` that takes long, while the main thread waits."""
        if self._progress is not None:
            self._progress.beat()

    # --- messages between two ranks ---

    def start(self, work: Callable[[], None], *, is_counted: bool = True) -> Pending:
        """Do ``work`` on the generation's exchange thread, after what was started before it.

        The work may block inside gloo; whoever waits for it does not, and an abort abandons it.
        Whatever it raises becomes a CommunicationError and ends the generation.

        Args:
            work: Does not wait for anything else that the thread would have to do first.
            is_counted: Whether every rank does this, so that it counts as progress like a
                collective.
        """
        self.raise_if_failed()
        if is_counted:
            self._count()
        future = self._submit(work)
        return Pending(self._waiters, future)

    def _submit(self, work: Callable[[], None]) -> Future[None]:
        with self._lock:
            # Never made after a failure: nobody would end its thread any more.
            if self._exchange is None and not self.failure:
                self._exchange = Exchange()
        self.raise_if_failed()
        assert self._exchange is not None
        return self._exchange.submit(work)

    def isend(self, tensor: torch.Tensor, dst: int, tag: int) -> Any:
        """Start to send a contiguous CPU tensor. Only inside the ``work`` of ``start``.

        Returns:
            Torch's ``Work``, whose ``wait`` blocks.
        """
        return self._peers().send([tensor], dst, tag)

    def irecv(self, tensor: torch.Tensor, src: int, tag: int) -> Any:
        """Start to receive into a contiguous CPU tensor. Only inside the ``work`` of ``start``.

        Returns:
            Torch's ``Work``, whose ``wait`` blocks.
        """
        return self._peers().recv([tensor], src, tag)

    def _peers(self) -> Any:
        # This generation's own connections, never torch's default group: an abandoned thread
        # would speak into the next generation.
        gloo = self._gloo
        self.raise_if_failed()
        if gloo is None:
            raise CommunicationError("there is no other rank to speak to")
        return gloo

    # --- gradients ---

    def ddp_hook(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Sum a bucket of gradients over the ranks; the loss was scaled, so nothing is divided.

        The future that DDP waits for is completed by the collective or by ``abort``, whichever
        comes first; after the backward pass ``settle`` tells them apart.
        """
        buffer: torch.Tensor = bucket.buffer()
        if not self.contributes:
            buffer.zero_()
        done = future_for(buffer)
        once = threading.Lock()

        def complete() -> None:
            if once.acquire(blocking=False):
                done.set_result(buffer)

        try:
            if self._has_nccl:
                return self._sum_by_nccl(buffer)
            future = self._start_sum(buffer, complete)
        except CommunicationError:
            complete()
            return done
        token = self._waiters.register(complete)

        def completed(future: Any) -> None:
            self._waiters.forget(token)
            error = error_of(future)
            if error is not None:
                self._waiters.fail(text_of(error), backend=GLOO)
            complete()

        future.add_done_callback(completed)
        return done

    def _start_sum(self, buffer: torch.Tensor, complete: Callable[[], None]) -> Any:
        """Start to sum by gloo; return the future of it, torch's or the exchange thread's."""
        if not buffer.is_cuda:
            return self._start(dist.all_reduce, buffer).get_future()
        self.raise_if_failed()
        self._count()
        work = sum_through_host(buffer, sum_on_host=self._sum_on_host, complete=complete)
        return self._submit(work)

    def _sum_on_host(self, tensor: torch.Tensor) -> None:
        self._peers().allreduce([tensor]).wait()

    def _sum_by_nccl(self, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Queue the sum on the device. NCCL's futures are complete once that is done."""
        nccl = self._nccl
        self.raise_if_failed()
        self._count()
        try:
            future = nccl.allreduce([buffer]).get_future()
        except RuntimeError as exc:
            raise self._waiters.fail(text_of(exc), backend=NCCL) from exc

        def read(future: torch.futures.Future[Any]) -> torch.Tensor:
            error = error_of(future)
            if error is not None:
                self._waiters.fail(text_of(error), backend=NCCL)
            return buffer

        return future.then(read)  # type: ignore[no-any-return]

    def settle(self) -> None:
        """Wait until the gradients of the backward pass are sums over the ranks, before an update.

        Raises:
            CommunicationError: If they are not: a sum failed or the generation was aborted.
        """
        self.raise_if_failed()
        if self._nccl is not None:
            # The device, not DDP, knows whether the sums are done.
            future = self._submit(moment_of_device())
            Pending(self._waiters, future).wait()
            self.raise_if_failed()

    def raise_if_failed(self) -> None:
        """Raise CommunicationError if a collective failed or the generation was aborted."""
        if self.failure:
            raise CommunicationError(self.failure)
