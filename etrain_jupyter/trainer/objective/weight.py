"""Weight of a batch in the mean, for ``weight``; for example, its number of tokens.

A pass of weight ``w`` on any rank contributes ``w / num_samples`` times its mean loss. The sum of
all ``w / num_samples`` is exchanged together with the loss, and the summed losses and gradients are
divided by this sum. The result is ``sum(w * loss) / sum(w)`` over all passes of all ranks, and does
not depend on how the step was split.

Weights are measured in a unit: a power of two, chosen so that samples of the previous step had a
mean weight of about 1. So gradients before the division are about as large as without ``weight``,
which fp16 requires. The unit cancels out exactly if it is the same on all ranks. Therefore, it is
derived from sums over the ranks, and is part of the state that is saved and sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from etrain_jupyter.trainer.feature import Step, StepFeature
from etrain_jupyter.trainer.references import WorkloadError


class Weight(StepFeature):
    """The notebook's ``weight``, with exact zero gradients for batches of weight 0.

    The mean loss of a batch of weight 0 is NaN (0 / 0), and so are its gradients; zero times NaN is
    not zero. So a hook on each parameter replaces its gradient with zeros in the backward pass of
    such a batch. The pass still runs, because the other ranks wait for the sums that it starts.
    """

    def __init__(self, function: Callable[[Any], Any], model: nn.Module) -> None:
        self._function = function
        self._has_no_weight = False
        self.exponent = 0
        """The unit, as an exponent of two; part of the job's state."""
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(self._zero_if_no_weight)  # type: ignore[no-untyped-call]

    def of(self, batch: Any, count: int) -> float:
        """Return the weight of a batch, in the unit; the next backward pass must be for this batch.

        Args:
            batch: The batch in host memory, so that computing the weight does not wait for a GPU.
            count: Number of samples in it, for the message.

        Raises:
            WorkloadError: If the weight is not a number, is infinite, or is negative.
        """
        returned = self._function(batch)
        is_number = isinstance(returned, int | float) or getattr(returned, "shape", None) == ()
        value = float(returned) if is_number else math.nan
        if not 0 <= value < math.inf:
            raise WorkloadError(
                f"weight returned {returned!r}, a {type(returned).__name__}, for a batch of "
                f"{count} samples. Return one number of 0 or more for the whole batch, for example "
                "the number of its tokens that count."
            )
        # Read by the hooks in the backward pass of this batch. Forward and backward passes
        # alternate, so one flag is enough.
        self._has_no_weight = value == 0
        return math.ldexp(value, -self.exponent)

    def before_update(self, step: Step) -> None:
        """Divide summed gradients by the mean weight, in place."""
        gradients = [p.grad for p in step.model.parameters() if p.grad is not None]
        if gradients and step.means.weight:
            torch._foreach_div_(gradients, step.means.weight)

    def after_commit(self, step: Step) -> None:
        """Choose the unit of the next step."""
        # Mean weight of a sample in this step, in the unit of this step.
        mean = step.means.weight
        # ``mean`` comes from a sum over all ranks, so all of them choose the same unit. A step in
        # which every weight was 0 gives no information about the next one.
        if mean:
            self.exponent += math.frexp(mean)[1]

    def _zero_if_no_weight(self, gradient: torch.Tensor) -> torch.Tensor | None:
        return torch.zeros_like(gradient) if self._has_no_weight else None
