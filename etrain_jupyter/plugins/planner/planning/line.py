"""Plan a job: ``etrain_jupyter.plan`` and ``%etrain plan``."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from etrain_jupyter.display.numbers import duration
from etrain_jupyter.errors import ConfigError
from etrain_jupyter.insight.measures import MAX_OUTSIDE
from etrain_jupyter.insight.runs import Job
from etrain_jupyter.notebook.job.open_jobs import find_or_latest
from etrain_jupyter.notebook.job.run_store import RunStore
from etrain_jupyter.notebook.job.training_job import TrainingJob
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
from etrain_jupyter.process.processes import num_usable_cores

MAX_WORKERS = 1000
MORE_WORKERS = 10
"""If no option meets the deadline, options with up to this many times the workers are tried."""
USUAL_WORKERS = 16
"""Largest number of workers to consider if neither the pool nor the line has a limit."""


def types_of(text: str | None) -> tuple[str, ...]:
    """Return the machine types in a comma-separated list."""
    return tuple(dict.fromkeys(word.strip() for word in (text or "").split(",") if word.strip()))


def plan(
    job: TrainingJob | str | None = None,
    *,
    deadline_h: float | None = None,
    budget_usd: float | None = None,
    types: Iterable[str] = (),
    workers: int | None = None,
    pool: str | None = None,
    trace: str | None = None,
    is_profile: bool = False,
    store: RunStore | None = None,
) -> TrainingPlan:
    """Predict time and cost of a job on other numbers and types of workers, and recommend one.

    Args:
        job: A job, or its name, id or prefix of its id; by default the most recently used one.
        deadline_h: Hours until the job must have finished.
        budget_usd: Most that the job may cost, in US dollars.
        types: Machine types; by default those of the pool.
        workers: Maximum number of workers; by default the pool's ``workers.max``, or 16.
        pool: Pool in ``pools.yaml`` whose types, prices and limits apply; by default the job's.
        trace: File of a recorded spot market, on which to simulate the spot options as well.
        is_profile: True if the job is the profile of a cell, so that the plan is for all samples.
        store: The run store; by default that of the working folder.

    Returns:
        A plan that a notebook displays as HTML. It has ``options``, ``recommended``, ``advice``,
        ``to_frame()`` and ``plot()``; ``str`` returns the text.

    Raises:
        ConfigError: If the job has no steps, or a value is out of range.
        JobNotFoundError: If no job matches; the message has the closest names.
        PoolError: If the pool does not exist, or has no prices.
        TraceError: If the trace cannot be read.
    """
    found = find_or_latest(job, store, "plan('digits-1a2b3c4d', deadline_h=2)")
    return plan_job(
        found,
        pool=pool or found.record.pool,
        cores=num_usable_cores(),
        deadline_h=deadline_h,
        budget_usd=budget_usd,
        types=types_of(types) if isinstance(types, str) else types,
        workers=workers,
        trace=trace,
        is_profile=is_profile,
    )


def plan_job(
    job: Job,
    *,
    pool: str,
    cores: float,
    deadline_h: float | None = None,
    budget_usd: float | None = None,
    types: Iterable[str] = (),
    workers: int | None = None,
    trace: str | None = None,
    is_profile: bool = False,
) -> TrainingPlan:
    """Plan a job from its log. ``cores`` are this machine's; the rest is as in ``plan``."""
    _check(deadline_h=deadline_h, budget_usd=budget_usd, workers=workers)
    measured = read_measured(job)
    if is_profile:
        measured = replace(measured, samples_left=measured.total_samples)
    market = market_of(measured, pool, tuple(types))
    market_trace = read_trace(trace, gaps="error") if trace else None
    estimates, skipped = estimates_of(measured, market, cores=cores)
    if not estimates:
        raise ConfigError(
            f"the times of job {measured.job_id} cannot be predicted on any of "
            f"{', '.join(one.machine for one in market.offers)}: {' '.join(skipped)} No plan was "
            "made",
            hint="name types that ran the job, or other GPU types, with --types",
        )
    most = workers or market.max_workers or max(measured.max_workers, USUAL_WORKERS)
    most = max(most, min(one.offer.workers for one in estimates))
    found = options_of(measured, estimates, max_workers=most, head_usd=market.head_usd)
    larger = options_of(
        measured, estimates, max_workers=min(MORE_WORKERS * most, MAX_WORKERS),
        head_usd=market.head_usd,
    )  # fmt: skip
    goal = Goal(deadline_h=deadline_h, budget_usd=budget_usd)
    advice = advise(found, goal, [one for one in larger if one.workers > most])
    traced: list[TracedOption] = []
    on_trace: list[str] = []
    if market_trace is not None:
        traced, on_trace = simulate_options(found, market, market_trace, deadline_h=deadline_h)
    return TrainingPlan(
        job=measured,
        options=tuple(found),
        goal=goal,
        advice=advice,
        traced=tuple(traced),
        is_profile=is_profile,
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


def _check(*, deadline_h: float | None, budget_usd: float | None, workers: int | None) -> None:
    if budget_usd is not None and not 0 < budget_usd < math.inf:
        raise ConfigError(
            f"--budget {budget_usd:g}: US dollars above 0 are needed. No plan was made",
            hint="--budget 20",
        )
    if deadline_h is not None and not 0 < deadline_h < math.inf:
        raise ConfigError(
            f"--deadline {deadline_h:g}h: a time above 0 is needed. No plan was made",
            hint="--deadline 2h",
        )
    if workers is not None and not 1 <= workers <= MAX_WORKERS:
        raise ConfigError(
            f"--workers {workers} is not between 1 and {MAX_WORKERS}. No plan was made",
            hint="--workers 16",
        )
