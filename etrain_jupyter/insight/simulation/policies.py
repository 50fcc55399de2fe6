"""Simulate a job under several capacity policies against a recorded spot market.

The elastic policies run the pool's own rules: ``fleet.decide`` launches and releases machines, its
ledger computes their cost, and ``rules.policy.deadline`` decides how many run on demand. A run
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
from etrain_jupyter.insight.simulation.fleet import VirtualFleet
from etrain_jupyter.insight.simulation.gang import run_gang
from etrain_jupyter.insight.simulation.job import Outcome, Progress, SimulatedJob
from etrain_jupyter.insight.simulation.market import VirtualMarket
from etrain_jupyter.insight.simulation.trace import SpotTrace
from etrain_jupyter.pools.ec2.head.view import Rules
from etrain_jupyter.rules.policy.deadline import DeadlineView, least_workers, on_demand_workers

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
    results: tuple[PolicyResult, ...]

    @property
    def on_demand_usd(self) -> float:
        """Cost of the job on demand, undisturbed: the reference of all cost shares."""
        return self.job.workers * self.job.duration_s / 3600 * self.job.on_demand_usd

    def __getitem__(self, policy: str) -> PolicyResult:
        """Return the result of a policy."""
        return next(one for one in self.results if one.policy == policy)

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
    starts = [random.Random(f"{seed} {n}").uniform(0, trace.length_s) for n in range(num_starts)]
    windows = [trace.from_time(start, job.horizon_s) for start in starts]
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
    market = VirtualMarket(
        window, rng=random.Random(seed), boot_s=job.boot_s, shortage=job.shortage
    )
    if policy.endswith("-gang"):
        return run_gang(market, job, is_uniform=policy == "uniform-gang")
    own = _rules_of(policy, rules)
    fleet = VirtualFleet(rules=own, market=market, prices=job.prices(window), skips=skips)
    return _run_elastic(
        fleet, job, KEEPS.get(policy, job.keep) if own.policy == "deadline" else None
    )


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
