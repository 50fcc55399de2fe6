"""Scale the learning rate with a batch that grows and shrinks with the workers.

The batch of a job with ``batch.per_worker`` is ``scale`` times its base batch. A rule gives the
learning rate factor for a scale. The factor increases over several steps: a jump would also
multiply the noisy momentum of the small batch, and the loss might overshoot and not recover. It
decreases immediately, because the previous rate may be unstable for a smaller batch. The momentum
buffer itself never changes.

Source: Lin et al., "Dynamic Mini-batch SGD for Elastic Distributed Training", 2019, arXiv
1904.12043. The paper increases the rate linearly over T steps. We choose T so that the old momentum
buffer is never amplified. After j steps, the buffer still has the weight ``mu ** j``, and the
condition ``(1 + (r - 1) j / T) mu ** j <= 1`` for all j is equivalent to
``T >= (r - 1) / ln(1 / mu)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, Self

Rule = Literal["none", "linear", "sqrt"]


def factor_of(rule: Rule, scale: float, max_factor: float = math.inf) -> float:
    """Return the learning rate factor that a rule gives for a scale of the batch.

    Args:
        rule: ``linear`` (Goyal et al., 2017), ``sqrt`` (for Adam-family optimizers: Malladi et
            al., 2022) or ``none``.
        scale: Ratio of the batch to the base batch.
        max_factor: Upper bound.

    >>> [factor_of(rule, 4.0) for rule in ("none", "linear", "sqrt")]
    [1.0, 4.0, 2.0]
    """
    wanted = {"none": 1.0, "linear": scale, "sqrt": math.sqrt(scale)}[rule]
    return min(wanted, max_factor)


def ramp_length(growth: float, momentum: float) -> int:
    """Return the number of steps over which to increase the factor ``growth``-fold.

    Args:
        growth: Ratio of the new factor to the current one.
        momentum: Weight of past gradients in the optimizer's mean: ``momentum`` for SGD, beta1 for
            Adam-family optimizers; 0 for an optimizer without momentum.

    >>> ramp_length(12.0, 0.9), ramp_length(0.5, 0.9), ramp_length(12.0, 0.0)
    (105, 0, 0)
    """
    if growth <= 1.0 or momentum <= 0.0:
        return 0
    return math.ceil((growth - 1.0) / math.log(1.0 / momentum))


@dataclass(frozen=True, kw_only=True)
class Ramp:
    """The current factor of the learning rate; part of the checkpointed state."""

    start: float = 1.0
    """The factor at the start of the current ramp."""
    target: float = 1.0
    """The factor at its end."""
    since: int = 0
    """Steps of the ramp so far."""
    length: int = 0
    """Steps of the whole ramp; 0 if the target took effect at once."""

    @property
    def factor(self) -> float:
        """The factor for the next step."""
        if self.since >= self.length:
            return self.target
        return self.start + (self.target - self.start) * self.since / self.length

    def aim(self, target: float, momentum: float, length: int | None = None) -> Self:
        """Return a ramp from the current factor to ``target``; an unchanged target has no effect.

        Args:
            target: The factor at the end of the ramp.
            momentum: See ``ramp_length``.
            length: Steps for an increasing factor; None to use ``ramp_length``.
        """
        # Called before each step; the target changes only with the number of workers:
        #
        #   factor  4        _______
        #                 __/       |
        #           1  __/          |_____    up over several steps, down at once
        if target == self.target:
            return self
        growth = target / self.factor
        steps = ramp_length(growth, momentum)
        if length is not None and growth > 1.0:
            steps = length
        return replace(self, start=self.factor, target=target, since=0, length=steps)

    def advance(self) -> Self:
        """Return the ramp after one more step."""
        return replace(self, since=min(self.since + 1, self.length))
