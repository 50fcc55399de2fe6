"""Simulate options of a plan on a recorded spot market."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from etrain_jupyter.display.numbers import dollars, duration
from etrain_jupyter.plugins.ec2.head.view import Rules
from etrain_jupyter.plugins.planner.planning.offers import BOOT_S, Market
from etrain_jupyter.plugins.planner.planning.options import STALL_S, Option
from etrain_jupyter.plugins.planner.simulation.job import SimulatedJob, usual_deadline_s
from etrain_jupyter.plugins.planner.simulation.policies import PolicyResult, simulate
from etrain_jupyter.plugins.planner.simulation.trace import SpotTrace

POLICIES = ("spot", "deadline")
NUM_STARTS = 20
MAX_OPTIONS = 6
"""Maximum number of options to simulate; each takes about a second."""


@dataclass(frozen=True, kw_only=True)
class TracedOption:
    """Results of a policy for one number of machines, over several starts in the trace."""

    option: Option
    """The spot option without the trace."""
    policy: str
    mean_usd: float
    median_hours: float
    """Infinite if half of the runs did not finish."""
    p95_hours: float
    late_share: float
    """Share of the runs that missed the deadline."""

    def cells(self) -> list[str]:
        """Return a row of text."""
        hours = [
            "never" if math.isinf(one) else duration(one)
            for one in (self.median_hours, self.p95_hours)
        ]
        option = self.option
        return [
            option.machine, str(option.workers), self.policy, dollars(self.mean_usd), *hours,
            f"{self.late_share:.0%}",
        ]  # fmt: skip


def simulate_options(
    options: Sequence[Option], market: Market, trace: SpotTrace, *, deadline_h: float | None
) -> tuple[list[TracedOption], list[str]]:
    """Simulate the spot options of the Pareto front, or all spot options if it has none.

    Without a deadline, each option gets a fifth of its time as slack. Also returns notes on the
    options that were not simulated.
    """
    spot = [one for one in options if one.lifecycle == "spot"]
    chosen = [one for one in spot if one.is_on_front] or spot
    notes = [f"Simulated with {trace.name}: {NUM_STARTS} runs of each policy from random times."]
    if len(chosen) > MAX_OPTIONS:
        step = len(chosen) / MAX_OPTIONS
        chosen = [chosen[int(step * number)] for number in range(MAX_OPTIONS)]
    found: list[TracedOption] = []
    for option in chosen:
        job = _simulated_job(option, options, market, deadline_h)
        if job.workers > trace.max_capacity:
            notes.append(
                f"{option.describe()} was not simulated: the trace never has {job.workers} "
                f"machines, but {trace.max_capacity}."
            )
            continue
        rules = Rules.of(market.spec, "planned") if market.spec else None
        if job.terms.slack_s <= 0:
            notes.append(
                f"{option.describe()} was not simulated: with replacements of lost machines it "
                f"takes up to {duration(job.terms.least_time_s / 3600)}, which is over the "
                f"deadline of {duration(job.deadline_s / 3600)}."
            )
            continue
        done = simulate(trace, job, policies=POLICIES, num_starts=NUM_STARTS, rules=rules)
        found += [_result_of(option, result) for result in done.results]
    return found, notes


def _simulated_job(
    option: Option, options: Sequence[Option], market: Market, deadline_h: float | None
) -> SimulatedJob:
    offer = next(one for one in market.offers if one.machine == option.machine)
    same = [one for one in options if (one.machine, one.lifecycle) == (option.machine, "spot")]
    alone = min(same, key=lambda one: one.machines)
    speedup = option.samples_per_s / alone.samples_per_s
    # The time without interruptions and boots, because the simulation adds both.
    on_demand = next(
        (one for one in options if one.lifecycle == "on-demand"
         and (one.machine, one.machines) == (option.machine, option.machines)), option,
    )  # fmt: skip
    duration_s = 3600 * on_demand.hours - offer.boot_s
    efficiency = speedup / (option.machines / alone.machines)
    least = 1 / option.machines + 1e-9
    return SimulatedJob(
        workers=option.machines,
        duration_s=duration_s,
        deadline_s=3600 * deadline_h if deadline_h else usual_deadline_s(duration_s) + 4 * BOOT_S,
        on_demand_usd=offer.on_demand_usd,
        spot_usd=offer.spot_usd,
        efficiency=min(1.0, max(least, efficiency)),
        stall_s=STALL_S,
    )


def _result_of(option: Option, result: PolicyResult) -> TracedOption:
    return TracedOption(
        option=option,
        policy=result.policy,
        mean_usd=result.mean_usd,
        median_hours=result.percentile(lambda one: one.finish_s, 0.5) / 3600,
        p95_hours=result.percentile(lambda one: one.finish_s, 0.95) / 3600,
        late_share=result.late_share,
    )
