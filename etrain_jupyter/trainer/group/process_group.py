"""Process group of one rank in one generation, formed and broken within a running process.

The design of this file is based on three measurements (see ``docs/benchmarks/steps.md``):

* No torch call unblocks a gloo collective with a silent peer; only the group's own timeout does.
  Shutting down the sockets of the group's device unblocks it within milliseconds. So each
  generation has its own device.
* Even then, a thread can stay inside gloo. So nothing waits inside gloo: a wait ends when the
  operation's future completes *or* the generation is aborted, whichever comes first. In the second
  case, the operation is abandoned, and ends at its own timeout.
* The constructor of ``ProcessGroupGloo`` may block without a timeout, so it runs in a thread that
  can be abandoned (``forming``).

gloo accepts the first process that connects, so no tensor is sent before ``authentication`` has
verified that every connection is between two ranks.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from etrain_jupyter.trainer.group.backends import (
    GLOO,
    NCCL,
    ConnectNccl,
    connect_nccl,
    make_default_group,
)
from etrain_jupyter.trainer.group.forming import Forming
from etrain_jupyter.trainer.group.gloo_device import GlooDevice
from etrain_jupyter.trainer.group.pending import ExchangeThread, Pending, Waiters, text_of
from etrain_jupyter.trainer.group.rendezvous import BroadcastStore, CommunicationError
from etrain_jupyter.trainer.group.small_sum import is_small, sum_small
from etrain_jupyter.trainer.group.transports import GlooTransport, NcclTransport, Transport
from etrain_jupyter.wire.progress_page import ProgressPage

ABORTED = "aborted"
"""Failure of a generation that the coordinator aborted; the coordinator knows the cause."""

__all__ = ["ABORTED", "BroadcastStore", "CommunicationError", "Pending", "RankGroup"]


class RankGroup:
    """The process group of one rank in one generation. Another thread can abort it.

    Args:
        store: The store in which the ranks find each other.
        host: Address at which other machines reach this one.
        backend: ``gloo``, or ``nccl`` for ranks with one GPU each: NCCL then carries the gradients
            on the GPU, and gloo all other data.
        secret: Secret of the generation, see ``authentication``; the same on all its ranks.
        progress: Progress page on which each collective is counted when it starts.
        connect_nccl: Replaces the function of this name in tests.
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
        secret: bytes = b"",
        progress: ProgressPage | None = None,
        connect_nccl: ConnectNccl = connect_nccl,
    ) -> None:
        self.generation = generation
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self._host = host
        self._secret = secret
        self._progress = progress
        self._waiters = Waiters()
        self._transport, self._connect_nccl = self._make_transport(backend, connect_nccl)
        self._device: GlooDevice | None = None
        self._gloo: Any = None
        self._default_group: dist.ProcessGroup | None = None
        self._exchange: ExchangeThread | None = None
        self._lock = threading.Lock()
        """Guards ``_exchange``, ``_closed`` and the device's descriptors against a concurrent
        abort."""
        self._closed = False
        self.contributes = True
        """False if this rank has no samples in the current step, so that its gradients are zero."""

    def _make_transport(
        self, backend: str, connect_nccl: ConnectNccl
    ) -> tuple[Transport, Callable[[], None] | None]:
        # Avoids a reference cycle, so that a generation is freed when it ends and not by the
        # garbage collector.
        collectives = weakref.proxy(self)
        if backend != NCCL:
            return GlooTransport(collectives, self._waiters), None
        nccl = NcclTransport(collectives, self._waiters)
        return nccl, partial(connect_nccl, self._store, self.rank, self.world_size, nccl.keep)

    @property
    def failure(self) -> str:
        """Reason why the generation cannot continue; empty while it can."""
        return self._waiters.failure

    @property
    def failed_backend(self) -> str:
        """Backend that failed, ``gloo`` or ``nccl``; empty after an abort."""
        return self._waiters.failed_backend

    # --- lifecycle ---

    def form(self) -> None:
        """Connect to the other ranks and become torch's default group.

        Raises:
            CommunicationError: If this fails or is aborted. An abort takes effect at once, even
                while gloo is blocked.
        """
        if self.world_size > 1:
            self.connect()
            # DDP and user code that calls torch.distributed use the default group.
            self._default_group = make_default_group(
                self._gloo, self._store, self.rank, self.world_size
            )

    def connect(self) -> None:
        """Connect to the other ranks. Raises CommunicationError if this fails or is aborted."""
        self.raise_if_failed()
        forming = Forming(
            store=self._store,
            rank=self.rank,
            world_size=self.world_size,
            secret=self._secret,
            waiters=self._waiters,
            connect_nccl=self._connect_nccl,
        )
        # Set before connecting, so that an abort can shut the device down in the meantime.
        self._device = GlooDevice(self._host)
        self._gloo = forming.connect(self._device)
        self.raise_if_failed()

    def abort(self, why: str = ABORTED) -> None:
        """Break the collectives of this rank and its peers. Can be called from any thread."""
        # In a running step:
        #
        #     control thread   fail ── sockets shut down ── wake_all
        #     main thread      (waits) ........................ raises, reports, closes the group
        #     gloo's threads   (blocked) ...... released, futures fail
        #     peers            (blocked) ...... see the connection end, and fail as well
        #
        # Set the reason first: every thread that wakes up raises it.
        self._waiters.fail(why)
        # Ranks that are still forming wait in the store.
        self._store.abort()
        with self._lock:
            if self._exchange is not None:
                self._exchange.end()
            self._break_connections()
        # Wake the main thread last, because it closes the group, after which the device no longer
        # exists.
        self._waiters.wake_all()
        self._transport.end(gently=False)

    def _break_connections(self) -> None:
        # Called under the lock: after ``close``, the descriptors are freed in another thread, and
        # their numbers may belong to the next generation's connections.
        if self._device is not None and not self._closed:
            self._device.shut_down()

    def close(self) -> None:
        """Leave the group and free it; the slow part runs in a separate thread.

        Remove DDP from the model first. Otherwise, DDP may hold the last reference to the group,
        and its destructor would wait here for gloo's destructor.
        """
        # The connections of an intact group are not shut down, because a peer may still be reading
        # the end of the last collective.
        is_intact = not self.failure
        self._waiters.fail("closed")
        with self._lock:
            # Peers of a failed group may be stuck: shutting down the connections releases them.
            if not is_intact:
                self._break_connections()
            self._closed = True
        if self._exchange is not None:
            self._exchange.end()
        self._transport.end(gently=is_intact)
        if self._default_group is not None:
            dist.destroy_process_group(self._default_group)
        remains = [self._default_group, self._gloo, self._device]
        self._default_group = self._gloo = self._device = None
        if any(part is not None for part in remains):
            # gloo's destructor waits for its 10 ms epoll ticks, or for a stuck operation, which
            # must not delay the next generation.
            threading.Thread(target=remains.clear, daemon=True, name="etrain-free").start()

    # --- collectives ---

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        """Start summing ``tensor`` over the ranks, in place."""
        if self.world_size == 1:
            return Pending(self._waiters, None)
        return Pending(self._waiters, self.start_sum(tensor))

    def start_sum(self, tensor: torch.Tensor) -> Any:
        """Start summing a host tensor over the ranks, in place; return a future.

        Raises:
            CommunicationError: If the generation has failed.
        """
        if is_small(tensor, self.world_size):
            return self.submit(partial(sum_small, self, tensor), is_counted=True)
        self.raise_if_failed()
        self.count()
        try:
            # The future completes before Work.is_completed() becomes true, so return the future.
            return dist.all_reduce(tensor, async_op=True).get_future()
        except RuntimeError as exc:
            raise self._waiters.fail(text_of(exc), backend=GLOO) from exc

    def all_reduce_after(self, prepare: Callable[[], None], tensor: torch.Tensor) -> Pending:
        """Run ``prepare``, then sum a host tensor over the ranks in place, in the exchange thread.

        All ranks must start the sums of a generation in the same order. So the calling thread must
        not start another sum until this one and all later sums in the exchange thread are complete.

        Args:
            prepare: Sets the tensor's values; may block.
            tensor: The tensor.
        """

        def work() -> None:
            prepare()
            if self.world_size > 1:
                self.sum_on_host(tensor)

        return self.start(work)

    def sum_now(self, tensor: torch.Tensor) -> None:
        """Sum a tensor over the ranks, in place and on any device. Blocks.

        Raises:
            CommunicationError: A peer is lost.
        """
        if self.world_size > 1:
            self._transport.sum_now(tensor)

    def wait_for(self, collective: Callable[[], object]) -> None:
        """Run a collective in which torch itself waits; an abort breaks the connections to end it.

        Raises:
            CommunicationError: A peer is lost.
        """
        self.raise_if_failed()
        self.count()
        try:
            collective()
        except RuntimeError as exc:
            raise self._waiters.fail(text_of(exc), backend=GLOO) from exc

    def count(self) -> None:
        """Count a collective as progress, because the coordinator compares the ranks' counts."""
        if self._progress is not None:
            self._progress.count_collective()

    def beat(self) -> None:
        """Send a heartbeat from within a long ``work``, while the main thread waits for it."""
        if self._progress is not None:
            self._progress.beat()

    # --- messages between two ranks ---

    def start(self, work: Callable[[], None], *, is_counted: bool = True) -> Pending:
        """Run ``work`` in the generation's exchange thread, after all work started earlier.

        The work may block inside gloo, but the thread that waits for it does not, because an abort
        abandons the work. An exception in the work becomes a CommunicationError and ends the
        generation.

        Args:
            work: Must not wait for other work in the same thread.
            is_counted: True if every rank runs this work, so that it counts as progress, like a
                collective.
        """
        return Pending(self._waiters, self.submit(work, is_counted=is_counted))

    def submit(self, work: Callable[[], None], *, is_counted: bool = False) -> Future[None]:
        """Run ``work`` in the exchange thread (see ``start``) and return its future."""
        self.raise_if_failed()
        if is_counted:
            self.count()
        with self._lock:
            # Created on demand, because many generations never use it. It is never created after a
            # failure, because ``abort`` has already run, so nothing would end the thread.
            if self._exchange is None and not self.failure:
                self._exchange = ExchangeThread()
        self.raise_if_failed()
        assert self._exchange is not None
        return self._exchange.submit(work)

    def isend(self, tensor: torch.Tensor, dst: int, tag: int) -> Any:
        """Start sending a contiguous CPU tensor.

        Call this only inside the ``work`` of ``start``.

        Returns:
            Torch's ``Work``, whose ``wait`` blocks.
        """
        return self._peers().send([tensor], dst, tag)

    def irecv(self, tensor: torch.Tensor, src: int, tag: int) -> Any:
        """Start receiving into a contiguous CPU tensor.

        Call this only inside the ``work`` of ``start``.

        Returns:
            Torch's ``Work``, whose ``wait`` blocks.
        """
        return self._peers().recv([tensor], src, tag)

    def _peers(self) -> Any:
        # Use this generation's own connections, not torch's default group. An abandoned exchange
        # thread may call this after the next generation has replaced the default group, to which it
        # would then send stale gradients.
        gloo = self._gloo
        self.raise_if_failed()
        if gloo is None:
            raise CommunicationError("there is no other rank in this generation")
        return gloo

    def sum_on_host(self, tensor: torch.Tensor) -> None:
        """Sum a host tensor over the ranks, in place.

        Call this only inside the ``work`` of ``start``.
        """
        if is_small(tensor, self.world_size):
            sum_small(self, tensor)
        else:
            self._peers().allreduce([tensor]).wait()

    # --- gradients ---

    def ddp_hook(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Sum a bucket of gradients over the ranks, as DDP's communication hook."""
        # The sum is not divided, because each rank's loss is already scaled to its share of the
        # step's mean. A failure also completes the future, because DDP waits for it without a
        # timeout. ``settle`` raises the error after the backward pass.
        buffer: torch.Tensor = bucket.buffer()
        # A rank without samples uses another rank's samples, which must not count twice.
        if not self.contributes:
            buffer.zero_()
        return self._transport.sum_bucket(buffer)

    def settle(self) -> None:
        """Wait until the gradients of the backward pass are summed over the ranks.

        Raises:
            CommunicationError: If a sum failed or the generation was aborted.
        """
        self.raise_if_failed()
        self._transport.settle()

    def raise_if_failed(self) -> None:
        """Raise CommunicationError if a collective failed or the generation was aborted."""
        if self.failure:
            raise CommunicationError(self.failure)
