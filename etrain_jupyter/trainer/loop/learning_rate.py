"""Learning rates of the optimizer, from the schedule and the batch size.

The rate of a parameter group is its base rate, times the factor of the schedule (a function of the
number of samples trained on), times the factor for the batch size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch

from etrain_jupyter.config.schema import ScalingConfig, TrainConfig
from etrain_jupyter.rules.learning_rate import GradientNoise, LrSchedule, Ramp, Rule, factor_of
from etrain_jupyter.trainer.feature import Step, StepFeature
from etrain_jupyter.trainer.gradients.averaged import square_norm
from etrain_jupyter.trainer.state.capture import Stateful
from etrain_jupyter.trainer.state.train_state import WorkPlan
from etrain_jupyter.trainer.workload import Workload

BASE = "initial_lr"
"""Key for the base rate in a parameter group, as in torch's schedulers. The base rate is saved and
sent with the groups."""

LINEAR = frozenset({"SGD", "ASGD", "Muon"})
"""Optimizers whose rate scales linearly with the batch size. Other rates scale with its square
root."""


class LearningRate(StepFeature):
    """The learning rates of one trainer's optimizer; a stateful component.

    Args:
        optimizer: The optimizer; each group keeps its base rate.
        schedule: The job's learning-rate schedule; None for a constant rate.
        scaling: Scaling with the batch size; None for a fixed batch size.
        is_noise_wanted: Measure the gradient noise even if the rates do not depend on it, for
            ``workers.target: goodput``.
        loss_scale: Returns the factor by which the gradients are scaled.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        schedule: LrSchedule | None = None,
        scaling: ScalingConfig | None = None,
        *,
        is_noise_wanted: bool = False,
        loss_scale: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self._optimizer = optimizer
        self._schedule = schedule
        self._scaling = scaling
        self._is_noise_wanted = is_noise_wanted
        self._loss_scale = loss_scale
        self._momentum = momentum_of(optimizer)
        # ``_next`` becomes ``_committed`` when the step commits. If the step is undone, ``_next``
        # is recomputed from ``_committed``, perhaps for another number of ranks.
        self._committed = self._next = Ramp()
        self._noise = self._next_noise = GradientNoise()
        if schedule is not None or scaling is not None:
            # Existing base rates are kept, because the notebook's own optimizer may have set them.
            for group in optimizer.param_groups:
                group.setdefault(BASE, float(group["lr"]))

    @property
    def extras(self) -> Mapping[str, Stateful]:
        """Return the stateful components to checkpoint: this one, if it has a state."""
        # A schedule has no state, because it is a function of the position.
        return {} if self._scaling is None else {"learning_rate": self}

    @property
    def is_constant(self) -> bool:
        """True if the optimizer's own rates are used, so that steps need not call this feature."""
        return self._schedule is None and self._scaling is None

    def before_update(self, step: Step) -> None:
        """Update the gradient noise, then set the step's rates, which the noise bounds."""
        if step.mean_of_squares is not None:
            # Both values are squares of gradients that were multiplied by the loss scale.
            divisor = self._loss_scale() ** 2
            gradients = [p.grad for p in step.model.parameters() if p.grad is not None]
            self.take_noise(
                mean_of_squares=step.mean_of_squares / divisor,
                square_of_mean=square_norm(gradients) / divisor,
                world_size=step.group.world_size,
            )
        self.prepare(
            position=step.position, count=step.span.samples, world_size=step.group.world_size
        )

    def after_commit(self, step: Step) -> None:
        """Record that the step is committed."""
        self.commit()

    def prepare(self, *, position: int, count: int, world_size: int) -> None:
        """Set the rates for the ``count`` samples that follow the first ``position`` samples."""
        if self.is_constant:
            return
        factor = 1.0 if self._schedule is None else self._schedule.factor(position, count)
        if self._scaling is not None:
            most = math.inf if self._scaling.max_scale is None else self._scaling.max_scale
            scale = world_size / self._scaling.base_workers
            target = factor_of(self._rule(self._scaling), scale, most)
            self._next = self._committed.aim(target, self._momentum, self._scaling.ramp)
            # A larger factor is approached over several steps, but the limit from the noise applies
            # immediately.
            factor *= min(self._next.factor, self._max_factor(self._scaling, world_size))
        for group in self._optimizer.param_groups:
            rate = group[BASE] * factor
            # Replacing a tensor would break a compiled or captured optimizer step.
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    @property
    def measures_noise(self) -> bool:
        """True if the rates or the number of workers depend on the gradient noise."""
        if self._scaling is None:
            return False
        return self._scaling.rule == "adascale" or self._is_noise_wanted

    def take_noise(self, *, mean_of_squares: float, square_of_mean: float, world_size: int) -> None:
        """Update the gradient noise for the next update; see ``GradientNoise.take``."""
        self._next_noise = self._noise.take(
            mean_of_squares=mean_of_squares, square_of_mean=square_of_mean, world_size=world_size
        )

    def noise_fields(self) -> dict[str, float]:
        """Return the gradient noise of the committed steps, for a report; empty without noise."""
        if not self._noise.num_estimates:
            return {}
        return {
            "noise_variance": self._noise.variance,
            "noise_square_norm": self._noise.square_norm,
        }

    @property
    def warning(self) -> str:
        """Known problem of using this optimizer with this rule; empty if there is none."""
        if self._scaling is None:
            return ""
        return warning_for(self._rule(self._scaling), type(self._optimizer).__name__)

    def _max_factor(self, scaling: ScalingConfig, world_size: int) -> float:
        if scaling.rule != "adascale":
            return math.inf
        gain = self._next_noise.gain(world_size=world_size, base_workers=scaling.base_workers)
        return factor_of(self._rule(scaling), gain)

    def _rule(self, scaling: ScalingConfig) -> Rule:
        # AdaScale's gain is an effective batch size, to which the optimizer's default rule applies.
        # For Adam-family optimizers this is the square-root rule, as in AdaptDL (Qiao et al.,
        # "Pollux", OSDI 2021).
        if scaling.rule is None or scaling.rule == "adascale":
            return rule_for(type(self._optimizer).__name__)
        return scaling.rule

    def commit(self) -> None:
        """Record that the step is committed."""
        self._committed = self._next.advance()
        self._noise = self._next_noise

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the ramp and of the gradient noise."""
        return {**asdict(self._committed), "noise": asdict(self._noise)}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Adopt another trainer's state."""
        values = dict(state_dict)
        # Checkpoints written before AdaScale was added have no "noise".
        self._noise = self._next_noise = GradientNoise(**values.pop("noise", {}))
        self._committed = self._next = Ramp(**values)


def rates_of(workload: Workload, config: TrainConfig, plan: WorkPlan) -> LearningRate:
    """Return the learning rates of a job."""
    return LearningRate(
        workload.optimizer,
        lr_schedule_of(config, plan),
        scaling_of(config),
        # The estimate requires that all workers have the same weight in the average.
        is_noise_wanted=config.workers.target == "goodput" and workload.weight is None,
        loss_scale=lambda: workload.precision.loss_scale,
    )


def scaling_of(config: TrainConfig) -> ScalingConfig | None:
    """Return how a job scales the rate with the batch size; None if the batch size is fixed."""
    if config.batch.per_worker_batch_size is None:
        return None
    return config.scaling or ScalingConfig()


def rule_for(optimizer: str) -> Rule:
    """Return the default rule for a class of optimizers.

    >>> rule_for("SGD"), rule_for("AdamW")
    ('linear', 'sqrt')
    """
    return "linear" if optimizer in LINEAR else "sqrt"


def warning_for(rule: Rule, optimizer: str) -> str:
    """Return the known problem of using an optimizer with a rule; empty if there is none.

    >>> warning_for("sqrt", "Lamb")
    ''
    """
    if rule == "linear" and optimizer == "Lamb":
        return (
            "LAMB should not be scaled linearly: with a batch 12 times as large, its loss rose "
            "to more than four times its value. Write scaling: {rule: sqrt}, LAMB's default."
        )
    return ""


def momentum_of(optimizer: torch.optim.Optimizer) -> float:
    """Return an optimizer's momentum (``betas[0]`` for Adam); 0 if it has none."""
    group = optimizer.param_groups[0]
    if "betas" in group:
        return float(group["betas"][0])
    return float(group.get("momentum") or 0.0)


def lr_schedule_of(config: TrainConfig, plan: WorkPlan) -> LrSchedule | None:
    """Return the job's learning-rate schedule; None if the rate is constant."""
    schedule = config.schedule
    if schedule is None:
        return None
    warmup = 0
    if schedule.warmup is not None:
        samples = {"steps": plan.global_batch_size, "epochs": plan.num_train}[schedule.warmup.unit]
        warmup = round(schedule.warmup.value * samples)
    return LrSchedule(warmup=warmup, decay=schedule.decay, end=plan.end)
