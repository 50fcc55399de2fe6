"""Carry out ``%etrain plan``: options of the line, prices, and the plan."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from etrain_jupyter.display.numbers import duration
from etrain_jupyter.errors import ConfigError
from etrain_jupyter.insight.measures import MAX_OUTSIDE
from etrain_jupyter.insight.runs import Job
from etrain_jupyter.plugins.planner.planning.advice import Goal, advise
from etrain_jupyter.plugins.planner.planning.measured import MeasuredJob, read_measured
from etrain_jupyter.plugins.planner.planning.offers import Market, market_of
from etrain_jupyter.plugins.planner.planning.on_trace import TracedOption, simulate_options
from etrain_jupyter.plugins.planner.planning.options import (
    Estimate,
    Option,
    estimates_of,
    options_of,
)
from etrain_jupyter.plugins.planner.planning.plan import TrainingPlan
from etrain_jupyter.plugins.planner.simulation.trace_files import read_trace

MAX_WORKERS = 1000
MORE_WORKERS = 10
"""If no option meets the deadline, options with up to this many times the workers are tried."""
USUAL_WORKERS = 16
"""Largest number of workers to consider if neither the pool nor the line has a limit."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of the line; None where the job or a default decides."""

    deadline_h: float | None = None
    budget_usd: float | None = None
    types: tuple[str, ...] = ()
    workers: int | None = None
    pool: str | None = None
    trace: str | None = None
    is_profile: bool = False
    """True if the job is the profile of a cell: plan the whole job, not the rest of it."""


def types_of(text: str | None) -> tuple[str, ...]:
    """Return the machine types in a comma-separated list."""
    return tuple(dict.fromkeys(word.strip() for word in (text or "").split(",") if word.strip()))


def plan_job(job: Job, options: PlanOptions, *, pool: str, cores: float) -> TrainingPlan:
    """Plan a job from its log.

    Args:
        job: The job.
        options: Options of the line.
        pool: Pool of the job, if the line names none.
        cores: Cores of this machine.

    Raises:
        ConfigError: If the job has no steps, or an option is invalid.
        PoolError: If the pool does not exist, or has no prices.
        TraceError: If the trace cannot be read.
    """
    _check(options)
    measured = read_measured(job)
    if options.is_profile:
        measured = replace(measured, samples_left=measured.total_samples)
    market = market_of(measured, options.pool or pool, options.types)
    trace = read_trace(options.trace, gaps="error") if options.trace else None
    estimates, skipped = estimates_of(measured, market, cores=cores)
    if not estimates:
        raise ConfigError(
            f"the times of job {measured.job_id} cannot be predicted on any of "
            f"{', '.join(one.machine for one in market.offers)}: {' '.join(skipped)} No plan was "
            "made",
            hint="name types that ran the job, or other GPU types, with --types",
        )
    most = options.workers or market.max_workers or max(measured.max_workers, USUAL_WORKERS)
    most = max(most, min(one.offer.workers for one in estimates))
    found = options_of(measured, estimates, max_workers=most, head_usd=market.head_usd)
    larger = options_of(
        measured, estimates, max_workers=min(MORE_WORKERS * most, MAX_WORKERS),
        head_usd=market.head_usd,
    )  # fmt: skip
    goal = Goal(deadline_h=options.deadline_h, budget_usd=options.budget_usd)
    advice = advise(found, goal, [one for one in larger if one.workers > most])
    traced: list[TracedOption] = []
    on_trace: list[str] = []
    if trace is not None:
        traced, on_trace = simulate_options(found, market, trace, deadline_h=goal.deadline_h)
    return TrainingPlan(
        job=measured,
        options=tuple(found),
        goal=goal,
        advice=advice,
        traced=tuple(traced),
        is_profile=options.is_profile,
        notes=tuple([*market.notes, *_guesses(measured, market, estimates, found), *skipped,
                     *on_trace]),
    )  # fmt: skip


def _guesses(
    measured: MeasuredJob, market: Market, estimates: list[Estimate], options: list[Option]
) -> list[str]:
    notes = [note for estimate in estimates for note in estimate.notes]
    guessed = [one.machine for one in market.offers if one.is_spot_guessed]
    if guessed:
        notes.append(f"Guessed: a spot machine costs 30 % of one on demand ({', '.join(guessed)}).")
    if any(one.lifecycle == "spot" for one in options):
        if math.isnan(measured.losses_per_node_hour):
            notes.append(
                "Guessed: EC2 reclaims 0.6 spot machines per machine and hour, as in public "
                "traces; --trace FILE simulates a recorded market."
            )
        scores = ", ".join(f"{one.machine} {one.score}" for one in market.offers if one.score)
        if scores:
            notes.append(f"Spot placement scores, 1 to 10, for the pool's maximum: {scores}.")
    if measured.unexplained_share > MAX_OUTSIDE:
        notes.append(
            f"The steps take {duration(measured.step_hours)} of the "
            f"{duration(measured.log_hours)} in the log, evaluations and checkpoints "
            f"{duration(measured.outside_hours)}. The other {measured.unexplained_share:.0%} are "
            "waiting and recovery, which the plan leaves out."
        )
    if measured.outside_share == 0.0:
        notes.append("No evaluation or checkpoint was measured, so their time is not in the plan.")
    if measured.grows and measured.noise is None:
        notes.append(
            "The batch grows with the workers, and a larger batch may need more samples. The log "
            "has no gradient noise to compute them from (scaling.rule: adascale measures "
            "it), so time and cost are for the same number of samples."
        )
    elif measured.grows:
        notes.append(
            "The batch grows with the workers. PROGRESS is how much a sample contributes in the "
            "larger batch, by the measured gradient noise; time and cost are for the same number "
            "of samples."
        )
    return notes


def _check(options: PlanOptions) -> None:
    if options.budget_usd is not None and not 0 < options.budget_usd < math.inf:
        raise ConfigError(
            f"--budget {options.budget_usd:g}: US dollars above 0 are needed. No plan was made",
            hint="--budget 20",
        )
    if options.deadline_h is not None and not 0 < options.deadline_h < math.inf:
        raise ConfigError(
            f"--deadline {options.deadline_h:g}h: a time above 0 is needed. No plan was made",
            hint="--deadline 2h",
        )
    if options.workers is not None and not 1 <= options.workers <= MAX_WORKERS:
        raise ConfigError(
            f"--workers {options.workers} is not between 1 and {MAX_WORKERS}. No plan was made",
            hint="--workers 16",
        )
