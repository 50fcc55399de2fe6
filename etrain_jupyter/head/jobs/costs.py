"""Log the costs of a cluster's jobs, if the pool has price information."""

from __future__ import annotations

import math
from collections.abc import Sequence

from etrain_jupyter.head.coordinator import clock
from etrain_jupyter.head.coordinator.nodes import NodeCost
from etrain_jupyter.head.jobs.hosted_job import HostedJob
from etrain_jupyter.log import events
from etrain_jupyter.log.job_record import JobRecord
from etrain_jupyter.rules.costs import JobCosts, RunningCost, samples_by_type

LOG_INTERVAL_S = 10.0
"""Minimum interval in seconds between cost entries in a job's log, except for the final one."""
MIN_CHANGE = 0.01
"""A smaller relative change in cost is not logged, except at the job's end."""


class CostLog:
    """Split the nodes' cost among the jobs, and log each job's share."""

    def __init__(self) -> None:
        self._costs = JobCosts()
        # Time and value of the newest cost in each job's log.
        self._logged: dict[str, tuple[float, RunningCost]] = {}
        self._has_prices = False

    def take(self, nodes: Sequence[NodeCost], jobs: Sequence[HostedJob]) -> None:
        """Update the jobs' costs.

        Args:
            nodes: All current and former nodes with their cost so far; empty if the pool is free.
            jobs: The active jobs.
        """
        self._has_prices = self._has_prices or bool(nodes)
        # Each update covers the time since the previous update, so add new jobs first.
        for job in jobs:
            if job.spec.job_id not in self._logged:
                before = _cost_in(job.record)
                known = job.record.cost
                self._costs.begin(
                    job.spec.job_id,
                    before,
                    has_trained=job.state.step > 0,
                    usd_by_type=known.usd_by_type if known else None,
                )
                self._logged[job.spec.job_id] = (-math.inf, before)
        ranks = {worker: job.spec.job_id for job in jobs for worker in job.ranks()}
        self._costs.take(nodes, ranks=ranks, active=[job.spec.job_id for job in jobs])
        if self._has_prices:
            for job in jobs:
                logged_at, logged = self._logged[job.spec.job_id]
                cost = self.of(job)
                change = abs(cost.spent_usd - logged.spent_usd)
                is_due = clock.now() - logged_at >= LOG_INTERVAL_S
                if is_due and change > MIN_CHANGE * logged.spent_usd:
                    self._log(job, cost)

    def end(self, job: HostedJob) -> None:
        """Forget a job that has ended."""
        if self._logged.pop(job.spec.job_id, None):
            self._costs.forget(job.spec.job_id)

    def of(self, job: HostedJob) -> RunningCost:
        """Return a job's cost."""
        return self._costs.of(job.spec.job_id)

    def report_final(self, job: HostedJob) -> None:
        """Log the final cost of a job that is about to end."""
        _, logged = self._logged.get(job.spec.job_id, (-math.inf, None))
        if self._has_prices and logged != self.of(job):
            self._log(job, self.of(job))

    def _log(self, job: HostedJob, cost: RunningCost) -> None:
        self._logged[job.spec.job_id] = (clock.now(), cost)
        job.log(
            events.CostUpdated,
            spent_usd=cost.spent_usd,
            on_demand_usd=cost.on_demand_usd,
            wasted_usd=cost.wasted_usd,
            usd_by_type=self._costs.by_type(job.spec.job_id),
            samples_by_type=samples_by_type(
                {type: work for type, work in job.record.work.items() if type}, job.record.samples
            ),
        )


def _cost_in(record: JobRecord) -> RunningCost:
    # A resumed job continues from the total of its previous attempts.
    known = record.cost
    if known is None:
        return RunningCost()
    return RunningCost(
        spent_usd=known.spent_usd,
        on_demand_usd=known.on_demand_usd,
        wasted_usd=known.wasted_usd,
    )
