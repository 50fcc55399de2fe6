"""The composition root: cell -> config -> bundle -> pool -> job -> dashboard. Read it first."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Mapping
from typing import Any

from etrain_jupyter.bundle.capture import capture_bundle
from etrain_jupyter.config import ParsedJob, check_references, parse_cell, parse_mapping
from etrain_jupyter.log.events import describe_parameters
from etrain_jupyter.log.loggers.registry import with_loggers
from etrain_jupyter.log.tensorboard import require_tensorboard
from etrain_jupyter.notebook.dashboard.browser import cell_numbers, has_front_end
from etrain_jupyter.notebook.display import show
from etrain_jupyter.notebook.job.open_jobs import submit_job
from etrain_jupyter.notebook.job.plan import Plan
from etrain_jupyter.notebook.job.profile import measure_steps, profile_config
from etrain_jupyter.notebook.job.resume import ResumeRequest
from etrain_jupyter.notebook.job.runs import open_runs
from etrain_jupyter.notebook.job.same_cell import warn_of_earlier_jobs
from etrain_jupyter.notebook.job.training_job import TrainingJob
from etrain_jupyter.pools.registry import find_pool, with_shared_checkpoints


def plan_cell(body: str, notebook: Mapping[str, Any], flags: Mapping[str, Any], line: str) -> Plan:
    """Check a cell. The ``flags`` of its first ``line`` take precedence over its body."""
    parsed = parse_cell(body, namespace=notebook, overrides=flags, first_line=line)
    return plan_job(parsed, notebook, cell=body)


def plan_job(parsed: ParsedJob, notebook: Mapping[str, Any], *, cell: str = "") -> Plan:
    """Resolve the job's pool and run store, check its references and capture them by value."""
    if parsed.config.log.tensorboard:
        require_tensorboard()
    parsed = dataclasses.replace(parsed, config=with_loggers(parsed))
    # Resolve these here and store them in the plan. Both determine where checkpoints must be
    # stored, because machines in a cloud pool cannot access this machine's folders.
    pool, runs = find_pool(parsed), open_runs()
    config, warnings = with_shared_checkpoints(parsed.config, pool, has_bucket=runs.is_remote)
    parsed = dataclasses.replace(parsed, config=config)
    names = parsed.namespace(notebook)
    check_references(config, names, source=parsed.source)
    bundle = capture_bundle(config.references(), names, cell_numbers=cell_numbers())
    warnings += parsed.warnings
    return Plan(
        config=config, bundle=bundle, pool=pool, runs=runs, cell=cell, warnings=warnings,
        model_size=_size_of(names.get(config.model)),
    )  # fmt: skip


def _size_of(model: Any) -> str:
    # A class or function builds its model on the workers; the job's log then has the size.
    if isinstance(model, type) or not (
        hasattr(model, "state_dict") and hasattr(model, "parameters")
    ):
        return ""
    try:
        sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    except (TypeError, ValueError):  # lazy modules have no shapes yet
        return ""
    trained = sum(size for size, is_trained in sizes if is_trained)
    return describe_parameters(trained, sum(size for size, _ in sizes))


def submit(plan: Plan) -> TrainingJob:
    """Start the pool if needed, submit the job, and warn if the cell's last job still runs."""
    plan.print_warnings()
    started_at = time.monotonic()
    address = plan.start_pool()
    job = submit_job(
        plan.config, plan.bundle, address=address, store=plan.runs, cell=plan.cell,
        pool_s=time.monotonic() - started_at, notes=plan.warnings,
    )  # fmt: skip
    for warning in warn_of_earlier_jobs(job.record, plan.runs, address):
        print(f"etrain: {warning}")
    return job


def profile(plan: Plan) -> TrainingJob:
    """Train a cell for at most a minute on one and two workers, and return the stopped job."""
    job = submit(dataclasses.replace(plan, config=profile_config(plan.config)))
    measure_steps(job, max_workers=plan.config.max_workers())
    return job


def resume(
    job: TrainingJob, plan: Plan, *, is_forced: bool = False, is_trusted: bool = False
) -> str:
    """Resume an ended job with the code and values of a cell; return a message with the step."""
    plan.print_warnings()
    request = ResumeRequest(
        config=plan.config, bundle=plan.bundle, pool=plan.pool, cell=plan.cell,
        is_forced=is_forced, is_trusted=is_trusted,
    )  # fmt: skip
    return job.resume_as(request)


def distributed(body: Mapping[str, Any] | None = None, /, **keys: Any) -> TrainingJob:
    """Submit a job from Python, with a cell's keys as a mapping, as keyword arguments, or both.

    References are expressions over the caller's names, or the objects themselves.
    """
    caller = sys._getframe(1)  # a decorator around this function would hide the caller's names
    names = {**caller.f_globals, **caller.f_locals}
    job = submit(plan_job(parse_mapping({**(body or {}), **keys}, names), names))
    if has_front_end():  # a script has no cell to display the job in
        show(job)
    return job
