"""The function ``etrain_jupyter.plan``."""

from __future__ import annotations

from collections.abc import Iterable

from etrain_jupyter.notebook.job.open_jobs import find_or_latest
from etrain_jupyter.notebook.job.run_store import RunStore
from etrain_jupyter.notebook.job.training_job import TrainingJob
from etrain_jupyter.plugins.planner.planning.line import PlanOptions, plan_job, types_of
from etrain_jupyter.plugins.planner.planning.plan import TrainingPlan
from etrain_jupyter.process.processes import num_usable_cores


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
    options = PlanOptions(
        deadline_h=deadline_h,
        budget_usd=budget_usd,
        types=types_of(types) if isinstance(types, str) else tuple(types),
        workers=workers,
        pool=pool,
        trace=trace,
        is_profile=is_profile,
    )
    return plan_job(found, options, pool=found.record.pool, cores=num_usable_cores())
