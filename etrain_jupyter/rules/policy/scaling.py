"""How the learning rate follows a batch that grows and shrinks with the workers.

The batch of a job with ``batch.per_worker`` is ``scale`` times its base batch. A rule says which
factor of the learning rate goes with that. A factor that grows is approached over some steps: at a
jump, the momentum of the small batch, whose noise is large, would be multiplied with it, and the
loss may overshoot for good. One that shrinks is taken over at once: the new, smaller batch would
not bear the old rate. The momentum buffer itself is never touched.

Source: Lin et al., "Dynamic Mini-batch SGD for Elastic Distributed Training", 2019, arXiv
1904.12043. Its compensation is a linear ramp of the rate over T steps; T follows from the condition
that the old buffer is never amplified: after j steps it still weighs ``mu ** j``, and
``(1 + (r - 1) j / T) mu ** j <= 1`` for all j means ``T >= (r - 1) / ln(1 / mu)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, Self

Rule = Literal["none", "linear", "sqrt"]


def factor_of(rule: Rule, scale: float, max_factor: float = math.inf) -> float:
    """Return the factor of the learning rate that a rule wants at a scale of the batch.

    Args:
        rule: ``linear`` (Goyal et al., 2017), ``sqrt`` (for Adam and its like: Malladi et al.,
            2022) or ``none``.
        scale: Batch by base batch.
        max_factor: Never more than that.

    >>> [factor_of(rule, 4.0) for rule in ("none", "linear", "sqrt")]
    [1.0, 4.0, 2.0]
    """
    wanted = {"none": 1.0, "linear": scale, "sqrt": math.sqrt(scale)}[rule]
    return min(wanted, max_factor)


def ramp_length(growth: float, momentum: float) -> int:
    """Return over how many steps a factor that grows ``growth`` times is approached.

    Args:
        growth: New factor by present one.
        momentum: Weight of the past in the optimizer's mean of the gradients: ``momentum`` of SGD,
            beta1 of Adam and its like; 0 if there is none.

    >>> ramp_length(12.0, 0.9), ramp_length(0.5, 0.9), ramp_length(12.0, 0.0)
    (105, 0, 0)
    """
    if growth <= 1.0 or momentum <= 0.0:
        return 0
    return math.ceil((growth - 1.0) / math.log(1.0 / momentum))


@dataclass(frozen=True, kw_only=True)
class Ramp:
    """Where the factor of the learning rate stands; part of a job's state."""

    start: float = 1.0
    """The factor when the present ramp began."""
    target: float = 1.0
    """The factor that it goes to."""
    since: int = 0
    """Steps made on it."""
    length: int = 0
    """Steps that it takes; 0 if the target was taken over at once."""

    @property
    def factor(self) -> float:
        """The factor of the next step."""
        if self.since >= self.length:
            return self.target
        return self.start + (self.target - self.start) * self.since / self.length

    def aim(self, target: float, momentum: float, length: int | None = None) -> Self:
        """Go to another target from where the factor stands; the same one changes nothing.

        Args:
            target: The factor to go to.
            momentum: See ``ramp_length``.
            length: Steps that a growth takes, instead of what ``momentum`` says.
        """
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
