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
from itertools import islice

from etrain_jupyter.errors import ConfigError
from etrain_jupyter.plugins.ec2.deadline import DeadlineView, least_workers, on_demand_workers
from etrain_jupyter.plugins.ec2.head.view import Rules
from etrain_jupyter.plugins.planner.simulation.fleet import VirtualFleet
from etrain_jupyter.plugins.planner.simulation.job import (
    Outcome,
    Progress,
    SimulatedJob,
    outcome_of,
)
from etrain_jupyter.plugins.planner.simulation.market import VirtualMarket, VirtualNode
from etrain_jupyter.plugins.planner.simulation.sizing import (
    SIZINGS,
    Sizing,
    VirtualSpeeds,
    run_sized,
)
from etrain_jupyter.plugins.planner.simulation.trace import SpotTrace

KEEPS = {"lazy": 0.0, "uniform": 1.0}
"""Variants of ``deadline`` with a fixed ``keep``."""
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
        """Mean cost in US dollars, including runs that did not finish."""
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
        """On-demand cost of all jobs without interruptions; all cost shares are relative to it."""
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
        ConfigError: If the deadline cannot be met; the message states by how much, and a remedy.
    """
    check_deadline(job)
    base = _base_rules(rules, job.workers)
    windows = _windows(trace, job.horizon_s, num_starts, seed)
    results = [
        PolicyResult(
            policy=policy,
            outcomes=tuple(run_policy(one, job, policy, base, seed=at) for at, one in windows),
        )
        for policy in policies
    ]
    return Simulation(trace=trace, job=job, results=tuple(results))


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
    """Run jobs together on one pool, with each way of sizing them, from the same random times.

    Args:
        trace: Recorded spot market.
        jobs: The jobs, in order of submission, with the same prices, boot times and tick. Give them
            ``ring_rates``, because the rule that sizes jobs predicts such rates.
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
    base = _base_rules(rules, max(one.workers for one in jobs))
    if any(_rules_of(policy, base).policy == "deadline" for policy in policies):
        for job in jobs:
            check_deadline(job)
    horizon_s = max(one.horizon_s for one in jobs)
    windows = _windows(trace, horizon_s, num_starts, seed)
    speeds = [VirtualSpeeds(job) for job in jobs]

    def run(policy: str, sizing: Sizing, window: SpotTrace, seed: str) -> Outcome:
        fleet = _fleet_of(policy, jobs[0], base, window, seed=seed)
        keep = _keep_of(policy, jobs[0], fleet.rules)
        return run_sized(fleet, jobs, sizing, speeds=speeds, keep=keep)

    results = [
        PolicyResult(
            policy=policy,
            sizing=sizing,
            outcomes=tuple(run(policy, sizing, one, at) for at, one in windows),
        )
        for policy in policies
        for sizing in sizings
    ]
    return Simulation(trace=trace, job=jobs[0], others=tuple(jobs[1:]), results=tuple(results))


def _base_rules(rules: Rules | None, workers: int) -> Rules:
    rules = rules or Rules(cluster_id="simulated", max_workers=workers)
    return replace(rules, max_workers=workers)


def _windows(
    trace: SpotTrace, horizon_s: float, num_starts: int, seed: int
) -> list[tuple[str, SpotTrace]]:
    """Return the market from each start on, with the seed of its runs."""
    seeds = [f"{seed} {number}" for number in range(num_starts)]
    starts = [random.Random(one).uniform(0, trace.length_s) for one in seeds]
    return [(one, trace.from_time(at, horizon_s)) for one, at in zip(seeds, starts, strict=True)]


def check_deadline(job: SimulatedJob) -> None:
    """Check that all workers can finish in time.

    Raises:
        ConfigError: If they cannot; the hint names a feasible deadline and number of workers.
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
    """Run a job once, from the start of ``window``; for ``skips`` see ``VirtualFleet``."""
    if policy.endswith("-gang"):
        market = _market_of(job, window, seed)
        return _run_gang(market, job, is_uniform=policy == "uniform-gang")
    fleet = _fleet_of(policy, job, rules, window, seed=seed, skips=skips)
    return _run_elastic(fleet, job, _keep_of(policy, job, fleet.rules))


# --- gangs ---
#
# Policies for jobs that need all workers at once, for comparison. These are the policies of Wu et
# al., "Can't Be Late" (NSDI 2024). They do not run the pool's rules, and the simulation is generous
# to them: a gang knows the capacity before it launches, so it never pays for a part of its
# machines. It replaces a machine at its notice, and trains until the machine is gone.


def _run_gang(market: VirtualMarket, job: SimulatedJob, *, is_uniform: bool) -> Outcome:
    """Run a job on all of its workers or none.

    With ``is_uniform``, follow a line from start to deadline, on demand when behind it. Otherwise,
    stay on spot machines until the deadline requires on-demand machines to the end.
    """
    progress = Progress(job)
    boot_s = job.boot_s[1]
    margin_s = boot_s + 3 * job.tick_s + job.gang_restart_s
    per_s = job.work / max(job.tick_s, job.deadline_s - margin_s)
    waiting_s = job.gang_restart_s
    members: tuple[VirtualNode, ...] = ()
    is_forced = False
    for now in job.ticks():
        market.advance(now)
        usable_s = job.deadline_s - now - margin_s
        is_forced |= progress.left >= job.rates[-1] * usable_s
        spot, owned = _of(market, "spot"), _of(market, "on-demand")
        is_on_demand = is_forced
        if is_uniform and not is_forced:
            done = job.work - progress.left
            is_behind = done < per_s * now and len(spot) < job.workers
            is_on_demand = is_behind or (bool(owned) and done < per_s * (now + 2 * boot_s))
        _fill(market, job.workers, now, is_on_demand=is_on_demand)
        ready = (node for node in market.nodes.values() if node.ready_at <= now)
        running = tuple(islice(ready, job.workers))  # the oldest, so that spare machines wait
        is_whole = len(running) == job.workers
        # A gang that is new, or has a replaced machine, restarts from its last checkpoint.
        if not is_whole or running != members:
            waiting_s = job.gang_restart_s
        members = running
        stall_s = min(waiting_s, job.tick_s)
        waiting_s -= stall_s if is_whole else 0.0
        if progress.advance(now, running if is_whole else (), stall_s=stall_s):
            break
    return outcome_of(market, [progress])


def _of(market: VirtualMarket, lifecycle: str) -> list[VirtualNode]:
    return [node for node in market.nodes.values() if node.lifecycle == lifecycle]


def _fill(market: VirtualMarket, workers: int, now: float, *, is_on_demand: bool) -> None:
    """Hold all machines of one lifecycle, or none."""
    spot, owned = _of(market, "spot"), _of(market, "on-demand")
    for node in spot if is_on_demand else owned:
        market.end(node.id, now)
    zones = market.trace.zones
    if is_on_demand:
        if len(owned) < workers:
            market.launch("on-demand", zones, workers - len(owned), now)
        return
    staying = [node for node in spot if now < node.notice_at]
    if market.capacity(now) - (len(spot) - len(staying)) >= workers:
        if len(staying) < workers:
            market.launch("spot", zones, workers - len(staying), now)
    elif len(spot) < workers:
        for node in spot:
            market.end(node.id, now)


# --- elastic policies ---


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
    terms = replace(job.terms, keep=keep) if keep is not None else None
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
    return outcome_of(market, [progress])
