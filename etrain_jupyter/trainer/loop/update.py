"""Update the weights: loss check, learning rate, sample weights, clipping, optimizer step."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import nn

from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.trainer.gradients.comm_hook import square_norm
from etrain_jupyter.trainer.gradients.step import Step
from etrain_jupyter.trainer.loop.learning_rate import LearningRate, scaling_of
from etrain_jupyter.trainer.objective.weight import divide_gradients
from etrain_jupyter.trainer.schedule import WorkPlan, lr_schedule_of
from etrain_jupyter.trainer.workload import Workload


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
    """Raise NonFiniteLossError if the mean loss is NaN or infinite, which would corrupt weights.

    All ranks detect it before any of them updates its weights, because they check the summed loss.
    Gradients that overflow in fp16 are a different case, in which the loss itself is finite.
    """
    loss = step.header.means()[0]
    if not math.isfinite(loss):
        # One rank's NaN makes the sum NaN on all ranks. Each rank therefore reports whether its own
        # share, before the sum, was finite, so that the job's error can name the rank that caused
        # it.
        is_source = not step.header.is_own_loss_finite
        raise NonFiniteLossError(NonFiniteLoss(loss=loss, is_source=is_source))


class Update:
    """The updates of one workload's weights."""

    def __init__(self, workload: Workload, config: TrainConfig, plan: WorkPlan) -> None:
        self._workload = workload
        self._clip_grad_norm = config.clip_grad_norm
        self.rates = LearningRate(
            workload.optimizer,
            lr_schedule_of(config, plan),
            scaling_of(config),
            # The estimate requires that all workers have the same weight in the average.
            is_noise_wanted=config.workers.target == "goodput" and workload.weight is None,
        )
        # The rates have a state only if they scale with the batch size; a schedule is a function of
        # the position.
        if scaling_of(config) is not None:
            workload.extras = {**workload.extras, "learning_rate": self.rates}
        self.is_torn = False
        """True if an update was interrupted: some weights have been updated and others have not."""

    def prepare(self, step: Step, *, position: int, weight: float) -> bool:
        """Do everything before the update; all of it can be undone.

        Args:
            step: The step, whose gradients are sums over all ranks.
            position: Samples trained on before it.
            weight: Mean weight of a sample; see ``Means``.

        Returns:
            False if all ranks skip the update, because all samples have weight 0.
        """
        # The order matters:
        #
        #     noise            of the gradients as summed, still times the loss scale
        #     rates            after the noise, which bounds them
        #     weight, unscale  gradients become those of the mean loss
        #     clip             by the norm of these gradients
        #     optimizer        the only part that cannot be undone
        #     average          of the updated weights
        model, optimizer = self._workload.model, self._workload.optimizer
        self._take_noise(step)
        self.rates.prepare(
            position=position, count=step.span.samples, world_size=step.group.world_size
        )
        # Dividing by zero would make all weights NaN. All ranks have the same sum, so all of them
        # skip the update.
        if not weight:
            return False
        if self._workload.weight is not None:
            divide_gradients(model, weight)
        self._workload.precision.unscale(optimizer)
        if self._clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), self._clip_grad_norm)
        return True

    def apply(self) -> bool:
        """Update the weights, after ``prepare``; return False if gradients overflowed in fp16."""
        # If the optimizer raises midway, some weights have been updated. The old weights are not
        # copied, because a copy would need as much memory as the model. Instead, the rank drops its
        # state and receives another rank's.
        self.is_torn = True
        is_updated = self._workload.precision.step(self._workload.optimizer)
        shards = self._workload.shards
        if is_updated and not (shards is not None and shards.is_stale):
            self._update_average()
        self.is_torn = False
        return is_updated

    def finish(self) -> None:
        """With ``shard``: finish the update once this rank has the weights of all shards."""
        shards = self._workload.shards
        if shards is not None and shards.is_stale:
            self.is_torn = True
            self._update_average()
            self.is_torn = shards.is_stale = False

    def _update_average(self) -> None:
        if self._workload.average is not None:
            self._workload.average.update()

    def commit(self, weight: float) -> None:
        """Record that the step is committed."""
        self.rates.commit()
        if self._workload.weight is not None:
            self._workload.weight.follow(weight)

    def _take_noise(self, step: Step) -> None:
        if step.mean_of_squares is None:
            return
        # Both values are squares of gradients that were multiplied by the loss scale.
        divisor = self._workload.precision.loss_scale**2
        gradients = [p.grad for p in self._workload.model.parameters() if p.grad is not None]
        self.rates.take_noise(
            mean_of_squares=step.mean_of_squares / divisor,
            square_of_mean=square_norm(gradients) / divisor,
            world_size=step.group.world_size,
        )
