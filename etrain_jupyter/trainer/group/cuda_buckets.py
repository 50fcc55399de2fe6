"""Copies between a GPU and the host: sums through gloo, and small tensors for the step header.

gloo sums gradients on a GPU, for example if two ranks share it. It accepts CUDA tensors, but its
futures do not synchronize the device's streams. So the bucket goes through host memory, in the
exchange thread, which can be abandoned.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch


def sum_through_host(
    buffer: torch.Tensor,
    *,
    sum_on_host: Callable[[torch.Tensor], None],
    complete: Callable[[], None],
) -> Callable[[], None]:
    """Start copying a bucket to the host; return the rest of the work, which blocks.

    Args:
        buffer: The bucket, on the device.
        sum_on_host: Sums a host tensor over the ranks, in place; blocks.
        complete: Completes the future that DDP waits for. Called on the stream of the copy back to
            the device. The future records this stream, so that readers of the gradients wait for
            the copy.
    """
    # autograd's stream    gradients ── copy to host ─ event ── (backward pass continues)
    # exchange thread                                  wait ── sum over the ranks ─┐
    # a stream of the pool                                                         copy back
    host = torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=buffer.is_cuda)
    host.copy_(buffer, non_blocking=True)
    copied = _Moment(buffer)

    def work() -> None:
        copied.wait()
        sum_on_host(host)
        with _stream_for(buffer):
            buffer.copy_(host, non_blocking=True)
            complete()

    return work


def future_for(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Return a future that makes its readers' streams wait for the stream that completes it."""
    return torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)


class _Moment:
    # An event in the current stream that another thread can wait for. It is a blocking event,
    # because by default the wait would spin on a core that the training thread may need.
    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: Any = None
        if tensor.is_cuda:
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


def _stream_for(buffer: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    if not buffer.is_cuda:
        return contextlib.nullcontext()
    # A stream from torch's pool, so that the copy back does not wait for the backward pass.
    stream: Any = torch.cuda.Stream(device=buffer.device)  # type: ignore[no-untyped-call]
    return torch.cuda.stream(stream)


def moment_of_device() -> Callable[[], None]:
    """Return a function that another thread calls to wait for the work queued on the device."""
    event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    wait: Callable[[], None] = event.synchronize
    return wait


class HostCopies:
    """Starts copies of small tensors in the training thread; another thread waits for them.

    A ``.cpu()`` between the forward and the backward pass waits until the device has completed the
    forward pass. The device is then idle until the backward pass is queued.

    Example::

        copy = copies.start(loss)      # the training thread continues
        wait = copies.moment()
        ...
        wait(); loss = float(copy)     # in the exchange thread
    """

    def start(self, tensor: torch.Tensor) -> torch.Tensor:
        """Start copying a tensor; return the copy, whose values are valid after ``moment``."""
        # A copy to memory that is not pinned would wait for the device.
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        copy.copy_(tensor.detach(), non_blocking=True)
        return copy

    def moment(self) -> Callable[[], None]:
        """Return a function that waits until all copies started so far are complete."""
        return moment_of_device()


def copies_for(device: torch.device | str) -> HostCopies | None:
    """Return the copies for a device; None if its tensors are in host memory."""
    return HostCopies() if torch.device(device).type == "cuda" else None
