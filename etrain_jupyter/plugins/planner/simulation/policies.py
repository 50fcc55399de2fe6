"""Simulate a job under several capacity policies against a recorded spot market.

The elastic policies run the pool's own rules: ``fleet.decide`` launches and releases machines, its
ledger computes their cost, and ``plugins.ec2.deadline`` decides how many run on demand. A run
starts at a random time of the trace; all policies run from the same times.

Simplified: one worker per machine, one machine type, decisions every 30 s instead of every 5 s, and
a throughput that depends only on the number of workers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from etrain_jupyter.errors import ConfigError
from etrain_jupyter.plugins.ec2.deadline import DeadlineView, least_workers, on_demand_workers
from etrain_jupyter.plugins.ec2.head.view import Rules
from etrain_jupyter.plugins.planner.simulation.fleet import VirtualFleet
from etrain_jupyter.plugins.planner.simulation.gang import run_gang
from etrain_jupyter.plugins.planner.simulation.job import Outcome, Progress, SimulatedJob
from etrain_jupyter.plugins.planner.simulation.market import VirtualMarket
from etrain_jupyter.plugins.planner.simulation.sizing import SIZINGS, Sizing, run_sized
from etrain_jupyter.plugins.planner.simulation.speeds import VirtualSpeeds
from etrain_jupyter.plugins.planner.simulation.trace import SpotTrace

KEEPS = {"lazy": 0.0, "uniform": 1.0}
"""Policies that are ``deadline`` with a fixed ``keep``."""
POLICIES = ("on-demand", "spot", "fallback", "greedy-gang", "uniform-gang", "lazy", "deadline",
            "uniform")  # fmt: skip
"""Names of the policies, in the order of the tables."""
MAX_LARGER = 10
"""For an infeasible deadline, suggest at most this many times the number of workers."""


@dataclass(frozen=True, kw_only=True)
class PolicyResult:
    """Outcomes of one policy, one for each start."""

    policy: str
    outcomes: tuple[Outcome, ...]
    sizing: Sizing | None = None
    """Way to size the jobs; None for one job on all workers."""

    @property
    def label(self) -> str:
        """Policy and sizing."""
        return f"{self.policy} {self.sizing}" if self.sizing else self.policy

    def mean(self, value: Callable[[Outcome], float]) -> float:
        """Return the mean of a value over the runs."""
        return sum(map(value, self.outcomes)) / len(self.outcomes)

    def percentile(self, value: Callable[[Outcome], float], share: float) -> float:
        """Return a percentile by the nearest rank; infinite if that run never finished."""
        ordered = sorted(map(value, self.outcomes))
        return ordered[min(len(ordered) - 1, max(0, round(share * len(ordered) + 0.4999) - 1))]

    @cached_property
    def late_share(self) -> float:
        """Share of the runs that missed the deadline."""
        return self.mean(lambda one: one.is_late)

    @cached_property
    def mean_usd(self) -> float:
        """Mean cost in US dollars, including those of runs that did not finish."""
        return self.mean(lambda one: one.cost_usd)


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """Results of all policies on one trace."""

    trace: SpotTrace
    job: SimulatedJob
    """The job; with several jobs, the first of them."""
    results: tuple[PolicyResult, ...]
    others: tuple[SimulatedJob, ...] = ()
    """Further jobs on the same pool."""

    @property
    def jobs(self) -> tuple[SimulatedJob, ...]:
        """All jobs, in order of submission."""
        return self.job, *self.others

    @property
    def is_sized(self) -> bool:
        """True if ways to size the jobs were compared."""
        return any(one.sizing for one in self.results)

    @property
    def on_demand_usd(self) -> float:
        """Cost of all jobs on demand, undisturbed: the reference of all cost shares."""
        return sum(one.workers * one.duration_s / 3600 * one.on_demand_usd for one in self.jobs)

    def __getitem__(self, label: str) -> PolicyResult:
        """Return a result by its policy and sizing."""
        return next(one for one in self.results if one.label == label)

    @property
    def best(self) -> PolicyResult:
        """The cheapest policy among those with the fewest deadline misses."""
        return min(self.results, key=lambda one: (one.late_share, one.mean_usd))


def simulate(
    trace: SpotTrace,
    job: SimulatedJob,
    *,
    policies: Iterable[str] = POLICIES,
    num_starts: int = 50,
    seed: int = 0,
    rules: Rules | None = None,
) -> Simulation:
    """Run a job under each policy from the same random times of a trace.

    Args:
        trace: Recorded spot market.
        job: The job, its deadline and prices.
        policies: Names of policies.
        num_starts: Number of runs per policy.
        seed: Random seed of the start times, boot times and interrupted machines.
        rules: Rules of the pool; by default those of a pool without budget.

    Raises:
        ConfigError: If the deadline cannot be met; the message says by how much, and what could.
    """
    policies = tuple(policies)
    check_deadline(job)
    base = replace(rules or Rules(cluster_id="simulated", max_workers=job.workers),
                   max_workers=job.workers)  # fmt: skip
    windows = _windows(trace, job.horizon_s, num_starts, seed)
    return Simulation(
        trace=trace,
        job=job,
        results=tuple(
            PolicyResult(
                policy=policy,
                outcomes=tuple(
                    run_policy(window, job, policy, base, seed=f"{seed} {number}")
                    for number, window in enumerate(windows)
                ),
            )
            for policy in policies
        ),
    )


def simulate_sizes(
    trace: SpotTrace,
    jobs: Sequence[SimulatedJob],
    *,
    policies: Iterable[str] = ("spot",),
    sizings: Iterable[Sizing] = SIZINGS,
    num_starts: int = 50,
    seed: int = 0,
    rules: Rules | None = None,
) -> Simulation:
    """Run jobs together on one pool, with each way to size them, from the same random times.

    Args:
        trace: Recorded spot market.
        jobs: The jobs, in order of submission; with the same prices, boot times and tick. Give them
            ``ring_rates``: the rule that sizes them predicts such rates.
        policies: Names of policies, none of which is a gang.
        sizings: Ways to size the jobs.
        num_starts: Number of runs per policy and sizing.
        seed: As in ``simulate``.
        rules: Rules of the pool, with at most as many workers as the largest job; by default those
            of a pool without budget.

    Raises:
        ConfigError: If a policy is a gang, or has a deadline that cannot be met.
    """
    policies, sizings = tuple(policies), tuple(sizings)
    for policy in policies:
        if policy.endswith("-gang"):
            raise ConfigError(
                f"--policy {policy}: a gang always has all of its workers, so its size cannot be "
                "chosen. Nothing was simulated",
                hint="--policy spot, fallback or deadline",
            )
    most = max(one.workers for one in jobs)
    base = replace(rules or Rules(cluster_id="simulated", max_workers=most), max_workers=most)
    if any(_rules_of(policy, base).policy == "deadline" for policy in policies):
        for job in jobs:
            check_deadline(job)
    horizon_s = max(one.horizon_s for one in jobs)
    windows = _windows(trace, horizon_s, num_starts, seed)
    speeds = [VirtualSpeeds(job) for job in jobs]

    def run(policy: str, sizing: Sizing, window: SpotTrace, number: int) -> Outcome:
        fleet = _fleet_of(policy, jobs[0], base, window, seed=f"{seed} {number}")
        keep = _keep_of(policy, jobs[0], fleet.rules)
        return run_sized(fleet, jobs, sizing, speeds=speeds, keep=keep)

    return Simulation(
        trace=trace,
        job=jobs[0],
        others=tuple(jobs[1:]),
        results=tuple(
            PolicyResult(
                policy=policy,
                sizing=sizing,
                outcomes=tuple(
                    run(policy, sizing, window, number) for number, window in enumerate(windows)
                ),
            )
            for policy in policies
            for sizing in sizings
        ),
    )


def _windows(trace: SpotTrace, horizon_s: float, num_starts: int, seed: int) -> list[SpotTrace]:
    starts = [random.Random(f"{seed} {n}").uniform(0, trace.length_s) for n in range(num_starts)]
    return [trace.from_time(start, horizon_s) for start in starts]


def check_deadline(job: SimulatedJob) -> None:
    """Check that all workers can finish in time.

    Raises:
        ConfigError: If they cannot; the hint names a deadline and a number of workers that would.
    """
    terms = job.terms
    if terms.slack_s > 0:
        return
    more = least_workers(terms, job.rates_up_to(MAX_LARGER * job.workers))
    needed_h = terms.least_time_s / 3600
    larger = f", or --workers {more} or more" if more else "; no number of workers would be enough"
    raise ConfigError(
        f"A deadline of {job.deadline_s / 3600:.3g} h cannot be met safely: the job takes "
        f"{job.duration_s / 3600:.3g} h on {job.workers} workers, {terms.derate:.0%} longer while "
        f"lost machines are replaced, and {terms.margin_s / 60:.3g} min are reserved for a boot. "
        f"These are {needed_h:.2f} h, {-terms.slack_s / 3600:.2f} h too many. Nothing was "
        "simulated.",
        hint=f"write --deadline {needed_h + 0.05:.1f}h or more{larger}",
    )


def run_policy(
    window: SpotTrace,
    job: SimulatedJob,
    policy: str,
    rules: Rules,
    *,
    seed: str,
    skips: bool = True,
) -> Outcome:
    """Run a job once, from the start of ``window``.

    Args:
        window: The market from the start of the job on.
        job: The job.
        policy: Name of the policy.
        rules: Rules of the pool.
        seed: Random seed of this run.
        skips: See ``VirtualFleet``.
    """
    if policy.endswith("-gang"):
        market = _market_of(job, window, seed)
        return run_gang(market, job, is_uniform=policy == "uniform-gang")
    fleet = _fleet_of(policy, job, rules, window, seed=seed, skips=skips)
    return _run_elastic(fleet, job, _keep_of(policy, job, fleet.rules))


def _market_of(job: SimulatedJob, window: SpotTrace, seed: str) -> VirtualMarket:
    return VirtualMarket(window, rng=random.Random(seed), boot_s=job.boot_s, shortage=job.shortage)


def _fleet_of(
    policy: str,
    job: SimulatedJob,
    rules: Rules,
    window: SpotTrace,
    *,
    seed: str,
    skips: bool = True,
) -> VirtualFleet:
    return VirtualFleet(
        rules=_rules_of(policy, rules),
        market=_market_of(job, window, seed),
        prices=job.prices(window),
        skips=skips,
    )


def _keep_of(policy: str, job: SimulatedJob, rules: Rules) -> float | None:
    return KEEPS.get(policy, job.keep) if rules.policy == "deadline" else None


def _rules_of(policy: str, rules: Rules) -> Rules:
    most = rules.max_workers
    if policy == "on-demand":
        return replace(rules, policy="spot", on_demand_base=most, most_on_demand=most)
    if policy == "spot":
        return replace(rules, policy="spot", on_demand_base=0, most_on_demand=0)
    if policy == "fallback":
        return replace(rules, policy="spot", most_on_demand=most)
    # The pool may limit on-demand machines below the number of workers.
    own = rules.most_on_demand if rules.policy == "deadline" else most
    return replace(rules, policy="deadline", most_on_demand=own)


def _run_elastic(fleet: VirtualFleet, job: SimulatedJob, keep: float | None) -> Outcome:
    market, progress = fleet.market, Progress(job)
    terms = job.terms_with(keep) if keep is not None else None
    for now in job.ticks():
        market.advance(now)
        on_demand = None
        if terms is not None:
            groups = fleet.groups(now)
            view = DeadlineView(
                samples_left=progress.left,
                remaining_s=job.deadline_s - now,
                num_spot=groups.num_spot,
                num_on_demand=groups.num_on_demand,
            )
            needed = max(on_demand_workers(terms, view), fleet.rules.on_demand_base)
            on_demand = min(needed, fleet.rules.most_on_demand)
        fleet.tick(now, wanted=job.workers, on_demand=on_demand)
        # Spot workers first: an on-demand worker beyond the maximum is about to be released.
        training = fleet.groups(now).training[: job.workers]
        if progress.advance(now, training):
            break
    return progress.outcome(market)


def describe_sizings(names: Sequence[Sizing]) -> dict[str, str]:
    """Return one line about each way to size a job."""
    known: dict[Sizing, str] = {
        "fixed": "workers: {min: N, max: N}: all workers, or it waits",
        "greedy": "workers: {min: 1, max: N}: all workers that the pool has",
        "goodput": "workers: {min: 1, max: N, target: goodput}: as many as are worth their cost",
    }
    return {name: known[name] for name in names}


def describe_policies(names: Sequence[str], keep: float) -> dict[str, str]:
    """Return one line about each policy."""
    known = {
        "on-demand": "all workers on demand",
        "spot": "all workers on spot machines, whatever the deadline",
        "fallback": "spot; workers missing for 120 s run on demand (capacity.on_demand)",
        "greedy-gang": "all workers on spot or none, on demand when the deadline requires it",
        "uniform-gang": "the same with uniform progress (Can't Be Late, NSDI 2024)",
        "lazy": "capacity.policy: deadline with keep: 0",
        "deadline": f"capacity.policy: deadline with keep: {keep:g}",
        "uniform": "capacity.policy: deadline with keep: 1",
    }
    return {name: known[name] for name in names}
