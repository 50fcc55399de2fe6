"""``weight``: what one batch counts for in the average, for example its tokens.

A pass contributes ``w / num_samples`` times its mean loss, whichever rank makes it. The sum of all
``w / num_samples`` travels beside the loss and is what losses and gradients are divided by at the
end: ``sum(w * loss) / sum(w)`` over all passes of all ranks, however the batch was cut.

Weights are counted in a power of two by which a sample of the step before counted for about one:
gradients before that division are then about as large as without ``weight``, which fp16 needs. The
unit cancels out to the last bit, if all ranks have the same: so it follows from sums over the
ranks, and goes where the weights of the model go.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from etrain_jupyter.trainer.references import WorkloadError


class Weight:
    """The notebook's ``weight``, and what keeps batches that count for nothing out of gradients.

    The mean over nothing is NaN, and so are its gradients: zero times NaN would not be zero. So
    each parameter's gradient goes through a hook that lets exact zeros pass in its place, in the
    backward pass of such a batch. That pass is made all the same, because the other ranks wait for
    the sums that it starts.

    Args:
        function: The notebook's.
        model: Whose gradients it watches.
    """

    def __init__(self, function: Callable[[Any], Any], model: nn.Module) -> None:
        self._function = function
        self._is_nothing = False
        self.exponent = 0
        """Of the unit, as a power of two: a part of the job's state."""
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(self._pass_on)  # type: ignore[no-untyped-call]

    def of(self, batch: Any, count: int) -> float:
        """Return what a batch counts for, in our unit; the next backward pass must be its own.

        Args:
            batch: As it was made, not yet on the device: nobody has to wait for a GPU.
            count: How many samples it has, for the message.

        Raises:
            WorkloadError: If it is no number, infinite, or below 0.
        """
        returned = self._function(batch)
        is_number = isinstance(returned, int | float) or getattr(returned, "shape", None) == ()
        value = float(returned) if is_number else math.nan
        if not 0 <= value < math.inf:
            raise WorkloadError(
                f"weight returned {returned!r}, a {type(returned).__name__}, for a batch of "
                f"{count} samples. Return one number of 0 or more for the whole batch, for example "
                "how many of its tokens count."
            )
        self._is_nothing = value == 0
        return math.ldexp(value, -self.exponent)

    def follow(self, mean: float) -> None:
        """Choose the unit of the next step.

        Args:
            mean: What a sample of this step counted for on average, in this step's unit.
        """
        if mean:
            self.exponent += math.frexp(mean)[1]

    def _pass_on(self, gradient: torch.Tensor) -> torch.Tensor | None:
        return torch.zeros_like(gradient) if self._is_nothing else None


def divide_gradients(model: nn.Module, weight: float) -> None:
    """Make averages of summed gradients.

    Args:
        model: Whose gradients are changed in place.
        weight: What a sample counts for on average, above 0.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if gradients:
        torch._foreach_div_(gradients, weight)
