"""A simulated job: its work, its deadline and prices, and the outcome of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from etrain_jupyter.plugins.ec2.deadline import DeadlineTerms, derate_of
from etrain_jupyter.plugins.ec2.ledger import PriceBook
from etrain_jupyter.plugins.planner.simulation.market import TYPE, VirtualMarket, VirtualNode
from etrain_jupyter.plugins.planner.simulation.trace import SpotTrace
from etrain_jupyter.rules.sizing.goodput import Rates, rates_of_efficiency

TICK_S = 30.0
"""Interval between two decisions, unless the job has another one, in seconds."""
HORIZON = 4.0
"""A run ends without a result after this many times the deadline."""


@dataclass(frozen=True, kw_only=True)
class SimulatedJob:
    """The job, and the assumptions about machines."""

    workers: int
    """Maximum number of workers, one per machine."""
    duration_s: float
    """Time of the whole job on all workers without interruptions, in seconds."""
    deadline_s: float
    """Time from submission to the deadline, in seconds."""
    on_demand_usd: float
    """US dollars an hour for a machine on demand."""
    spot_usd: float
    """US dollars an hour for a spot machine; a price in the trace takes precedence."""
    keep: float = 0.5
    """See ``DeadlineTerms.keep``."""
    efficiency: float = 1.0
    """Scaling efficiency of all workers; see ``rates_of_efficiency``."""
    boot_s: tuple[float, float] = (120.0, 300.0)
    """Shortest and longest boot time, in seconds."""
    stall_s: float = 1.0
    """Time without training when the number of workers changes, in seconds."""
    gang_restart_s: float = 300.0
    """The same for a gang: restart, reload, and repeat lost steps."""
    tick_s: float = TICK_S
    """Interval between two decisions, in seconds."""
    shortage: float = 0.0
    """Probability that a request for on-demand machines is refused."""
    own_rates: Rates = ()
    """Throughput by number of workers, relative to one worker; by default from ``efficiency``."""

    @cached_property
    def rates(self) -> Rates:
        """Throughput by number of workers, relative to one worker."""
        return self.own_rates or self.rates_up_to(self.workers)

    def rates_up_to(self, num_workers: int) -> Rates:
        """Return rates up to a larger number of workers."""
        return rates_of_efficiency(self.workers, self.efficiency, up_to=num_workers)

    @property
    def work(self) -> float:
        """Work of the job, in seconds of one worker."""
        return self.rates[-1] * self.duration_s

    @property
    def horizon_s(self) -> float:
        """When a run is given up, in seconds."""
        return HORIZON * self.deadline_s

    @cached_property
    def terms(self) -> DeadlineTerms:
        """Terms of the deadline policy."""
        return DeadlineTerms(
            rates=self.rates,
            samples=self.work,
            time_s=self.deadline_s,
            boot_s=self.boot_s[1],
            period_s=self.tick_s,
            derate=derate_of(boot_s=sum(self.boot_s) / 2, stall_s=self.stall_s),
            keep=self.keep,
        )

    def prices(self, trace: SpotTrace) -> PriceBook:
        """Return the prices over time in each zone of a trace."""
        spot = {
            (TYPE, zone): trace.prices.get(zone) or ((0.0, self.spot_usd),) for zone in trace.zones
        }
        return PriceBook(spot=spot, on_demand={TYPE: self.on_demand_usd})

    def ticks(self) -> Iterator[float]:
        """Yield the times of decisions."""
        for number in range(int(self.horizon_s / self.tick_s)):
            yield number * self.tick_s


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One run."""

    finish_s: float
    """Infinite if the run was given up."""
    is_late: bool
    cost_usd: float
    waived_usd: float
    """Not charged, because EC2 reclaimed the machines in their first hour."""
    spot_hours: float
    on_demand_hours: float
    goodput: float
    """Work of all jobs per second until the end, relative to all workers without interruptions."""
    mean_workers: float
    num_changes: int
    """Number of times that the set of workers changed."""
    job_finishes_s: tuple[float, ...] = ()
    """Finish time of each job; ``finish_s`` is the latest one."""


class Progress:
    """Progress of a run.

    Attributes:
        job: The job.
        left: Work that is left, in seconds of one worker.
        now: Time of the newest work, in seconds.
        worker_s: Total time of all workers, in seconds.
        num_changes: Number of times that the set of workers changed.
        finish_s: Time of the end; infinite before it.
    """

    def __init__(self, job: SimulatedJob) -> None:
        self.job = job
        self.left = job.work
        self.now = 0.0
        self.worker_s = 0.0
        self.num_changes = 0
        self.finish_s = float("inf")
        self._training: tuple[VirtualNode, ...] = ()

    def advance(
        self, now: float, training: tuple[VirtualNode, ...], *, stall_s: float | None = None
    ) -> bool:
        """Train from ``now`` to the next tick; return True at the end of the job.

        ``training`` are the machines that train, in a fixed order. ``stall_s`` is the time without
        training in this tick; by default, one stall if the machines have changed.
        """
        job = self.job
        has_changed = bool(self._training) and training != self._training
        self.num_changes += has_changed
        self._training = training
        if stall_s is None:
            stall_s = job.stall_s if has_changed else 0.0
        tick_s = job.tick_s
        stall_s = min(stall_s, tick_s)
        rate = job.rates[len(training)]
        done = rate * (tick_s - stall_s)
        is_done = rate > 0 and done >= self.left
        spent_s = stall_s + self.left / rate if is_done else tick_s
        self.left = 0.0 if is_done else self.left - done
        self.worker_s += len(training) * spent_s
        self.now = now + spent_s
        if is_done:
            self.finish_s = self.now
        return is_done

    @property
    def goodput_s(self) -> float:
        """Work done, in seconds of all workers without interruptions."""
        return (self.job.work - self.left) / self.job.rates[-1]

    @property
    def is_late(self) -> bool:
        """True if the job did not meet its deadline."""
        # A second of tolerance for rounding.
        return self.finish_s > self.job.deadline_s + 1.0


def outcome_of(market: VirtualMarket, jobs: Sequence[Progress]) -> Outcome:
    """Return the result of jobs on one pool, with all machines' costs until the last job ends."""
    until = max(one.now for one in jobs)
    charges = market.charges(jobs[0].job.prices(market.trace), until)
    spot, on_demand = charges["spot"], charges["on-demand"]
    return Outcome(
        finish_s=max(one.finish_s for one in jobs),
        is_late=any(one.is_late for one in jobs),
        cost_usd=spot.spent + on_demand.spent,
        waived_usd=spot.waived + on_demand.waived,
        spot_hours=spot.hours,
        on_demand_hours=on_demand.hours,
        goodput=sum(one.goodput_s for one in jobs) / until if until else 0.0,
        mean_workers=sum(one.worker_s for one in jobs) / until if until else 0.0,
        num_changes=sum(one.num_changes for one in jobs),
        job_finishes_s=tuple(one.finish_s for one in jobs),
    )


def usual_deadline_s(duration_s: float) -> float:
    """Return a deadline that leaves a fifth of the time as slack."""
    return duration_s / 0.8
