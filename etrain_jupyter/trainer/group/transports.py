"""Transports for gradients: gloo (directly or through host memory) or NCCL.

=========  =================  ==========================================  ======================
backend    gradients          a bucket goes                               its future completes
=========  =================  ==========================================  ======================
``gloo``   in host memory     to gloo, small ones in the exchange thread  with gloo's, or on abort
``gloo``   on a GPU           through host memory, in the exchange thread with that, or on abort
``nccl``   on a GPU           to NCCL directly                            on the device
=========  =================  ==========================================  ======================
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

import torch

from etrain_jupyter.trainer.group.backends import GLOO, NCCL, end_nccl
from etrain_jupyter.trainer.group.cuda_buckets import (
    future_for,
    moment_of_device,
    sum_through_host,
)
from etrain_jupyter.trainer.group.pending import Pending, Waiters, error_of, text_of
from etrain_jupyter.trainer.group.rendezvous import CommunicationError


class Collectives(Protocol):
    """The operations of a rank's process group that a transport uses."""

    def start_sum(self, tensor: torch.Tensor) -> Any:
        """Start summing a host tensor over the ranks, in place; return a future."""
        ...

    def submit(self, work: Callable[[], None], *, is_counted: bool = False) -> Future[None]:
        """Run ``work`` in the exchange thread."""
        ...

    def sum_on_host(self, tensor: torch.Tensor) -> None:
        """Sum a host tensor over the ranks, in place. Blocks; only in the exchange thread."""
        ...

    def count(self) -> None:
        """Count a collective as progress."""
        ...

    def raise_if_failed(self) -> None:
        """Raise CommunicationError if the generation has failed."""
        ...


class Transport(Protocol):
    """Sums gradients over the ranks of one generation."""

    def sum_bucket(self, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Start summing a bucket of gradients, in place, for DDP."""
        ...

    def sum_now(self, tensor: torch.Tensor) -> None:
        """Sum a tensor, in place and on any device; blocks."""
        ...

    def settle(self) -> None:
        """Wait until the sums that DDP has waited for are also complete on the device."""
        ...

    def end(self, *, gently: bool) -> None:
        """Release the backend; ``gently`` if none of its collectives is stuck."""
        ...


class GlooTransport:
    """Sums gradients through gloo."""

    def __init__(self, collectives: Collectives, waiters: Waiters) -> None:
        self._collectives = collectives
        self._waiters = waiters

    def sum_bucket(self, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Start summing a bucket of gradients, in place."""
        # DDP blocks on this future without a timeout, so an abort must complete it, too. The
        # group's ``settle`` raises the error after the backward pass:
        #
        #     gloo            sum ── completed ─┐
        #     abort           wake_all ─────────┴─ complete, whichever comes first
        #     main thread     backward pass ── DDP waits ── settle raises, or the sums are good
        done = future_for(buffer)
        # torch forbids completing a future twice.
        once = threading.Lock()

        def complete() -> None:
            if once.acquire(blocking=False):
                done.set_result(buffer)

        future: Any  # from torch or from the exchange thread
        try:
            if not buffer.is_cuda:
                future = self._collectives.start_sum(buffer)
            else:
                self._collectives.raise_if_failed()
                sum_on_host = self._collectives.sum_on_host
                work = sum_through_host(buffer, sum_on_host=sum_on_host, complete=complete)
                future = self._collectives.submit(work, is_counted=True)
        except CommunicationError:
            # torch may replace an exception raised in autograd's callback.
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

    def sum_now(self, tensor: torch.Tensor) -> None:
        """Sum a tensor, in place; a GPU tensor goes through host memory."""
        on_host = tensor.cpu()  # the tensor itself if it is in host memory
        Pending(self._waiters, self._collectives.start_sum(on_host)).wait()
        if tensor.is_cuda:
            tensor.copy_(on_host)

    def settle(self) -> None:
        """Do nothing, because DDP's futures complete together with the sums."""

    def end(self, *, gently: bool) -> None:
        """Do nothing, because the group itself shuts down gloo."""


class NcclTransport:
    """Sums gradients on GPUs through NCCL, and tensors in host memory through gloo."""

    def __init__(self, collectives: Collectives, waiters: Waiters) -> None:
        self._collectives = collectives
        self._waiters = waiters
        self._gloo = GlooTransport(collectives, waiters)
        self._lock = threading.Lock()
        self.backend: Any = None

    def keep(self, backend: Any) -> None:
        """Take over the backend before it connects. Called in the builder thread.

        Raises:
            CommunicationError: If the generation has been aborted in the meantime. ``end`` may
                already have been called, and would not be called again.
        """
        # ``abort`` sets the failure before it calls ``end``. So either the failure is seen here, or
        # ``end`` sees the backend and aborts it. A backend that is not aborted would block in NCCL
        # forever.
        with self._lock:
            is_late = bool(self._waiters.failure)
            self.backend = None if is_late else backend
        if is_late:
            raise CommunicationError(self._waiters.failure)

    def sum_bucket(self, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Queue the sum on the device; DDP waits for it there."""
        try:
            return self._sum(buffer)
        except CommunicationError:
            # As with gloo, ``settle`` raises the error later, outside autograd's callback.
            done = future_for(buffer)
            done.set_result(buffer)
            return done

    def _sum(self, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        backend = self.backend
        self._collectives.raise_if_failed()
        self._collectives.count()
        try:
            future = backend.allreduce([buffer]).get_future()
        except RuntimeError as exc:
            raise self._waiters.fail(text_of(exc), backend=NCCL) from exc

        def read(future: torch.futures.Future[Any]) -> torch.Tensor:
            error = error_of(future)
            if error is not None:
                self._waiters.fail(text_of(error), backend=NCCL)
            return buffer

        return future.then(read)  # type: ignore[no-any-return]

    def sum_now(self, tensor: torch.Tensor) -> None:
        """Sum a tensor, in place: through NCCL on a GPU, otherwise through gloo."""
        if not tensor.is_cuda:
            self._gloo.sum_now(tensor)
            return
        self._sum(tensor).wait()
        self._collectives.raise_if_failed()

    def settle(self) -> None:
        """Wait for the device: DDP's futures complete as soon as the sums are queued on it."""
        # Wait in the exchange thread, because a sum never completes on the device if a peer is
        # lost.
        if self.backend is not None:
            future = self._collectives.submit(moment_of_device())
            Pending(self._waiters, future).wait()
            self._collectives.raise_if_failed()

    def end(self, *, gently: bool) -> None:
        """Release the backend in a thread, because this may wait for a stuck kernel."""
        # Called by ``abort`` and by ``close``, from two threads, but only one of them gets the
        # backend.
        with self._lock:
            backend, self.backend = self.backend, None
        if backend is not None:
            end_nccl(backend, gently=gently)
