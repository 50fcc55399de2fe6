"""Decide how many warm spare workers pay."""

from __future__ import annotations

import math

WARNING_S = 110.0
"""Time from EC2's notice until a worker stops training, in which its replacement boots."""
PRIOR_LOSSES_PER_H = 0.05
PRIOR_HOURS = 20.0
"""Interruptions per machine hour to expect before any was observed, and the weight of this value in
hours of observation."""


def loss_rate_per_h(num_losses: int, machine_hours: float) -> float:
    """Return interruptions per machine hour, from those observed and a prior.

    >>> round(loss_rate_per_h(9, 80.0), 3)
    0.1
    """
    return (num_losses + PRIOR_LOSSES_PER_H * PRIOR_HOURS) / (machine_hours + PRIOR_HOURS)


def mean_missing(*, workers: int, losses_per_h: float, boot_s: float) -> float:
    """Return how many workers are missing on average because their replacements still boot."""
    uncovered_s = max(0.0, boot_s - WARNING_S)
    return workers * losses_per_h / 3600 * uncovered_s


def spare_workers(*, missing: float, stake: float, most: int) -> int:
    """Return the number of spare workers that pay.

    A spare costs as much as a worker all the time. It is in use while workers are missing, and then
    avoids the loss of ``stake`` workers. The number of missing workers has a Poisson distribution.

    An elastic job loses only the missing worker, which costs nothing while it is missing: no spare
    pays. A job that needs all of its workers waits for one, and pays for the others.

    Args:
        missing: Mean number of missing workers, see ``mean_missing``.
        stake: Workers that are paid for and idle while one is missing, including that one.
        most: Maximum number of spare workers.

    Returns:
        The largest number k for which the k-th spare avoids a larger loss than it costs:
        ``stake`` times the probability that at least k workers are missing is above 1.

    >>> [spare_workers(missing=0.1, stake=stake, most=4) for stake in (1.0, 64.0)]
    [0, 1]
    """
    if missing <= 0:
        return 0
    # Probability of exactly k missing workers, and of k or more.
    exactly, at_least = math.exp(-missing), 1.0
    for number in range(1, most + 1):
        at_least -= exactly
        if stake * at_least <= 1.0:
            return number - 1
        exactly *= missing / number
    return most
