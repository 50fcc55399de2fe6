"""A step whose mean loss is no finite number is not made: its update would spoil the weights.

All ranks know of it alike, from the loss that they have summed, before anybody updates. Gradients
that overflow in fp16 are something else: there the loss itself is finite.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from etrain_jupyter.trainer.gradients.step import Step


class NonFiniteLoss(NamedTuple):
    """What one rank tells of it."""

    loss: float
    """The mean over the ranks."""
    is_source: bool
    """Whether this rank's own share was not finite."""


class NonFiniteLossError(ArithmeticError):
    """Ends the step in flight, which is undone."""

    def __init__(self, told: NonFiniteLoss) -> None:
        super().__init__(f"the mean loss is {told.loss}")
        self.told = told


def check_loss(step: Step) -> None:
    """Raise NonFiniteLossError if the step's mean loss is NaN or infinite."""
    loss = step.header.means()[0]
    if not math.isfinite(loss):
        is_source = not step.header.is_own_loss_finite
        raise NonFiniteLossError(NonFiniteLoss(loss=loss, is_source=is_source))
