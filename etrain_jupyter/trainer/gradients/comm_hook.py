"""Communication hook that DistributedDataParallel calls with each bucket that is ready."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from etrain_jupyter.trainer.gradients.compression import compressed
from etrain_jupyter.trainer.gradients.stopwatch import Stopwatch
from etrain_jupyter.trainer.group.process_group import RankGroup

Send = Callable[[Any], "torch.futures.Future[torch.Tensor]"]
"""Starts summing a bucket over the ranks."""


class CommHook:
    """Measure and send buckets of gradients.

    Args:
        compression: ``none``, ``bf16``, ``fp16`` or ``powersgd``.
        watch: Records when a bucket is ready; after the last bucket the backward pass is complete.
        measures_squares: Measure the squared norm of this rank's own gradient.
    """

    def __init__(
        self, group: RankGroup, *, compression: str, watch: Stopwatch, measures_squares: bool
    ) -> None:
        self._send: Send = compressed(group, compression)
        self._watch = watch
        self._measures_squares = measures_squares
        self._squares: list[torch.Tensor] = []

    def __call__(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Start summing a bucket over the ranks."""
        if self._measures_squares:
            # Measure this before the sum overwrites this rank's gradient in place.
            self._squares.append(_square(bucket.buffer()))
        self._watch.bucket_is_ready()
        return self._send(bucket)

    def take_square_norm(self) -> float:
        """Return the squared norm over the buckets since the last call."""
        squares, self._squares = self._squares, []
        return _sum(squares)


def square_norm(tensors: Iterable[torch.Tensor]) -> float:
    """Return the squared norm of tensors, taken as one vector."""
    return _sum([_square(tensor) for tensor in tensors])


def _square(tensor: torch.Tensor) -> torch.Tensor:
    values = tensor.detach()
    # In fp16, the square of 256 overflows, so the norm is computed in float32.
    norm: torch.Tensor = torch.linalg.vector_norm(values.float())
    return norm.double().square()


def _sum(squares: list[torch.Tensor]) -> float:
    return float(torch.stack(squares).sum()) if squares else 0.0
