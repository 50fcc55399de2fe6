"""Gradients of some parameters as views into flat tensors, which are summed and sent as they are.

Shapes: ``S`` sums that are kept at a time, ``N`` numbers of the bucket.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from etrain_jupyter.rules.samples.shard_plan import Merge
from etrain_jupyter.trainer.gradients.tree_sum import merge

BUCKET_BYTES = 4 << 20
"""A bucket is closed when it is that large; one parameter alone may be larger."""
ALIGN_BYTES = 64
"""Of each gradient within its bucket, as torch itself aligns tensors."""


class GradientBucket:
    """Sums of the gradients of some parameters of one dtype, each a row of one tensor.

    At the end of a row stands a flag for each parameter, which is summed with the rest: it is above
    0 if the parameter was touched by any shard. Otherwise ``p.grad`` must stay None, because an
    optimizer skips such parameters.

    Nothing is ever -0.0 here: a sum begins at 0.0 and cannot become it. So a shard without samples
    adds nothing to the last bit, whether its zeros are added or not.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], num_sums: int) -> None:
        self.parameters = list(parameters)
        first = self.parameters[0]
        align = ALIGN_BYTES // first.element_size()
        starts, size = [], 0
        for parameter in self.parameters:
            starts.append(size)
            size += -(-parameter.numel() // align) * align
        self._num_gradients = size
        self.sums_SN = torch.zeros(
            num_sums, size + len(self.parameters), dtype=first.dtype, device=first.device
        )
        self._views = [
            [
                row[start : start + p.numel()].view_as(p)
                for p, start in zip(self.parameters, starts, strict=True)
            ]
            for row in self.sums_SN
        ]

    def clear(self, slot: int) -> None:
        """Let a sum be zero."""
        self.sums_SN[slot].zero_()

    def begin(self, slot: int, *, is_fresh: bool) -> None:
        """Let backward passes add to a sum, or make a fresh one.

        A fresh one is made of what they leave in ``p.grad`` (``take``): that costs one pass over
        the memory, where clearing the sum and adding to it would cost two.
        """
        for parameter, view in zip(self.parameters, self._views[slot], strict=True):
            parameter.grad = None if is_fresh else view

    def take(self, slot: int, index: int) -> None:
        """Take over the gradient that a backward pass has left in a parameter."""
        parameter, view = self.parameters[index], self._views[slot][index]
        gradient = parameter.grad
        if gradient is not None and gradient.data_ptr() != view.data_ptr():
            torch.add(gradient, 0.0, out=view)  # no copy: -0.0 becomes 0.0
            parameter.grad = view

    def fill(self, slot: int) -> None:
        """Let a sum be zero where no backward pass has come."""
        for parameter, view in zip(self.parameters, self._views[slot], strict=True):
            if parameter.grad is None:
                parameter.grad = view.zero_()

    def merge(self, merges: Sequence[Merge]) -> None:
        """Add up sums."""
        merge(list(self.sums_SN), merges)

    def set_flags(self, touched: Collection[torch.Tensor]) -> None:
        """Write down, in the first sum, which parameters this rank's shards touched."""
        flags = [float(p in touched) for p in self.parameters]
        self.sums_SN[0, self._num_gradients :] = torch.tensor(flags)

    def publish(self) -> None:
        """Make the first sum the gradient."""
        flags = self.sums_SN[0, self._num_gradients :].tolist()
        for parameter, view, flag in zip(self.parameters, self._views[0], flags, strict=True):
            parameter.grad = view if flag else None


def make_buckets(parameters: Sequence[torch.nn.Parameter], num_sums: int) -> list[GradientBucket]:
    """Put parameters into buckets in the order in which backward passes come to them: reversed."""
    filling: dict[torch.dtype, list[torch.nn.Parameter]] = {}
    sizes: dict[torch.dtype, int] = {}
    buckets = []
    for parameter in reversed(parameters):
        dtype = parameter.dtype
        filling.setdefault(dtype, []).append(parameter)
        sizes[dtype] = sizes.get(dtype, 0) + parameter.numel() * parameter.element_size()
        if sizes[dtype] >= BUCKET_BYTES:
            buckets.append(GradientBucket(filling.pop(dtype), num_sums))
            sizes[dtype] = 0
    return buckets + [GradientBucket(rest, num_sums) for rest in filling.values()]
