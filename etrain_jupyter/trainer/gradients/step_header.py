"""What all ranks tell each other with every step: one small sum, hidden behind the backward pass.

Shapes: ``M`` the loss and what else is averaged (``objective.measures``), ``S`` slots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from etrain_jupyter.rules.samples import ledger
from etrain_jupyter.rules.samples.shard_plan import Merge
from etrain_jupyter.trainer.gradients.tree_sum import merge
from etrain_jupyter.trainer.group.process_group import Pending, RankGroup
from etrain_jupyter.trainer.state.weight_fingerprint import ranks_agree

PENDING, ASKED, CHECKSUM, COUNT, PRINT, PRINT_SQUARED, NUM_COUNTS = range(7)

EVAL, SAVE = 1, 2
"""What rank 0 alone may ask of all, as bits of one number."""


class StepHeader:
    """The vector that is summed over the ranks: whole numbers, and shares of means in slots.

    Sums of whole numbers are exact, so that their order does not matter. Shares of means are not:
    either all ranks add to one slot, or each shard has a slot of its own, which the others leave at
    zero. Adding zeros is exact, and the slots are added afterwards in an order of their own.

    Args:
        num_means: ``M``.
        num_slots: ``S``.
        merges: How the slots are added up.
    """

    def __init__(self, *, num_means: int, num_slots: int = 1, merges: Sequence[Merge] = ()) -> None:
        self._values = torch.zeros(NUM_COUNTS + num_slots * num_means, dtype=torch.float64)
        self._means_SM = self._values[NUM_COUNTS:].view(num_slots, num_means)
        self._merges = merges
        self._world_size = 1
        self._sent: Pending | None = None
        self.is_own_loss_finite = True
        """Whether this rank's share of the loss is a finite number; known once it is sent."""

    def spoil_loss(self) -> None:
        """Let this rank's share of the loss be NaN, as a fault on purpose."""
        self._means_SM[0, 0] = math.nan

    def add(
        self,
        slot: int,
        indices: NDArray[np.int64],
        loss: torch.Tensor,
        others: Sequence[torch.Tensor],
    ) -> None:
        """Add what one forward pass gave.

        Args:
            slot: Where its shares of the means go.
            indices: What was delivered, not what was planned: the audit compares the two.
            loss: Its share of the mean loss.
            others: Its shares of the other means.
        """
        self._values[CHECKSUM] += float(ledger.checksum_of(indices))
        self._values[COUNT] += float(len(indices))
        self._means_SM[slot] += stack_means(loss, others)

    def start(
        self,
        group: RankGroup,
        *,
        is_pending: bool,
        is_eval_asked: bool,
        is_save_asked: bool = False,
        weights_print: torch.Tensor,
    ) -> None:
        """Start to sum it over the ranks, with what this one asks all others to do."""
        mine = float(weights_print)
        self._values[PENDING] = float(is_pending)
        self._values[ASKED] = float(EVAL * is_eval_asked + SAVE * is_save_asked)
        self._values[PRINT], self._values[PRINT_SQUARED] = mine, mine * mine
        self._world_size = group.world_size
        self.is_own_loss_finite = bool(self._means_SM[:, 0].isfinite().all())
        self._sent = group.all_reduce(self._values)

    def wait(self) -> None:
        """Wait for all ranks'. Raises CommunicationError if one is lost."""
        assert self._sent is not None
        self._sent.wait()
        merge(list(self._means_SM), self._merges)

    @property
    def is_pending(self) -> bool:
        """Whether some rank knows of a change that is due after this step."""
        return bool(self._values[PENDING] > 0)

    @property
    def is_eval_asked(self) -> bool:
        """Whether rank 0's clock asks for an evaluation."""
        return bool(int(self._values[ASKED]) & EVAL)

    @property
    def is_save_asked(self) -> bool:
        """Whether rank 0 asks all to take part in a checkpoint of what this step leads to."""
        return bool(int(self._values[ASKED]) & SAVE)

    @property
    def checksum(self) -> int:
        """Of all samples that were trained."""
        return int(self._values[CHECKSUM])

    @property
    def num_samples(self) -> int:
        """How many samples were trained."""
        return int(self._values[COUNT])

    @property
    def ranks_agree(self) -> bool:
        """Whether all ranks began the step with the same weights, as far as it looked at them."""
        return ranks_agree(
            self._world_size, float(self._values[PRINT]), float(self._values[PRINT_SQUARED])
        )

    def means(self) -> list[float]:
        """Return the sums of all shares, of the loss first, shape ``(M,)``."""
        means: list[float] = self._means_SM[0].tolist()
        return means


def stack_means(loss: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one pass's shares of all means in float64 on the CPU, shape ``(M,)``."""
    shares = [value.detach().to(loss.device, torch.float64) for value in (loss, *others)]
    return torch.stack(shares).cpu()
