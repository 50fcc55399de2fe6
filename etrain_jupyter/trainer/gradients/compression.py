"""Gradients that travel in fewer bytes: torch's own communication hooks, over our collectives.

The hooks of torch know process groups, which cannot be aborted. So what they send goes through a
stand-in that hands it to the generation's group.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from etrain_jupyter.trainer.group.process_group import CommunicationError, RankGroup

POWERSGD_RANK = 2
"""Of the two factors that a gradient's matrix is sent as; enough for the networks of Vogels et al.,
"PowerSGD", NeurIPS 2019."""
POWERSGD_AFTER_STEPS = 10
"""Steps of a generation that send whole gradients first."""

Send = Callable[[Any], "torch.futures.Future[torch.Tensor]"]

_HALVES = {
    "bf16": default_hooks.bf16_compress_wrapper,
    "fp16": default_hooks.fp16_compress_wrapper,
}


def compressed(group: RankGroup, compression: str) -> Send:
    """Return what sums a bucket of gradients over the ranks of a generation.

    Args:
        group: The generation's.
        compression: ``none``; ``bf16`` or ``fp16``, which send and sum in that format;
            ``powersgd``, which sends two thin factors of each matrix and keeps what they leave out
            for the next step. What it keeps is this generation's: a new one begins without, so
            that a step that was undone leaves nothing wrong behind.
    """
    if compression == "none":
        return group.ddp_hook
    if compression == "powersgd":
        return _powersgd(group)
    hook = _HALVES[compression](lambda _, bucket: group.ddp_hook(bucket))
    return lambda bucket: hook(None, bucket)


def _powersgd(group: RankGroup) -> Send:
    state = powerSGD_hook.PowerSGDState(
        process_group=_SummingGroup(group),
        matrix_approximation_rank=POWERSGD_RANK,
        start_powerSGD_iter=POWERSGD_AFTER_STEPS,
    )

    def send(bucket: Any) -> torch.futures.Future[torch.Tensor]:
        # It averages over the ranks, and ours are shares that are to be added up.
        buffer: torch.Tensor = bucket.buffer()
        buffer.mul_(group.world_size if group.contributes else 0)
        return powerSGD_hook.powerSGD_hook(state, bucket)

    return send


class _SummingGroup(dist.ProcessGroup):
    """As much of a process group as torch's hooks need.

    They wait for one sum inside what runs when another one is complete. On a thread of gloo's that
    would block it, perhaps for ever; here each sum is complete when the call returns, and an abort
    ends it.
    """

    def __init__(self, group: RankGroup) -> None:
        super().__init__(group.rank, group.world_size)  # type: ignore[call-arg]
        self._group = group

    def allreduce(  # type: ignore[override]
        self, tensors: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Sum a tensor over the ranks, in place."""
        # As in the group's own hook: the step is undone when it settles, not within torch.
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
        """Return at once: it is done."""
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future that is complete."""
        return self._future
