"""Estimate the gain of AdaScale: the number of base steps that a larger batch is worth.

A batch that is ``S`` times as large is worth up to ``S`` steps of the base batch if the gradient is
mostly noise, and hardly more than one if it is not. This gain is the learning rate factor.

Source: Johnson et al., "AdaScale SGD: A User-Friendly Algorithm for Distributed Training", ICML
2020. With ``v`` the variance of one worker's mean gradient (summed over its components) and ``q``
the squared norm of the true gradient, the gain of ``W`` workers over ``b`` is
``(v / b + q) / (v / W + q)``. Each step gives an unbiased estimate of both, from the squared norms
of the ranks' gradients and of their mean; the estimates are averaged over recent steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

AVERAGING_WINDOW = 1000.0
"""Each step of ``W`` workers has the weight ``W / AVERAGING_WINDOW`` in the running means."""


@dataclass(frozen=True, kw_only=True)
class GradientNoise:
    """Estimate of the gradient noise; part of the checkpointed state."""

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
        # A plain mean at first, then an exponential one. Larger steps are less noisy: weight ~ W.
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
