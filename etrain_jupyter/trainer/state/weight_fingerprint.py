"""Weight fingerprint for comparing ranks, cheap enough to compute in every step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from etrain_jupyter.trainer.feature import Step, StepFeature
from etrain_jupyter.trainer.group.process_group import RankGroup
from etrain_jupyter.trainer.references import WorkloadError, listed

MAX_SLICES = 64
"""Maximum number of slices. Each step covers one slice, so this many steps cover all weights."""
MIN_SLICE, MAX_PIECES = 1 << 14, 4
"""Minimum size of a slice, and typical number of tensors in it; smaller slices would not be
cheaper."""
MODULUS = (1 << 20) - 3
"""Upper bound of a fingerprint: sums of squares over thousands of ranks are exact in float64. It is
a prime, because a power of two would ignore the upper bits of every number."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightsDivergedError(WorkloadError):
    """The ranks no longer hold the same weights, so they do not train one model."""


class _Piece(NamedTuple):
    parameter: int
    first: int
    length: int


class WeightFingerprint(StepFeature):
    """Sum of the bit patterns of a rotating slice of a model's parameters.

    Args:
        others: Other tensors that must be equal on all ranks, for example averaged weights.
        named: Returns all of these tensors by name, to find those that differ.
    """

    def __init__(
        self,
        model: nn.Module,
        others: Iterable[torch.Tensor] = (),
        named: Callable[[], Mapping[str, torch.Tensor]] = dict[str, torch.Tensor],
    ) -> None:
        self._named = named
        self._own = torch.zeros(())
        """Fingerprint of this rank's weights before the step in progress."""
        # All parameters form one sequence of numbers, which is cut into slices of equal length. A
        # slice may cover parts of several parameters. Step s covers slice s modulo the number of
        # slices, so a difference between ranks is detected within MAX_SLICES steps.
        self._parameters = [*model.parameters(), *others]
        sizes = [_flat(p).numel() for p in self._parameters]
        starts = list(accumulate(sizes, initial=0))
        num = max(1, min(MAX_SLICES, max(starts[-1] // MIN_SLICE, len(sizes) // MAX_PIECES)))
        bounds = [starts[-1] * k // num for k in range(num + 1)]
        self._slices = [_pieces(starts, first, stop) for first, stop in pairwise(bounds)]

    def num_fields(self, world_size: int) -> int:
        """Return 2, the fingerprint and its square; a single rank has no peer to compare with."""
        return 2 if world_size > 1 else 0

    def before_forward(self, step: Step) -> None:
        """Compute the fingerprint of the weights before the step."""
        if step.group.world_size > 1:
            found, copies = self.at(step.number - 1), step.header.copies
            self._own = found if copies is None else copies.start(found)

    def header_fields(self, step: Step, fields_F: NDArray[np.float64]) -> None:
        """Set the fingerprint and its square."""
        own = float(self._own)
        fields_F[:] = own, own * own

    def after_sum(self, step: Step) -> None:
        """Raise WeightsDivergedError on all ranks if their fingerprints differ."""
        if (size := step.group.world_size) > 1 and not ranks_agree(size, *step.fields_of(self)):
            check_ranks_agree(step.group, self._named(), step=step.number - 1, is_known=True)

    @torch.no_grad()
    def at(self, step: int) -> torch.Tensor:
        """Return the fingerprint of the slice for ``step``: a scalar integer below ``MODULUS``.

        The result stays on the parameters' device, so that this call does not wait for the device.
        """
        total: torch.Tensor | None = None
        for parameter, first, length in self._slices[step % len(self._slices)]:
            piece = _flat(self._parameters[parameter]).narrow(0, first, length)
            bits = _sum_of_bits(piece)
            total = bits if total is None else total + bits
        return torch.zeros((), dtype=torch.int64) if total is None else total.remainder(MODULUS)


@torch.no_grad()
def fingerprints(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the fingerprint of each tensor as a whole."""
    return [int(_sum_of_bits(_flat(tensor)).remainder(MODULUS)) for tensor in tensors]


def check_ranks_agree(
    group: RankGroup, named: Mapping[str, torch.Tensor], *, step: int, is_known: bool = False
) -> None:
    """Compare all tensors of the ranks; every rank must call this at the same step.

    Args:
        group: The ranks.
        named: The tensors by name; the same names on all ranks.
        step: The step after which they are compared.
        is_known: True if it is known that the ranks differ.

    Raises:
        WeightsDivergedError: On every rank, if the ranks differ; the error names the tensors.
        CommunicationError: A peer is lost.
    """
    prints = torch.tensor(fingerprints(named.values()), dtype=torch.float64)
    sums = torch.stack([prints, prints.square()])
    group.all_reduce(sums).wait()
    size = group.world_size
    pairs = zip(named, *sums.tolist(), strict=True)
    found = [name for name, total, squares in pairs if not ranks_agree(size, total, squares)]
    if not found and not is_known:
        return
    which = f" in {len(found)} of {len(named)} tensors ({listed(found)})" if found else ""
    raise WeightsDivergedError(
        f"the weights of the {size} workers differ{which} after step {step}, so the workers no "
        "longer train the same model. The job ends without saving these weights. Usual causes: "
        "step, forward, an optimizer or a hook changes weights or buffers by values that differ "
        "between workers, such as random numbers, the time or gradients of its own; or a machine "
        "is faulty. Let only the optimizer change weights, from the gradients alone."
    )


def ranks_agree(world_size: int, total: float, sum_of_squares: float) -> bool:
    """Return True if all ranks have the same fingerprint.

    By the Cauchy-Schwarz inequality, W times the sum of squares is at least the squared sum, with
    equality only if all W terms are equal.
    """
    # The comparison is exact, because both sums are integers below 2**53, and Python's integers do
    # not overflow.
    return world_size * int(sum_of_squares) == int(total) ** 2


def _sum_of_bits(piece: torch.Tensor) -> torch.Tensor:
    # Bit patterns as integers: their sum is exact in any order, and wraps around identically on all
    # ranks. A sum of floats would depend on the kernel.
    return piece.view(_BITS[piece.element_size()]).sum(dtype=torch.int64)


def _pieces(starts: list[int], first: int, stop: int) -> list[_Piece]:
    found = []
    for index, (begin, end) in enumerate(pairwise(starts)):
        low, high = max(first, begin), min(stop, end)
        if low < high:
            found.append(_Piece(index, low - begin, high - low))
    return found


def _flat(parameter: torch.Tensor) -> torch.Tensor:
    # Memory order, which is the same on all ranks.
    value = parameter.detach()
    if value.is_complex():
        value = torch.view_as_real(value)
    if not value.is_contiguous():
        # Avoids a copy for dense tensors, such as those in channels_last format.
        order = sorted(range(value.ndim), key=value.stride, reverse=True)
        value = value.permute(order)
    return value.reshape(-1)
