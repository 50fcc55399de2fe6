"""Sets the optimizer's learning rates before each update: by the samples trained, and by the batch.

A rate is its group's own, times the factor of the schedule, times that of the batch's size.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import torch

from etrain_jupyter.config.schema import ScalingConfig, TrainConfig
from etrain_jupyter.rules.policy.adascale import GradientNoise
from etrain_jupyter.rules.policy.lr_schedule import LrSchedule
from etrain_jupyter.rules.policy.scaling import Ramp, Rule, factor_of

BASE = "initial_lr"
"""Key of a parameter group for the rate that it began with, the same as torch's schedulers use. It
goes where the groups go."""

LINEAR = frozenset({"SGD", "ASGD", "Muon"})
"""Optimizers whose rate grows with the batch; for all others it grows with its square root."""


class LearningRate:
    """The learning rates of one trainer's optimizer; its state is part of the trainer's.

    What a step is made with becomes state only when the step is committed: ranks that formed a
    generation which made no step hold the same as those that did not form it.

    Args:
        optimizer: Its groups keep rates of their own, each scaled alike.
        schedule: How they change over the job; None if they do not.
        scaling: How they follow the batch; None for a batch that never changes.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        schedule: LrSchedule | None = None,
        scaling: ScalingConfig | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._schedule = schedule
        self._scaling = scaling
        self._momentum = momentum_of(optimizer)
        self._committed = self._next = Ramp()
        self._noise = self._next_noise = GradientNoise()
        if schedule is not None or scaling is not None:
            for group in optimizer.param_groups:
                group.setdefault(BASE, float(group["lr"]))

    def prepare(self, *, position: int, count: int, world_size: int) -> None:
        """Set the rates of the next update.

        Args:
            position: Samples trained before its step.
            count: Samples of its step.
            world_size: Ranks that make it.
        """
        if self._schedule is None and self._scaling is None:
            return
        factor = 1.0 if self._schedule is None else self._schedule.factor(position, count)
        if self._scaling is not None:
            self._next = self._aimed(self._scaling, world_size)
            factor *= min(self._next.factor, self._most(self._scaling, world_size))
        for group in self._optimizer.param_groups:
            rate = group[BASE] * factor
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    @property
    def measures_noise(self) -> bool:
        """Whether the rates follow the gradients' noise, so that it has to be measured."""
        return self._scaling is not None and self._scaling.rule == "adascale"

    def take_noise(self, *, mean_of_squares: float, square_of_mean: float, world_size: int) -> None:
        """Take in what the next update's gradients tell, see ``GradientNoise.take``."""
        self._next_noise = self._noise.take(
            mean_of_squares=mean_of_squares, square_of_mean=square_of_mean, world_size=world_size
        )

    @property
    def warning(self) -> str:
        """What is known to go wrong with this optimizer and rule; empty if nothing is."""
        if self._scaling is None:
            return ""
        return warning_for(self._rule(self._scaling), type(self._optimizer).__name__)

    def _aimed(self, scaling: ScalingConfig, world_size: int) -> Ramp:
        most = math.inf if scaling.max_scale is None else scaling.max_scale
        target = factor_of(self._rule(scaling), world_size / scaling.base_workers, most)
        return self._committed.aim(target, self._momentum, scaling.ramp)

    def _most(self, scaling: ScalingConfig, world_size: int) -> float:
        """Return the largest factor that the gradients bear."""
        if scaling.rule != "adascale":
            return math.inf
        gain = self._next_noise.gain(world_size=world_size, base_workers=scaling.base_workers)
        return factor_of(self._rule(scaling), gain)

    def _rule(self, scaling: ScalingConfig) -> Rule:
        """Return the rule that holds; AdaScale's gain stands for the scale in the usual one.

        For Adam and its like that is its square root, as in AdaptDL (Qiao et al., "Pollux", 2021).
        """
        if scaling.rule is None or scaling.rule == "adascale":
            return rule_for(type(self._optimizer).__name__)
        return scaling.rule

    def commit(self) -> None:
        """Take in that the step was made."""
        self._committed = self._next.advance()
        self._noise = self._next_noise

    def state_dict(self) -> dict[str, Any]:
        """Return where the ramp stands, and what is known of the gradients' noise."""
        return {**asdict(self._committed), "noise": asdict(self._noise)}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Take over where another trainer's stand."""
        values = dict(state_dict)
        self._noise = self._next_noise = GradientNoise(**values.pop("noise", {}))
        self._committed = self._next = Ramp(**values)


def scaling_of(config: TrainConfig) -> ScalingConfig | None:
    """Return how a job's rates follow its batch; None if that never changes."""
    if config.batch.per_worker_batch_size is None:
        return None
    return config.scaling or ScalingConfig()


def rule_for(optimizer: str) -> Rule:
    """Return the rule that is right for most models, by the class of the optimizer.

    >>> rule_for("SGD"), rule_for("AdamW")
    ('linear', 'sqrt')
    """
    return "linear" if optimizer in LINEAR else "sqrt"


def warning_for(rule: Rule, optimizer: str) -> str:
    """Return what is known to go wrong with a rule; empty if nothing is.

    >>> warning_for("sqrt", "Lamb")
    ''
    """
    if rule == "linear" and optimizer == "Lamb":
        return (
            "LAMB should not be scaled linearly: at a batch 12 times as large, its loss jumped to "
            "more than four times what it was. Write scaling: {rule: sqrt}, its own default."
        )
    return ""


def momentum_of(optimizer: torch.optim.Optimizer) -> float:
    """Return the weight of the past in an optimizer's mean of the gradients; 0 without one."""
    group = optimizer.param_groups[0]
    if "betas" in group:
        return float(group["betas"][0])
    return float(group.get("momentum") or 0.0)
