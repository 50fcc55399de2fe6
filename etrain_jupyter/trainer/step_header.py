"""Step header: one small vector that is summed over all ranks in every step.

The sum overlaps with the backward pass. Shapes: ``M`` means (loss first; see
``objective.measures``), ``S`` slots, ``F`` fields of features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from etrain_jupyter.rules.samples import ledger
from etrain_jupyter.rules.samples.shard_plan import Merge
from etrain_jupyter.trainer.gradients.tree_sum import merge
from etrain_jupyter.trainer.group.cuda_buckets import HostCopies
from etrain_jupyter.trainer.group.process_group import Pending, RankGroup

PENDING, REQUESTS, CHECKSUM, COUNT, NUM_COUNTS = range(5)

EVAL, SAVE = 1, 2
"""Requests that only rank 0 makes, as bits of one number."""

Fill = Callable[[NDArray[np.float64]], None]
"""Sets the fields of features, shape ``(F,)``."""


@dataclass(frozen=True, kw_only=True)
class RequestFlags:
    """One rank's requests to all ranks."""

    is_change_pending: bool
    """The rank knows of a planned change; the generation must end after this step."""
    is_eval_due: bool
    """By rank 0's clock, an evaluation is due after this step."""
    is_save_due: bool = False
    """Rank 0 requests that all ranks write a checkpoint of the state after this step."""


class StepHeader:
    """A vector that is summed over the ranks. It holds integers and each rank's share of means.

    Integer sums below 2**53 are exact in float64, so their order does not matter. Sums of shares
    are not exact. Either all ranks add to a single slot, or each shard has its own slot, which the
    other ranks leave at zero. Adding zeros is exact, and the slots are added up afterwards in a
    fixed order.

    Args:
        num_means: ``M``.
        num_slots: ``S``.
        num_fields: ``F``.
        merges: Order in which the slots are added up.
        copies: Copies the values from a GPU, so that the training thread does not wait for the GPU.
            The exchange thread then sends the header. None if the training thread sends it.
    """

    def __init__(
        self,
        *,
        num_means: int,
        num_slots: int = 1,
        num_fields: int = 0,
        merges: Sequence[Merge] = (),
        copies: HostCopies | None = None,
    ) -> None:
        # | pending | requests | checksum | count | fields | means of slot 0 | of slot 1 | ...
        #
        # One vector, because a step should need one small collective rather than several.
        means_at = NUM_COUNTS + num_fields
        self._values = torch.zeros(means_at + num_slots * num_means, dtype=torch.float64)
        # The same memory as an array, because accessing one number takes a tenth of torch's time.
        self._numbers: NDArray[np.float64] = self._values.numpy()
        self.fields_F = self._numbers[NUM_COUNTS:means_at]
        """The fields of features; their sums after ``wait``."""
        self._means_SM = self._numbers[means_at:].reshape(num_slots, num_means)
        self._merges = merges
        self._sent: Pending | None = None
        self.copies = copies
        self._copied: list[tuple[int, torch.Tensor]] = []
        """Slots, and copies of shares that are not yet in the vector."""
        self.is_own_loss_finite = True
        """True if this rank's share of the loss is finite; valid after ``wait``."""

    def corrupt_loss(self) -> None:
        """Set this rank's share of the loss to NaN, for fault injection."""
        self._means_SM[0, 0] = math.nan

    def add(
        self,
        slot: int,
        indices: NDArray[np.int64],
        loss: torch.Tensor,
        others: Sequence[torch.Tensor],
    ) -> None:
        """Add the result of one forward pass.

        Args:
            slot: Slot for the pass's shares of the means.
            indices: The delivered samples, not the planned ones: the audit compares the two.
            loss: The pass's share of the mean loss, a scalar.
            others: The pass's shares of the other means, scalars.
        """
        self._numbers[CHECKSUM] += ledger.checksum_of(indices)
        self._numbers[COUNT] += len(indices)
        if self.copies is None:
            self._means_SM[slot] += stack_means(loss, others).numpy()
        else:
            self._copied.append((slot, self.copies.start(_stacked(loss, others))))

    def start(self, group: RankGroup, requests: RequestFlags, fill: Fill) -> None:
        """Start summing the vector over the ranks."""
        # Only rank 0 sets bits, so the sum over the ranks is rank 0's number.
        self._numbers[REQUESTS] = EVAL * requests.is_eval_due + SAVE * requests.is_save_due
        self._numbers[PENDING] = requests.is_change_pending
        if self.copies is None:
            self._complete(fill)
            self._sent = group.all_reduce(self._values)
            return
        wait = self.copies.moment()

        def prepare() -> None:
            wait()
            self._complete(fill)

        self._sent = group.all_reduce_after(prepare, self._values)

    def _complete(self, fill: Fill) -> None:
        # Add the values that come from the device; see ``copies``.
        for slot, shares_M in self._copied:
            self._means_SM[slot] += shares_M.numpy()
        fill(self.fields_F)
        # Check this before the sum, because afterwards the slots contain the shares of all ranks.
        self.is_own_loss_finite = bool(np.isfinite(self._means_SM[:, 0]).all())

    def wait(self) -> None:
        """Wait for the sum. Raises CommunicationError if a rank is lost."""
        assert self._sent is not None
        self._sent.wait()
        if self._merges:
            merge(list(torch.from_numpy(self._means_SM)), self._merges)

    @property
    def is_pending(self) -> bool:
        """True if any rank knows of a planned change; the generation then ends after this step."""
        return bool(self._numbers[PENDING] > 0)

    @property
    def is_eval_requested(self) -> bool:
        """True if an evaluation is due by rank 0's clock."""
        return bool(int(self._numbers[REQUESTS]) & EVAL)

    @property
    def is_save_requested(self) -> bool:
        """True if rank 0 requests that all ranks write a checkpoint of the state after the step."""
        return bool(int(self._numbers[REQUESTS]) & SAVE)

    @property
    def checksum(self) -> int:
        """Checksum of all samples trained on."""
        return int(self._numbers[CHECKSUM])

    @property
    def num_samples(self) -> int:
        """Number of samples trained on."""
        return int(self._numbers[COUNT])

    def means(self) -> list[float]:
        """Return the means over the step's samples, loss first, shape ``(M,)``."""
        means: list[float] = self._means_SM[0].tolist()
        return means


def stack_means(loss: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the shares of all means from one pass, in float64 on the CPU, shape ``(M,)``."""
    if loss.device.type == "cpu":
        return torch.tensor([v.item() for v in (loss, *others)], dtype=torch.float64)
    return _stacked(loss, others).cpu()


def _stacked(loss: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
    shares = [value.detach().to(loss.device, torch.float64) for value in (loss, *others)]
    return torch.stack(shares)
