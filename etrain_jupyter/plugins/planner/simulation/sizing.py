"""Simulate jobs that are sized in different ways, alone or together on one pool.

The rules are those of the head: ``choose_size`` decides how many workers a job takes, from speeds
that are folded as the head folds them from a job's log. ``allocate`` shares the workers among the
jobs, and ``on_demand_workers`` decides per job how many of them run on demand.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np

from etrain_jupyter.log import events as t
from etrain_jupyter.plugins.ec2.deadline import DeadlineView, on_demand_workers
from etrain_jupyter.plugins.planner.simulation.fleet import VirtualFleet
from etrain_jupyter.plugins.planner.simulation.job import (
    Outcome,
    Progress,
    SimulatedJob,
    outcome_of,
)
from etrain_jupyter.plugins.planner.simulation.market import VirtualNode
from etrain_jupyter.rules.sizing.allocation import Claim, allocate
from etrain_jupyter.rules.sizing.goodput import GoodputTerms, Rates, Size, choose_size
from etrain_jupyter.rules.sizing.speed_evidence import (
    LEAST_S,
    LEAST_STEPS,
    WARM_UP_STEPS,
    SizingView,
    SpeedEvidence,
)
from etrain_jupyter.rules.sizing.step_time import Placement, StepTimeModel, exchange_of

Sizing = Literal["fixed", "greedy", "goodput"]
"""Number of workers that a job takes:

==========  ========================================================================================
fixed       all of its workers, or it waits: ``workers: {min: N, max: N}``
greedy      all that the pool has: ``workers: {min: 1, max: N}``
goodput     as many as are worth their cost: ``workers: {min: 1, max: N, target: goodput}``
==========  ========================================================================================
"""
SIZINGS: tuple[Sizing, ...] = get_args(Sizing)


STEP_S = 1.0
"""Duration of a step of one worker, in seconds."""
BATCH = 1024
"""Samples per step; the job's batch does not depend on the number of workers."""
NUM_PARAMETERS = 10_000_000
PLACEMENT = Placement(workers_per_machine=1)
"""One worker per machine, as in a pool on EC2."""


def ring_rates(workers: int, efficiency: float) -> Rates:
    """Return the throughput by number of workers of a job that exchanges gradients in a ring.

    ``rates_of_efficiency`` charges a cost per worker. Here, the backward pass hides a part of the
    exchange, as in a real job, so a few workers scale almost linearly, and many scale worse.

    Args:
        workers: Number of workers at which the efficiency is known.
        efficiency: Throughput divided by ``workers`` times that of one worker.

    >>> [round(rate, 2) for rate in ring_rates(8, 0.6)]
    [0.0, 1.0, 1.93, 2.8, 3.61, 4.04, 4.34, 4.59, 4.8]
    """
    low, high = -40.0, 40.0  # logarithms of the seconds per byte
    for _ in range(60):
        middle = (low + high) / 2
        is_slow = _true_step_s(workers, middle) > STEP_S / (workers * efficiency)
        low, high = (low, middle) if is_slow else (middle, high)
    return (0.0, *(STEP_S / _true_step_s(one, low) for one in range(1, workers + 1)))


def _true_step_s(workers: int, log_s_per_byte: float) -> float:
    exchange = exchange_of(num_parameters=NUM_PARAMETERS, compression="none", passes=1)
    values = np.array([-40.0, math.log(STEP_S / BATCH), -40.0, log_s_per_byte, 0.0])
    model = StepTimeModel(
        placement=PLACEMENT, exchange=exchange, values=values, covariance=np.zeros((5, 5))
    )
    return model.predict(workers, BATCH / workers).step_s


class VirtualSpeeds:
    """Speed of a job for each number of workers that it has trained on.

    The job's rates determine the time of a step; the part that exceeds linear scaling is
    communication. ``SpeedEvidence`` folds the steps, so predictions for other numbers of workers
    are the same as in the head.
    """

    def __init__(self, job: SimulatedJob) -> None:
        self._job = job
        # The evidence depends only on these numbers, because simulated steps do not vary.
        self._known: dict[frozenset[int], GoodputTerms] = {}

    def terms(
        self, measured: Iterable[int], *, min_workers: int, needed_rate: float = 0.0
    ) -> GoodputTerms:
        """Return the inputs of the decision about the job's size.

        ``measured`` are the numbers of workers on which the job has trained. ``needed_rate`` is the
        work per second that the deadline requires; 0 without a deadline.
        """
        key = frozenset(measured)
        if key not in self._known:
            self._known[key] = self._fold(key)
        return replace(
            self._known[key], min_workers=min_workers, needed_rate=needed_rate * BATCH / STEP_S
        )

    def _fold(self, measured: frozenset[int]) -> GoodputTerms:
        evidence = SpeedEvidence()
        for event in self._events(sorted(measured)):
            evidence.fold(event)
        view = SizingView(min_workers=1, max_workers=self._job.workers, placement=PLACEMENT)
        return evidence.terms(view)

    def _events(self, measured: Iterable[int]) -> Iterator[t.Event]:
        common: dict[str, Any] = {"job_id": "simulated", "time": 0.0}
        total = math.ceil(self._job.work / STEP_S)
        yield t.JobPlanned(
            **common, num_train_samples=total * BATCH, num_eval_samples=0, steps_per_epoch=total,
            global_batch_size=BATCH, total_steps=total, num_parameters=NUM_PARAMETERS,
            total_samples=total * BATCH, num_trained_parameters=NUM_PARAMETERS,
        )  # fmt: skip
        step = 0
        for workers in measured:
            yield t.GenerationFormed(
                **common, generation=workers, why="simulated", world_size=workers, step=step,
                ranks=[f"w{number}" for number in range(workers)], backend="gloo",
            )  # fmt: skip
            duration_s = STEP_S / self._job.rates[workers]
            enough = max(LEAST_STEPS, math.ceil(LEAST_S / duration_s))
            for _ in range(WARM_UP_STEPS + enough):
                step += 1
                yield t.StepCompleted(
                    **common, generation=workers, step=step, epoch=0, first=step * BATCH,
                    samples=BATCH, sample_checksum=0, loss=0.0, lr=0.0, world_size=workers,
                    samples_per_s=BATCH / duration_s,
                    communication_s=max(0.0, duration_s - STEP_S / workers), data_s=0.0,
                    compute_s=STEP_S / workers, optimizer_s=0.0, ranks_agree=True, skipped=False,
                )  # fmt: skip


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
        """Minimum number of workers; with fewer, the job waits."""
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
        """Reconsider how many workers to use, if the job is sized by goodput."""
        if self.sizing != "goodput":
            return
        # As in ``Sharing``, the deadline counts only if the pool has a deadline policy.
        needed = 0.0
        if self.keep is not None:
            needed = self.progress.left / max(self.job.deadline_s - now, 1.0)
        terms = self.speeds.terms(self.measured, min_workers=self.min_workers, needed_rate=needed)
        self.size = choose_size(terms, current=self.size.workers if self.size else 0)

    def on_demand(self, now: float, num_spot: int, num_on_demand: int) -> int:
        """Return the number of its workers to run on demand for the deadline."""
        if self.keep is None:
            return 0
        view = DeadlineView(
            samples_left=self.progress.left,
            remaining_s=self.job.deadline_s - now,
            num_spot=num_spot,
            num_on_demand=num_on_demand,
        )
        rates = self.job.rates[: self.wanted + 1]
        return on_demand_workers(replace(self.job.terms, keep=self.keep, rates=rates), view)

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

    ``speeds`` are what each job would measure, and ``keep`` is ``DeadlineTerms.keep``; None
    if the pool has no deadline.
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
