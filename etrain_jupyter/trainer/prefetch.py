"""Prepare batches in advance: a background thread, pinned memory, and copies that do not block."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

NUM_AHEAD = 2
"""Number of batches that are prepared in advance."""

Item = TypeVar("Item")
Result = TypeVar("Result")


class Ahead:
    """One thread that prepares a few batches in advance, in order.

    The thread must not run the notebook's code. All threads share the random generators of torch,
    NumPy and Python, so numbers drawn by that code would change those of the model.
    """

    def __init__(self) -> None:
        # Its thread starts with the first batch, and outlives generations.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="etrain-batches")

    def map(self, prepare: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """Yield ``prepare(item)`` of each item, in order.

        ``items`` is consumed by the caller's thread. Each call of ``next`` submits one item more
        than it returns, until ``NUM_AHEAD`` are waiting::

            caller   next ─ submit 1 2 3, wait for 1 ── train on 1 ── next ─ submit 4, wait for 2
            thread            prepare 1 ─ 2 ─ 3 ─────────────────────────────── 4
        """
        waiting: deque[Future[Result]] = deque()
        try:
            for item in items:
                waiting.append(self._thread.submit(prepare, item))
                if len(waiting) > NUM_AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            # The next generation starts with other samples.
            for future in waiting:
                future.cancel()

    def close(self) -> None:
        """Stop the thread, after the batch in progress."""
        self._thread.shutdown(wait=True, cancel_futures=True)


def uses_pinned_memory(device: torch.device) -> bool:
    """Return True if copies to a device overlap with its computation only from pinned memory."""
    return device.type == "cuda"


def pin(batch: Any) -> Any:
    """Return a nested batch whose dense tensors are in pinned host memory."""
    return _map_tensors(batch, _pinned)


def to_device(batch: Any, device: torch.device) -> Any:
    """Move every tensor of a nested batch to a device, without waiting for the copies."""
    return _map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    is_dense = tensor.layout == torch.strided and tensor.device.type == "cpu"
    return tensor.pin_memory() if is_dense else tensor


def _map_tensors(batch: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: _map_tensors(value, function) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        mapped = [_map_tensors(value, function) for value in batch]
        is_named = hasattr(batch, "_fields")  # its constructor takes the elements as arguments
        return type(batch)(*mapped) if is_named else type(batch)(mapped)
    return batch
