"""Decide how many warm workers ``capacity.spares`` keeps in addition to those that jobs use."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from etrain_jupyter.head.coordinator.nodes import JobProgress
from etrain_jupyter.plugins.ec2.head.view import Machine
from etrain_jupyter.plugins.ec2.ledger import TAKEN_BY_EC2, Row

USUAL_BOOT_S = 300.0
"""Boot time until one has been measured, in seconds."""
NUM_BOOTS = 20
WARNING_S = 110.0
"""Time from EC2's notice until a worker stops training; its replacement boots meanwhile."""
PRIOR_LOSSES_PER_H = 0.05
PRIOR_HOURS = 20.0
"""``PRIOR_LOSSES_PER_H`` is the expected number of interruptions per machine hour before any was
observed. It has the weight of this many machine hours of observation."""


@dataclass(kw_only=True)
class BootTimes:
    """Recent times from launch until the workers are connected. Used by one thread."""

    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_BOOTS))
    _booting: set[str] = field(default_factory=set)

    def observe(self, machines: Sequence[Machine], now: float) -> None:
        """Record the machines that have become ready since the last call."""
        for machine in machines:
            # A head that takes over does not know when the machines that it finds became ready.
            if machine.is_ready and machine.id in self._booting:
                self._seconds.append(now - machine.launched_at)
        self._booting = {m.id for m in machines if not m.is_ready}

    @property
    def longest_s(self) -> float:
        """The longest of the last boot times, in seconds."""
        return max(self._seconds, default=USUAL_BOOT_S)

    @property
    def mean_s(self) -> float:
        """The mean of the last boot times, in seconds."""
        return sum(self._seconds) / len(self._seconds) if self._seconds else USUAL_BOOT_S


@dataclass(kw_only=True)
class SparePlan:
    """Number of spare workers. Used by the reconcile thread only."""

    spares: int | Literal["auto"] = "auto"
    """``capacity.spares``."""
    max_workers: int
    """Maximum number of workers of the pool, including spare ones."""
    _boots: BootTimes = field(default_factory=BootTimes)

    def num(
        self,
        jobs: Sequence[JobProgress],
        machines: Sequence[Machine],
        rows: Iterable[Row],
        wanted: int,
        now: float,
    ) -> int:
        """Return the number of spare workers, in addition to those ``wanted`` by active jobs.

        ``rows`` is the ledger, with the machines of the cluster's whole life.
        """
        self._boots.observe(machines, now)
        most = max(0, self.max_workers - wanted)
        if self.spares != "auto":
            return min(self.spares, most)
        # A job that needs all of its workers waits while one is missing. Any other job trains on.
        waiting = [job for job in jobs if job.min_workers == job.max_workers and job.num_workers]
        if not waiting:
            return 0
        spot = [row for row in rows if row.lifecycle == "spot" and row.role == "node"]
        num_losses = sum(row.reason.startswith(TAKEN_BY_EC2) for row in spot)
        hours = sum((row.ended_at or now) - row.launched_at for row in spot) / 3600
        rate = loss_rate_per_h(num_losses, hours)
        total = 0
        for job in waiting:
            missing = mean_missing(
                workers=job.max_workers, losses_per_h=rate, boot_s=self._boots.mean_s
            )
            total += spare_workers(missing=missing, stake=job.max_workers, most=most - total)
        return total


def loss_rate_per_h(num_losses: int, machine_hours: float) -> float:
    """Return interruptions per machine hour, from those observed and a prior.

    >>> round(loss_rate_per_h(9, 80.0), 3)
    0.1
    """
    return (num_losses + PRIOR_LOSSES_PER_H * PRIOR_HOURS) / (machine_hours + PRIOR_HOURS)


def mean_missing(*, workers: int, losses_per_h: float, boot_s: float) -> float:
    """Return how many workers are missing on average while their replacements boot."""
    return workers * losses_per_h / 3600 * max(0.0, boot_s - WARNING_S)


def spare_workers(*, missing: float, stake: float, most: int) -> int:
    """Return the number of spare workers that pay off.

    A spare always costs as much as a worker. It is only used while workers are missing, and then
    avoids the loss of ``stake`` workers. The number of missing workers has a Poisson distribution.

    An elastic job loses only the missing worker, which costs nothing meanwhile, so no spare pays
    off. A job that needs all of its workers waits for the missing one and pays for the others.

    Args:
        missing: Mean number of missing workers; see ``mean_missing``.
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
