"""Running buffers: buffers that a forward pass changes, such as BatchNorm's statistics.

All ranks keep the same values. The changes within a step, not the values themselves, are averaged
over its samples, so that an unchanged buffer keeps every bit. Shape: ``B`` elements in all running
buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Self

import torch


class RunningBuffers:
    """The running buffers of a model."""

    def __init__(self, buffers: Iterable[torch.Tensor] = ()) -> None:
        self._buffers = list(buffers)
        self.num_values = sum(b.numel() for b in self._buffers)
        """``B``; 0 if there are no running buffers."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Iterate over the buffers themselves."""
        return iter(self._buffers)

    def copy(self) -> list[torch.Tensor]:
        """Return copies of the values."""
        return [b.clone() for b in self._buffers]

    def moved_since(self, before: Sequence[torch.Tensor]) -> Self:
        """Return the buffers whose values differ from ``before``."""
        pairs = zip(self._buffers, before, strict=True)
        return type(self)(now for now, old in pairs if not torch.equal(now, old))

    @torch.no_grad()
    def put_back(self, before: Sequence[torch.Tensor]) -> None:
        """Restore the values that ``copy`` returned."""
        for now, old in zip(self._buffers, before, strict=True):
            now.copy_(old)

    def moves_from(self, before: Sequence[torch.Tensor], weight: float) -> torch.Tensor:
        """Return ``weight`` times the changes since ``before``: float64, shape ``(B,)``.

        The result stays on the buffers' device, so that this call does not wait for the device.
        """
        # Always in float64, so that integer buffers (num_batches_tracked) can be averaged.
        moves = [
            ((now.double() - old.double()) * weight).reshape(-1)
            for now, old in zip(self._buffers, before, strict=True)
        ]
        # One tensor for all buffers, because each copy from a device may wait for it.
        return torch.cat(moves)

    @torch.no_grad()
    def move(self, before: Sequence[torch.Tensor], moves_B: torch.Tensor) -> None:
        """Set the values to ``before`` plus the averaged changes ``moves_B``, shape ``(B,)``."""
        sizes = [b.numel() for b in before]
        moves = torch.split(moves_B.to(before[0].device), sizes)
        for now, old, move in zip(self._buffers, before, moves, strict=True):
            value = old.double() + move.view_as(old)
            # A counter changes by the mean of the ranks' increments, which need not be an integer.
            now.copy_(value if now.is_floating_point() else value.round())
