"""Buckets: gradients of several parameters as views into one flat tensor that is sent as is.

Shapes: ``S`` partial sums kept at a time, ``N`` elements in the bucket.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from etrain_jupyter.rules.samples.shard_plan import Merge
from etrain_jupyter.trainer.gradients.tree_sum import merge

BUCKET_BYTES = 4 << 20
"""Target size of a bucket; a single parameter may be larger."""
ALIGN_BYTES = 64
"""Alignment of each gradient within its bucket, the same as torch's for tensors."""


class GradientBucket:
    """Partial sums of gradients, for parameters of one dtype; each sum is a row of a tensor.

    Each row ends with a flag per parameter, which is summed with the gradients. The flag is above 0
    if any shard touched the parameter. Otherwise ``p.grad`` must stay None, because an optimizer
    skips such parameters.

    No element is ever -0.0, because sums start at 0.0, and a sum is -0.0 only if all its terms are.
    So a shard without samples leaves every bit of a sum unchanged, whether or not its zeros are
    added.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], num_sums: int) -> None:
        self.parameters = list(parameters)
        first = self.parameters[0]
        align = ALIGN_BYTES // first.element_size()
        # | gradient 0, padded | gradient 1, padded | ... | one flag per parameter |
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
        """Set a sum to zero."""
        self.sums_SN[slot].zero_()

    def begin(self, slot: int, *, is_fresh: bool) -> None:
        """Make backward passes add to a sum, or start a new sum."""
        # A new sum is copied from the gradients that autograd leaves in ``p.grad`` (``take``). This
        # needs one pass over the memory; clearing the sum and adding to it would need two.
        for parameter, view in zip(self.parameters, self._views[slot], strict=True):
            parameter.grad = None if is_fresh else view

    def take(self, slot: int, index: int) -> None:
        """Copy a parameter's gradient into the sum after a backward pass has computed it."""
        parameter, view = self.parameters[index], self._views[slot][index]
        gradient = parameter.grad
        # Otherwise, autograd has already added to the view.
        if gradient is not None and gradient.data_ptr() != view.data_ptr():
            torch.add(gradient, 0.0, out=view)  # not a copy: turns -0.0 into 0.0
            parameter.grad = view

    def fill(self, slot: int) -> None:
        """Set a sum to zero for the parameters that got no gradient."""
        for parameter, view in zip(self.parameters, self._views[slot], strict=True):
            if parameter.grad is None:
                parameter.grad = view.zero_()

    def merge(self, merges: Sequence[Merge]) -> None:
        """Add up partial sums in the order of ``merges``."""
        merge(list(self.sums_SN), merges)

    def set_flags(self, touched: Collection[torch.Tensor]) -> None:
        """In the first sum, set the flags of the parameters that this rank's shards touched."""
        flags = [float(p in touched) for p in self.parameters]
        self.sums_SN[0, self._num_gradients :] = torch.tensor(flags)

    def publish(self) -> None:
        """Use the first sum as the gradient of the parameters."""
        flags = self.sums_SN[0, self._num_gradients :].tolist()
        for parameter, view, flag in zip(self.parameters, self._views[0], flags, strict=True):
            # The flag is a sum over all shards of all ranks.
            parameter.grad = view if flag else None


def make_buckets(parameters: Sequence[torch.nn.Parameter], num_sums: int) -> list[GradientBucket]:
    """Group parameters into buckets in reverse order, as a backward pass completes them."""
    filling: dict[torch.dtype, list[torch.nn.Parameter]] = {}
    sizes: dict[torch.dtype, int] = {}
    buckets = []
    for parameter in reversed(parameters):
        dtype = parameter.dtype
        filling.setdefault(dtype, []).append(parameter)
        sizes[dtype] = sizes.get(dtype, 0) + parameter.numel() * parameter.element_size()
        # Close the bucket: its exchange can start while the remaining gradients are computed.
        if sizes[dtype] >= BUCKET_BYTES:
            buckets.append(GradientBucket(filling.pop(dtype), num_sums))
            sizes[dtype] = 0
    return buckets + [GradientBucket(rest, num_sums) for rest in filling.values()]
