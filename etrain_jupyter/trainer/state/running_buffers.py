"""Running buffers: buffers that a forward pass changes, such as BatchNorm's statistics.

All ranks keep the same values. The changes within a step, not the values themselves, are averaged
over its samples, so that an unchanged buffer keeps every bit. Shape: ``B`` elements in all running
buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Self

import torch
from torch import nn


class RunningBuffers:
    """The running buffers of a model.

    Args:
        buffers: The tensors.
        owners: Module and name of each buffer. A forward pass may also assign a new tensor to the
            buffer (``self.hidden = hidden.detach()``). None for buffers that are only changed in
            place.
    """

    def __init__(
        self,
        buffers: Iterable[torch.Tensor] = (),
        owners: Sequence[tuple[nn.Module, str] | None] | None = None,
    ) -> None:
        self._buffers = list(buffers)
        self._owners = list(owners) if owners is not None else [None] * len(self._buffers)
        self.num_values = sum(b.numel() for b in self._buffers)
        """``B``; 0 if there are no running buffers."""

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """Return all buffers of a model."""
        found: dict[int, tuple[torch.Tensor, tuple[nn.Module, str] | None]] = {}
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                # Modules replace other buffers with caches that each rank computes for itself.
                is_state = name not in module._non_persistent_buffers_set
                found.setdefault(id(buffer), (buffer, (module, name) if is_state else None))
        return cls([one for one, _ in found.values()], [owner for _, owner in found.values()])

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Iterate over the buffers themselves."""
        for buffer, owner in zip(self._buffers, self._owners, strict=True):
            now = owner[0]._buffers.get(owner[1]) if owner is not None else buffer
            is_same = now is not None and now.shape == buffer.shape and now.dtype == buffer.dtype
            yield now if now is not None and is_same else buffer

    def copy(self) -> list[torch.Tensor]:
        """Return copies of the values."""
        self._take_over()
        return [b.clone() for b in self._buffers]

    @torch.no_grad()
    def _take_over(self) -> None:
        """Copy the values of assigned tensors into the original tensors, and put these back.

        The average of the weights refers to the original tensors. Call this between passes.
        """
        for buffer, owner, now in zip(self._buffers, self._owners, list(self), strict=True):
            if now is not buffer and owner is not None:
                buffer.copy_(now)
                owner[0]._buffers[owner[1]] = buffer

    def moved_since(self, before: Sequence[torch.Tensor]) -> Self:
        """Return the buffers whose values differ from ``before``."""
        slots = zip(self._buffers, self._owners, self, before, strict=True)
        moved = [(home, owner) for home, owner, now, old in slots if not torch.equal(now, old)]
        return type(self)([home for home, _ in moved], [owner for _, owner in moved])

    @torch.no_grad()
    def put_back(self, before: Sequence[torch.Tensor]) -> None:
        """Restore the values that ``copy`` returned."""
        self._take_over()
        for now, old in zip(self._buffers, before, strict=True):
            now.copy_(old)

    def moves_from(self, before: Sequence[torch.Tensor], weight: float) -> torch.Tensor:
        """Return ``weight`` times the changes since ``before``: float64, shape ``(B,)``.

        The result stays on the buffers' device, so that this call does not wait for the device.
        """
        # Always in float64, so that integer buffers (num_batches_tracked) can be averaged.
        moves = [
            ((now.double() - old.double()) * weight).reshape(-1)
            for now, old in zip(self, before, strict=True)
        ]
        # One tensor for all buffers, because each copy from a device may wait for it.
        return torch.cat(moves)

    @torch.no_grad()
    def move(self, before: Sequence[torch.Tensor], moves_B: torch.Tensor) -> None:
        """Set the values to ``before`` plus the averaged changes ``moves_B``, shape ``(B,)``."""
        self._take_over()
        sizes = [b.numel() for b in before]
        moves = torch.split(moves_B.to(before[0].device), sizes)
        for now, old, move in zip(self._buffers, before, moves, strict=True):
            value = old.double() + move.view_as(old)
            # A counter changes by the mean of the ranks' increments, which need not be an integer.
            now.copy_(value if now.is_floating_point() else value.round())
