"""Buffers that a forward pass changes, such as BatchNorm's statistics: all ranks keep the same.

The moves relative to the value before the step are averaged over samples, not the values: a buffer
that did not move stays as it is to the last bit. Shape: ``B`` numbers in all such buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Self

import torch


class RunningBuffers:
    """The buffers of a model that training moves."""

    def __init__(self, buffers: Iterable[torch.Tensor] = ()) -> None:
        self._buffers = list(buffers)
        self.num_values = sum(b.numel() for b in self._buffers)
        """``B``; 0 if no buffer moves."""

    def copy(self) -> list[torch.Tensor]:
        """Return copies of their values."""
        return [b.clone() for b in self._buffers]

    def moved_since(self, before: Sequence[torch.Tensor]) -> Self:
        """Return those whose values differ from ``before``."""
        pairs = zip(self._buffers, before, strict=True)
        return type(self)(now for now, old in pairs if not torch.equal(now, old))

    @torch.no_grad()
    def put_back(self, before: Sequence[torch.Tensor]) -> None:
        """Give them the values that ``copy`` returned."""
        for now, old in zip(self._buffers, before, strict=True):
            now.copy_(old)

    def moves_from(self, before: Sequence[torch.Tensor], weight: float) -> torch.Tensor:
        """Return how they moved since ``before``, times ``weight``: float64, CPU, ``(B,)``."""
        moves = [
            ((now.double() - old.double()) * weight).reshape(-1).cpu()
            for now, old in zip(self._buffers, before, strict=True)
        ]
        return torch.cat(moves)

    @torch.no_grad()
    def move(self, before: Sequence[torch.Tensor], moves_B: torch.Tensor) -> None:
        """Give them the values ``before``, moved by the average of all ``moves_from``."""
        sizes = [b.numel() for b in before]
        moves = torch.split(moves_B, sizes)
        for now, old, move in zip(self._buffers, before, moves, strict=True):
            value = old.double() + move.view_as(old).to(old.device)
            now.copy_(value if now.is_floating_point() else value.round())
