"""Compress gradients that the ranks exchange, for ``compression``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

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


def compressed(group: RankGroup, compression: str) -> Send:
    """Return a function that sums a bucket of gradients over the ranks.

    Args:
        group: The process group of the generation.
        compression: ``bf16`` or ``fp16``, which send and sum in that format; or
            ``powersgd``, which sends two low-rank factors of each matrix and adds the residual to
            the next step's gradient. A new generation starts without a residual, so that an undone
            step has no effect on it.
    """
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
    """The part of a process group that torch's hooks use, built on the generation's collectives.

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
        """Return at once, because the sum is already complete."""
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a completed future."""
        return self._future
