"""Simulate jobs that are sized in different ways, alone or together on one pool.

The rules are those of the head: ``choose_size`` decides how many workers a job takes, ``allocate``
shares the workers among the jobs, and ``on_demand_workers`` decides per job how many of them run on
demand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from etrain_jupyter.plugins.ec2.deadline import DeadlineView, on_demand_workers
from etrain_jupyter.plugins.planner.simulation.fleet import VirtualFleet
from etrain_jupyter.plugins.planner.simulation.job import (
    Outcome,
    Progress,
    SimulatedJob,
    outcome_of,
)
from etrain_jupyter.plugins.planner.simulation.market import VirtualNode
from etrain_jupyter.plugins.planner.simulation.speeds import VirtualSpeeds
from etrain_jupyter.rules.sizing.allocation import Claim, allocate
from etrain_jupyter.rules.sizing.goodput import Size, choose_size

Sizing = Literal["fixed", "greedy", "goodput"]
"""Number of workers that a job takes:

==========  ========================================================================================
fixed       all of its workers, or it waits: ``workers: {min: N, max: N}``
greedy      all that the pool has: ``workers: {min: 1, max: N}``
goodput     as many as are worth their cost: ``workers: {min: 1, max: N, target: goodput}``
==========  ========================================================================================
"""
SIZINGS: tuple[Sizing, ...] = get_args(Sizing)


@dataclass(kw_only=True)
class SizedJob:
    """A job in a run."""

    job: SimulatedJob
    id: str
    sizing: Sizing
    speeds: VirtualSpeeds
    keep: float | None = None
    """``DeadlineTerms.keep``; None if the pool has no deadline."""
    measured: set[int] = field(default_factory=set)
    """Numbers of workers on which it has trained."""
    held: tuple[str, ...] = ()
    """Ids of its machines."""
    size: Size | None = None

    def __post_init__(self) -> None:
        self.progress = Progress(self.job)

    @property
    def is_done(self) -> bool:
        """True after its last step."""
        return self.progress.left <= 0

    @property
    def min_workers(self) -> int:
        """Number of workers without which it waits."""
        return self.job.workers if self.sizing == "fixed" else 1

    @property
    def wanted(self) -> int:
        """Number of workers that it takes if the pool has them."""
        if self.sizing != "goodput":
            return self.job.workers
        return self.size.workers if self.size is not None else self.min_workers

    @property
    def claim(self) -> Claim:
        """Its request for workers."""
        return Claim(
            job_id=self.id,
            min_workers=self.min_workers,
            max_workers=self.wanted,
            goodputs=self.size.goodputs if self.size is not None else (),
            held=self.held,
        )

    def review_size(self, now: float) -> None:
        """Choose again how many workers to use, if the job is sized by goodput."""
        if self.sizing != "goodput":
            return
        # As in ``Sharing``, the deadline counts only if it is that of the pool.
        needed = 0.0
        if self.keep is not None:
            needed = self.progress.left / max(self.job.deadline_s - now, 1.0)
        terms = self.speeds.terms(self.measured, min_workers=self.min_workers, needed_rate=needed)
        self.size = choose_size(terms, current=self.size.workers if self.size else 0)

    def on_demand(self, now: float, num_spot: int, num_on_demand: int) -> int:
        """Return the number of its workers to run on demand for the deadline."""
        if self.keep is None:
            return 0
        terms = self.job.terms_with(self.keep)
        view = DeadlineView(
            samples_left=self.progress.left,
            remaining_s=self.job.deadline_s - now,
            num_spot=num_spot,
            num_on_demand=num_on_demand,
        )
        return on_demand_workers(replace(terms, rates=self.job.rates[: self.wanted + 1]), view)

    def train(self, now: float, nodes: tuple[VirtualNode, ...]) -> None:
        """Train on these machines until the next decision."""
        self.held = tuple(node.id for node in nodes)
        if len(nodes) < self.min_workers:
            nodes = ()
        self.progress.advance(now, nodes)
        if nodes:
            self.measured.add(len(nodes))


def run_sized(
    fleet: VirtualFleet,
    jobs: Sequence[SimulatedJob],
    sizing: Sizing,
    *,
    speeds: Sequence[VirtualSpeeds],
    keep: float | None = None,
) -> Outcome:
    """Run jobs, submitted together, on one pool until the last one has finished.

    Args:
        fleet: The pool at the start.
        jobs: The jobs in order of submission.
        sizing: Way to size each job.
        speeds: Speeds that each job would measure.
        keep: ``DeadlineTerms.keep``; None if the pool has no deadline.
    """
    running = [
        SizedJob(job=job, id=f"job{number}", sizing=sizing, speeds=own, keep=keep)
        for number, (job, own) in enumerate(zip(jobs, speeds, strict=True))
    ]
    first, market, rules = jobs[0], fleet.market, fleet.rules
    for now in first.ticks():
        market.advance(now)
        active = [one for one in running if not one.is_done]
        if not active:
            break
        for one in active:
            one.review_size(now)
        wanted = min(rules.max_workers, sum(one.wanted for one in active))
        on_demand = _on_demand(fleet, active, now) if keep is not None else None
        if on_demand is not None:
            on_demand = min(max(on_demand, rules.on_demand_base), rules.most_on_demand, wanted)
        fleet.tick(now, wanted=wanted, on_demand=on_demand)
        nodes = {node.id: node for node in fleet.groups(now).training}
        usable = list(nodes)[:wanted]
        shares = allocate([one.claim for one in active], usable)
        for one in active:
            one.train(now, tuple(nodes[id] for id in shares[one.id]))
    return outcome_of(market, [one.progress for one in running])


def _on_demand(fleet: VirtualFleet, active: Sequence[SizedJob], now: float) -> int:
    # The machines are shared in the order in which ``allocate`` shares them, as in
    # ``DeadlineSchedule``.
    groups = fleet.groups(now)
    spot, owned, total = groups.num_spot, groups.num_on_demand, 0
    for one in active:
        has_spot = min(spot, one.wanted)
        has_owned = min(owned, one.wanted - has_spot)
        total += one.on_demand(now, has_spot, has_owned)
        spot, owned = spot - has_spot, owned - has_owned
    return total
