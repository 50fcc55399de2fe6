"""Apply ``capacity.spares``: how many workers are kept in addition to those that jobs use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from etrain_jupyter.head.coordinator.nodes import JobProgress
from etrain_jupyter.plugins.ec2.head.boot_times import BootTimes
from etrain_jupyter.plugins.ec2.head.view import Machine
from etrain_jupyter.plugins.ec2.ledger import TAKEN_BY_EC2, Row
from etrain_jupyter.plugins.ec2.spares import loss_rate_per_h, mean_missing, spare_workers


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
        """Return the number of spare workers.

        Args:
            jobs: Active jobs.
            machines: Running machines.
            rows: The ledger, with the machines of the cluster's whole life.
            wanted: Number of workers wanted by jobs.
            now: Time in seconds since the epoch.
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
