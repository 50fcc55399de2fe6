"""Schedule the learning rate, and scale it with a batch that grows and shrinks with the workers.

The batch of a job with ``batch.per_worker`` is ``scale`` times its base batch. A rule gives the
learning rate factor for a scale. The factor increases over several steps, because a jump would also
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


AVERAGING_WINDOW = 1000.0
"""Each step of ``W`` workers has the weight ``W / AVERAGING_WINDOW`` in the running means."""


@dataclass(frozen=True, kw_only=True)
class GradientNoise:
    """Estimate of the gradient noise, which gives the gain of AdaScale; part of the checkpoint.

    The gain is the number of base steps that a larger batch is worth. It is the learning rate
    factor. A batch that is ``S`` times as large is worth up to ``S`` steps of the base batch if the
    gradient is mostly noise, and hardly more than one if it is not.

    Source: Johnson et al., "AdaScale SGD: A User-Friendly Algorithm for Distributed Training", ICML
    2020. With ``v`` the variance of one worker's mean gradient (summed over its components) and
    ``q`` the squared norm of the true gradient, the gain of ``W`` workers over ``b`` is
    ``(v / b + q) / (v / W + q)``. Each step gives an unbiased estimate of both, from the squared
    norms of the ranks' gradients and of their mean; the estimates are averaged over recent steps.
    """

    variance: float = 0.0
    """``v``: running mean of the estimates."""
    square_norm: float = 0.0
    """``q``: running mean of the estimates."""
    num_estimates: int = 0
    """Number of estimates; while it is small, the running means are plain means."""

    def take(self, *, mean_of_squares: float, square_of_mean: float, world_size: int) -> Self:
        """Return the estimate after one more step.

        Args:
            mean_of_squares: Mean over the ranks of the squared norm of a rank's mean gradient.
            square_of_mean: Squared norm of the mean over the ranks.
            world_size: Number of ranks, with equal numbers of samples. A single rank gives no
                estimate of the noise, and neither do infinite gradients.

        >>> GradientNoise().take(mean_of_squares=5.0, square_of_mean=3.0, world_size=2)
        GradientNoise(variance=4.0, square_norm=1.0, num_estimates=1)
        """
        # fp16 overflows give infinite gradients; their update is skipped, too.
        if world_size < 2 or not math.isfinite(mean_of_squares + square_of_mean):
            return self
        # E[mean_of_squares] = v + q and E[square_of_mean] = v / W + q, solved for v and q.
        variance = (mean_of_squares - square_of_mean) * world_size / (world_size - 1)
        square_norm = square_of_mean - variance / world_size
        count = self.num_estimates + 1
        # A plain mean at first, then an exponential one. Larger steps are less noisy, so the weight
        # is proportional to W.
        weight = max(1.0 / count, min(1.0, world_size / AVERAGING_WINDOW))
        return type(self)(
            variance=self.variance + weight * (variance - self.variance),
            square_norm=self.square_norm + weight * (square_norm - self.square_norm),
            num_estimates=count,
        )

    def gain(self, *, world_size: int, base_workers: int) -> float:
        """Return the factor of the learning rate: 1.0 at ``base_workers``, at most linear.

        Before the first estimate, the factor is linear for a smaller batch and 1.0 for a larger
        batch, whose first step gives an estimate.

        >>> noise = GradientNoise(variance=4.0, square_norm=1.0, num_estimates=1)
        >>> noise.gain(world_size=4, base_workers=1), noise.gain(world_size=1, base_workers=1)
        (2.5, 1.0)
        """
        scale = world_size / base_workers
        if not self.num_estimates:
            return min(scale, 1.0)
        # An unbiased estimate may be negative, although the true value is not.
        variance, square_norm = max(self.variance, 0.0), max(self.square_norm, 0.0)
        present = variance / world_size + square_norm
        if present <= 0.0:  # no gradient at all
            return min(scale, 1.0)
        return (variance / base_workers + square_norm) / present


Decay = Literal["none", "linear", "cosine"]


@dataclass(frozen=True, kw_only=True)
class LrSchedule:
    """A linear warm-up, then a decay to the end of the job, at any batch size."""

    warmup: int = 0
    """Samples until the learning rate reaches that of the optimizer."""
    decay: Decay = "none"
    """``linear`` and ``cosine`` decrease to 0 at the end; ``none`` stays constant."""
    end: int
    """Samples that the whole job trains on; later steps have the final rate."""

    def factor(self, position: int, count: int) -> float:
        """Return the learning rate factor for one step.

        At a constant batch of B samples, with a warm-up of W steps out of T, these are the usual
        formulas, with step t from 0: ``(t + 1) / W`` in the warm-up, so that the first
        step trains too; then ``(T - t) / (T - W)`` or ``(1 + cos(pi (t - W) / (T - W))) / 2``.

        Args:
            position: Samples trained on before the step.
            count: Samples in the step.

        >>> schedule = LrSchedule(warmup=200, decay="linear", end=1000)
        >>> [schedule.factor(position, 100) for position in (0, 100, 200, 600, 900)]
        [0.5, 1.0, 1.0, 0.5, 0.125]
        """
        # Use the end of the step in the warm-up and its start in the decay, so that the factor is
        # never 0.
        if position < self.warmup:
            return min(1.0, (position + count) / self.warmup)
        if self.decay == "none":
            return 1.0
        passed = min(1.0, (position - self.warmup) / max(1, self.end - self.warmup))
        return 1.0 - passed if self.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * passed))
