"""Measure, compress and send each bucket of gradients that DistributedDataParallel has ready."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from etrain_jupyter.trainer.gradients.stopwatch import Stopwatch
from etrain_jupyter.trainer.group.process_group import CommunicationError, RankGroup

Send = Callable[[Any], "torch.futures.Future[torch.Tensor]"]
"""Starts summing a bucket over the ranks."""

POWERSGD_RANK = 2
"""Rank of the two factors that approximate a gradient matrix; enough for the networks of Vogels et
al., "PowerSGD", NeurIPS 2019."""

POWERSGD_AFTER_STEPS = 10
"""Number of steps with uncompressed gradients at the start of a generation."""

_HALVES = {
    "bf16": default_hooks.bf16_compress_wrapper,
    "fp16": default_hooks.fp16_compress_wrapper,
}


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


def compressed(group: RankGroup, compression: str) -> Send:
    """Return a function that sums a bucket of gradients over the ranks.

    Args:
        group: The process group of the generation.
        compression: ``none``; ``bf16`` or ``fp16``, which send and sum in that format; or
            ``powersgd``, which sends two low-rank factors of each matrix and adds the residual to
            the next step's gradient. A new generation starts without a residual, so that an undone
            step has no effect on it.
    """
    if compression == "none":
        return group.ddp_hook
    if compression == "powersgd":
        return _powersgd(group)
    # torch's wrapper casts the bucket, calls the inner hook, and casts the result back.
    hook = _HALVES[compression](lambda _, bucket: group.ddp_hook(bucket))
    return lambda bucket: hook(None, bucket)


def _powersgd(group: RankGroup) -> Send:
    state = powerSGD_hook.PowerSGDState(
        process_group=_SummingGroup(group),
        matrix_approximation_rank=POWERSGD_RANK,
        start_powerSGD_iter=POWERSGD_AFTER_STEPS,
    )

    def send(bucket: Any) -> torch.futures.Future[torch.Tensor]:
        # The hook averages over the ranks, but our gradients are shares that must be summed.
        buffer: torch.Tensor = bucket.buffer()
        buffer.mul_(group.world_size if group.contributes else 0)
        return powerSGD_hook.powerSGD_hook(state, bucket)

    return send


class _SummingGroup(dist.ProcessGroup):
    """The part of a process group that torch's hooks use, over the generation's collectives.

    torch's own process groups cannot be aborted. The hooks wait for one sum in the callback of
    another, which could block forever in a gloo thread. Here, each sum is complete when the call
    returns, and an abort ends the call.
    """

    def __init__(self, group: RankGroup) -> None:
        super().__init__(group.rank, group.world_size)  # type: ignore[call-arg]
        self._group = group

    def allreduce(  # type: ignore[override]
        self, tensors: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Sum a tensor over the ranks, in place."""
        # As in the group's own hook, ``settle`` raises the error later, outside torch's callbacks.
        with contextlib.suppress(CommunicationError):
            self._group.sum_now(tensors[0])
        return _Done(tensors)


class _Done(dist.Work):
    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        device = tensors[0].device
        self._future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(
            devices=[device] if device.type == "cuda" else None
        )
        self._future.set_result(tensors)

    def wait(self, timeout: Any = None) -> bool:
        """Return at once: the sum is already complete."""
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a completed future."""
        return self._future
