"""A print of the weights that is cheap enough for every step: do all ranks hold the same?"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import nn

MAX_SLICES = 64
"""A step looks at one slice of the weights, so that at most this many steps look at all of them."""
MIN_SLICE, MAX_PIECES = 1 << 14, 4
"""Smaller slices, or slices of fewer tensors, would not be noticeably cheaper."""
MODULUS = 1 << 20
"""Prints are below it, so that sums of their squares over thousands of ranks are exact."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Piece(NamedTuple):
    parameter: int
    first: int
    length: int


class WeightFingerprint:
    """Sums up the bit patterns of a rotating slice of a model's parameters."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())
        sizes = [_flat(p).numel() for p in self._parameters]
        starts = list(accumulate(sizes, initial=0))
        num = max(1, min(MAX_SLICES, max(starts[-1] // MIN_SLICE, len(sizes) // MAX_PIECES)))
        bounds = [starts[-1] * k // num for k in range(num + 1)]
        self._slices = [_pieces(starts, first, stop) for first, stop in pairwise(bounds)]

    @torch.no_grad()
    def at(self, step: int) -> torch.Tensor:
        """Return the print of the slice that ``step`` looks at: a whole number below ``MODULUS``.

        It stays on the parameters' device, so that nobody waits for it yet.
        """
        total: torch.Tensor | None = None
        for parameter, first, length in self._slices[step % len(self._slices)]:
            piece = _flat(self._parameters[parameter]).narrow(0, first, length)
            bits = piece.view(_BITS[piece.element_size()]).sum(dtype=torch.int64)
            total = bits if total is None else total + bits
        return torch.zeros((), dtype=torch.int64) if total is None else total.remainder(MODULUS)


def ranks_agree(world_size: int, sum_of_prints: float, sum_of_squares: float) -> bool:
    """Whether all ranks had the same print: only then is the mean square the squared mean."""
    return world_size * int(sum_of_squares) == int(sum_of_prints) ** 2


def _pieces(starts: list[int], first: int, stop: int) -> list[_Piece]:
    found = []
    for index, (begin, end) in enumerate(pairwise(starts)):
        low, high = max(first, begin), min(stop, end)
        if low < high:
            found.append(_Piece(index, low - begin, high - low))
    return found


def _flat(parameter: torch.Tensor) -> torch.Tensor:
    """Return all numbers in a row; in any order, as long as it is the same on all ranks."""
    value = parameter.detach()
    if value.is_complex():
        value = torch.view_as_real(value)
    if not value.is_contiguous():
        # No copy where they lie densely in memory, as in the format channels_last.
        order = sorted(range(value.ndim), key=value.stride, reverse=True)
        value = value.permute(order)
    return value.reshape(-1)
