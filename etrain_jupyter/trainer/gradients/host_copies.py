"""Copies of small tensors from a GPU to the host, for which the training thread does not wait.

A ``.cpu()`` between the forward and the backward pass waits until the device has completed the
forward pass. The device is then idle until the backward pass is queued.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from etrain_jupyter.trainer.group.cuda_buckets import moment_of_device


class HostCopies:
    """Starts copies in the training thread; another thread waits for them.

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
