"""Split the cost of a cluster's nodes among its jobs, and find what a sample costs by machine type.

While a node's workers are ranks of jobs, these jobs pay for it. While it boots, warms up, drains
or waits to be terminated, all active jobs share its cost; for a job that has trained before,
this share counts as wasted. A refund goes to the jobs that paid.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from etrain_jupyter.log.job_record import TypeWork


class Spent(Protocol):
    """Cost of one node since it was started; see ``head.coordinator.nodes.NodeCost``."""

    @property
    def node_id(self) -> str:
        """The node."""

    @property
    def workers(self) -> tuple[str, ...]:
        """Its current and former workers."""

    @property
    def machine(self) -> str:
        """Its machine type; empty if the pool has no types."""

    @property
    def spent_usd(self) -> float:
        """US dollars so far. A refund may decrease it."""

    @property
    def on_demand_usd(self) -> float:
        """Cost of the same machine hours at on-demand prices."""


@dataclass(frozen=True, kw_only=True)
class RunningCost:
    """Cost of a job so far."""

    spent_usd: float = 0.0
    on_demand_usd: float = 0.0
    """Cost of the same machine hours at on-demand prices."""
    wasted_usd: float = 0.0
    """Part of ``spent_usd`` for nodes that did not train, after the job's first step."""

    def plus(self, other: RunningCost) -> RunningCost:
        """Return the sum."""
        return RunningCost(
            spent_usd=self.spent_usd + other.spent_usd,
            on_demand_usd=self.on_demand_usd + other.on_demand_usd,
            wasted_usd=self.wasted_usd + other.wasted_usd,
        )


class JobCosts:
    """Accumulates the cost of each job from the cost of the nodes.

    >>> from types import SimpleNamespace as Node
    >>> costs = JobCosts()
    >>> costs.take([], ranks={}, active=["a"])
    >>> node = Node(node_id="i-1", workers=("i-1",), machine="g5.xlarge", spent_usd=0.1,
    ...             on_demand_usd=0.3)
    >>> costs.take([node], ranks={"i-1": "a"}, active=["a", "b"])
    >>> costs.of("a")
    RunningCost(spent_usd=0.1, on_demand_usd=0.3, wasted_usd=0.0)
    >>> costs.by_type("a")
    {'g5.xlarge': 0.1}
    """

    def __init__(self) -> None:
        # Cost of each node at the last update; None before the first.
        self._known: dict[str, tuple[float, float]] | None = None
        # Cost that each job has paid, by node, because a refund is shared like these payments.
        self._paid: dict[str, dict[str, RunningCost]] = defaultdict(dict)
        self._has_trained: set[str] = set()
        self._machines: dict[str, str] = {}  # type of each node
        self._before: dict[str, Mapping[str, float]] = {}  # by job: ``begin``, by type

    def begin(
        self,
        job_id: str,
        cost: RunningCost,
        *,
        has_trained: bool,
        usd_by_type: Mapping[str, float] | None = None,
    ) -> None:
        """Start with the cost of a job so far, from another scheduler or cluster."""
        self._paid[""][job_id] = cost  # attributed to no node, so that no refund affects it
        self._before[job_id] = usd_by_type or {}
        if has_trained:
            self._has_trained.add(job_id)

    def of(self, job_id: str) -> RunningCost:
        """Return the cost of a job."""
        total = RunningCost()
        for payers in self._paid.values():
            total = total.plus(payers.get(job_id, RunningCost()))
        return total

    def by_type(self, job_id: str) -> dict[str, float]:
        """Return the US dollars that a job has spent on each known machine type."""
        totals = dict(self._before.get(job_id, {}))
        for node, payers in self._paid.items():
            machine = self._machines.get(node, "")
            if machine and job_id in payers:
                totals[machine] = totals.get(machine, 0.0) + payers[job_id].spent_usd
        return totals

    def forget(self, job_id: str) -> None:
        """Forget a job that has ended."""
        for payers in self._paid.values():
            payers.pop(job_id, None)
        self._has_trained.discard(job_id)
        self._before.pop(job_id, None)

    def take(
        self, nodes: Sequence[Spent], *, ranks: Mapping[str, str], active: Collection[str]
    ) -> None:
        """Share the cost since the last update among jobs.

        The first update only sets the baseline, because a previous scheduler has already shared
        that cost.

        Args:
            nodes: All current and former nodes.
            ranks: The job of each worker that is a rank now.
            active: The jobs that have not ended.
        """
        self._has_trained |= set(ranks.values())
        previous = self._known
        self._known = {n.node_id: (n.spent_usd, n.on_demand_usd) for n in nodes}
        if previous is None:
            return
        self._machines = {node.node_id: node.machine for node in nodes}
        for node in nodes:
            spent, on_demand = previous.get(node.node_id, (0.0, 0.0))
            spent, on_demand = node.spent_usd - spent, node.on_demand_usd - on_demand
            if spent < 0:  # the first hour of an instance that the cloud reclaims is free
                self._refund(node.node_id, -spent)
                spent = 0.0
            self._charge(node, spent, on_demand, ranks, active)

    def _charge(
        self,
        node: Spent,
        spent: float,
        on_demand: float,
        ranks: Mapping[str, str],
        active: Collection[str],
    ) -> None:
        # A job with two ranks on the node is listed twice, and pays two shares.
        users = [ranks[worker] for worker in node.workers if worker in ranks]
        payers = users or sorted(active)
        for job_id in payers:
            share = RunningCost(
                spent_usd=spent / len(payers),
                on_demand_usd=on_demand / len(payers),
                wasted_usd=0.0 if users or job_id not in self._has_trained else spent / len(payers),
            )
            paid = self._paid[node.node_id]
            paid[job_id] = paid.get(job_id, RunningCost()).plus(share)

    def _refund(self, node_id: str, amount_usd: float) -> None:
        # Divide the refund in proportion to the payments. ``on_demand_usd`` does not change,
        # because it is a price and not a payment.
        payers = self._paid[node_id]
        total = sum(paid.spent_usd for paid in payers.values())
        left = max(0.0, 1.0 - amount_usd / total) if total else 0.0
        for job_id, paid in payers.items():
            payers[job_id] = RunningCost(
                spent_usd=paid.spent_usd * left,
                on_demand_usd=paid.on_demand_usd,
                wasted_usd=paid.wasted_usd * left,
            )


LEAST_BUSY_S = 20.0
"""A type counts as measured once its workers have computed for this many seconds."""


def rates_by_type(work: Mapping[str, TypeWork]) -> dict[str, float]:
    """Return one worker's samples per second, for each type with enough measurements.

    >>> rates_by_type({"g5.xlarge": TypeWork(samples=600, busy_s=30.0)})
    {'g5.xlarge': 20.0}
    """
    return {
        type: one.samples / one.busy_s
        for type, one in work.items()
        if type and one.busy_s >= LEAST_BUSY_S and one.samples > 0
    }


def samples_by_type(work: Mapping[str, TypeWork], total: int) -> dict[str, float]:
    """Divide ``total`` samples among the types in proportion to the reported samples.

    The reports are incomplete: ranks send them at intervals, and a lost rank's last samples are
    never reported.
    """
    reported = sum(one.samples for one in work.values())
    return {type: total * one.samples / reported for type, one in work.items() if one.samples}


def usd_per_1k_samples(usd_per_h: float, samples_per_s: float) -> float:
    """Return the cost of a thousand samples on a worker with this price and throughput.

    >>> round(usd_per_1k_samples(0.36, 20.0), 6)
    0.005
    """
    return usd_per_h / 3.6 / samples_per_s
