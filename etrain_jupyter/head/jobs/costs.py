"""What the jobs of a cluster cost, into their logs: only where the pool knows prices."""

from __future__ import annotations

import math
from collections.abc import Sequence

from etrain_jupyter.head.coordinator import clock
from etrain_jupyter.head.coordinator.nodes import NodeCost
from etrain_jupyter.head.jobs.hosted_job import HostedJob
from etrain_jupyter.log import events
from etrain_jupyter.log.job_record import JobRecord
from etrain_jupyter.rules.policy.job_costs import JobCosts, RunningCost

TELL_EVERY_S = 10.0
"""How often a job's log is told at most; at the job's end it is told once more."""
LEAST_CHANGE = 0.01
"""A change by less than a hundredth is not told before the end."""


class Money:
    """Shares what the nodes cost among the jobs, and tells their logs."""

    def __init__(self) -> None:
        self._costs = JobCosts()
        self._told: dict[str, tuple[float, RunningCost]] = {}
        """When each job's log was told last, and what."""
        self._has_prices = False

    def take(self, nodes: Sequence[NodeCost], jobs: Sequence[HostedJob]) -> None:
        """Take in what the nodes have cost by now.

        Args:
            nodes: All that there have been; none where the pool is free.
            jobs: The jobs that have not ended.
        """
        self._has_prices = self._has_prices or bool(nodes)
        for job in jobs:
            if job.order.job_id not in self._told:
                before = _cost_in(job.record)
                self._costs.begin(job.order.job_id, before, has_trained=job.state.step > 0)
                self._told[job.order.job_id] = (-math.inf, before)
        ranks = {worker: job.order.job_id for job in jobs for worker in job.ranks()}
        self._costs.take(nodes, ranks=ranks, active=[job.order.job_id for job in jobs])
        if self._has_prices:
            for job in jobs:
                self._tell(job)

    def end(self, job: HostedJob) -> None:
        """Forget a job that has ended."""
        if self._told.pop(job.order.job_id, None):
            self._costs.forget(job.order.job_id)

    def of(self, job: HostedJob) -> RunningCost:
        """Return what a job has cost."""
        return self._costs.of(job.order.job_id)

    def tell_last(self, job: HostedJob) -> None:
        """Tell the log of a job that is about to end."""
        if self._has_prices and self._told.get(job.order.job_id, (-math.inf, None))[1] != self.of(
            job
        ):
            self._log(job, self.of(job))

    def _tell(self, job: HostedJob) -> None:
        told_at, told = self._told[job.order.job_id]
        cost = self.of(job)
        change = abs(cost.spent_usd - told.spent_usd)
        if clock.now() - told_at >= TELL_EVERY_S and change > LEAST_CHANGE * told.spent_usd:
            self._log(job, cost)

    def _log(self, job: HostedJob, cost: RunningCost) -> None:
        self._told[job.order.job_id] = (clock.now(), cost)
        job.log(
            events.CostUpdated,
            spent_usd=cost.spent_usd,
            on_demand_usd=cost.on_demand_usd,
            wasted_usd=cost.wasted_usd,
        )


def _cost_in(record: JobRecord) -> RunningCost:
    """Return what a job had cost when it was resumed, or when its scheduler died."""
    known = record.cost
    if known is None:
        return RunningCost()
    return RunningCost(
        spent_usd=known.spent_usd,
        on_demand_usd=known.on_demand_usd,
        wasted_usd=known.wasted_usd,
    )
