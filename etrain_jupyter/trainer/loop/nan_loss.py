"""Stop at a step with a non-finite mean loss: its update would corrupt the weights.

All ranks detect it before any of them updates its weights, because they check the summed loss.
Gradients that overflow in fp16 are a different case, in which the loss itself is finite.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from etrain_jupyter.trainer.gradients.step import Step


class NonFiniteLoss(NamedTuple):
    """One rank's report of a non-finite loss."""

    loss: float
    """The mean over all ranks."""
    is_source: bool
    """True if this rank's own share was not finite."""


class NonFiniteLossError(ArithmeticError):
    """The mean loss of the step in flight is not finite; the step is undone."""

    def __init__(self, report: NonFiniteLoss) -> None:
        super().__init__(f"the mean loss is {report.loss}")
        self.report = report


def check_loss(step: Step) -> None:
    """Raise NonFiniteLossError if the step's mean loss is NaN or infinite."""
    loss = step.header.means()[0]
    if not math.isfinite(loss):
        # One rank's NaN makes the sum NaN on all ranks. Each rank therefore reports whether its own
        # share, before the sum, was finite, so that the job's error can name the rank that caused
        # it.
        is_source = not step.header.is_own_loss_finite
        raise NonFiniteLossError(NonFiniteLoss(loss=loss, is_source=is_source))
