"""The composition root: cell -> config -> bundle -> pool -> job -> dashboard. Read it first."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etrain_jupyter.bundle.capture import Bundle, capture_bundle
from etrain_jupyter.config import (
    ParsedJob,
    check_references,
    parse_cell,
    parse_mapping,
    template,
)
from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.errors import ConfigError
from etrain_jupyter.log.tensorboard import require_tensorboard
from etrain_jupyter.notebook.commands.other_jobs import look_around
from etrain_jupyter.notebook.dashboard.browser import cell_numbers, has_front_end
from etrain_jupyter.notebook.dashboard.link import link
from etrain_jupyter.notebook.dashboard.widget import Dashboard
from etrain_jupyter.notebook.job.open_jobs import attach, hold, jobs, submit_job
from etrain_jupyter.notebook.job.resume import ResumeRequest
from etrain_jupyter.notebook.job.run_store import ROOT_VARIABLE, open_runs
from etrain_jupyter.notebook.job.screen import Screen
from etrain_jupyter.notebook.job.training_job import TrainingJob
from etrain_jupyter.pools import Pool, get_pool
from etrain_jupyter.pools.catalog import advice_on
from etrain_jupyter.pools.registry import pool_names
from etrain_jupyter.storage.bucket_log.place import is_remote

__all__ = [
    "Plan",
    "attach",
    "distributed",
    "follow",
    "jobs",
    "open_panel",
    "plan_cell",
    "plan_job",
    "price_of",
    "resume",
    "show",
    "submit",
]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A checked job that nobody has submitted yet."""

    config: TrainConfig
    bundle: Bundle
    cell: str = ""


def plan_job(parsed: ParsedJob, notebook: Mapping[str, Any], *, cell: str = "") -> Plan:
    """Check what a job names, and capture it by value."""
    if parsed.config.log.tensorboard:
        require_tensorboard()
    pool = check_pool(parsed)
    parsed = dataclasses.replace(parsed, config=with_shared_checkpoints(parsed.config, pool))
    names = parsed.namespace(notebook)
    check_references(parsed.config, names, source=parsed.source)
    bundle = capture_bundle(parsed.config.references(), names, cell_numbers=cell_numbers())
    return Plan(config=parsed.config, bundle=bundle, cell=cell)


def check_pool(parsed: ParsedJob) -> Pool:
    """Return the pool that a cell names; nothing is started yet.

    Raises:
        ConfigError: If there is none, or its entry in ``pools.yaml`` is wrong, with the place.
    """
    name, known = parsed.config.pool, pool_names()
    if name not in known and "://" not in name:
        message = f"there is no pool '{name}'; known are {', '.join(known)}"
        raise parsed.source.error(("pool",), message, hint=advice_on(name, known))
    return get_pool(name)


def with_shared_checkpoints(config: TrainConfig, pool: Pool) -> TrainConfig:
    """Let checkpoints go where all workers reach them, unless the cell says where.

    The run folder is this machine's, or in a bucket; machines elsewhere see the latter only.
    """
    place = pool.shared_place()
    if not place or is_remote(str(open_runs())):
        return config
    if config.checkpoint.to is None:
        checkpoint = config.checkpoint.model_copy(update={"to": place})
        return config.model_copy(update={"checkpoint": checkpoint})
    if "://" not in config.checkpoint.to:
        print(
            f"etrain: checkpoint.to is the folder {config.checkpoint.to}: all machines of pool "
            f"{config.pool} must share that disk. Without the key they go to {place}."
        )
    return config


def plan_cell(body: str, notebook: Mapping[str, Any], flags: Mapping[str, Any], line: str) -> Plan:
    """Check a cell; ``flags`` of its first ``line`` win over its body."""
    parsed = parse_cell(body, namespace=notebook, overrides=flags, first_line=line)
    return plan_job(parsed, notebook, cell=body)


def price_of(plan: Plan) -> str:
    """Return what a job can cost at worst, in words; asks whoever knows the prices.

    Raises:
        PoolError: If the prices cannot be had.
    """
    return get_pool(plan.config.pool).price(plan.config.max_workers())


def submit(plan: Plan, *, faults: Sequence[Mapping[str, Any]] = ()) -> TrainingJob:
    """Bring the pool up and hand the job to its coordinator; ``faults`` is a test's plan."""
    for warning in plan.bundle.warnings:
        print(f"etrain: {warning}")
    open_runs().check_writable()  # before anything is started
    pool = get_pool(plan.config.pool)
    if pool.is_head_elsewhere and not is_remote(str(open_runs())):
        raise ConfigError(
            f"the scheduler of pool {plan.config.pool} has a machine of its own (head: on-demand), "
            f"which does not see {open_runs()}. Nothing was started",
            hint=f"set {ROOT_VARIABLE}={pool.shared_place()} and restart the kernel, or begin it "
            "with that: then jobs lie in the bucket",
        )
    address = pool.up()
    return submit_job(plan.config, plan.bundle, address=address, cell=plan.cell, faults=faults)


def resume(
    job: TrainingJob, plan: Plan, *, is_forced: bool = False, is_trusted: bool = False
) -> str:
    """Let an ended job go on with a cell's code and values; say from where."""
    for warning in plan.bundle.warnings:
        print(f"etrain: {warning}")
    wish = ResumeRequest(
        config=plan.config,
        bundle=plan.bundle,
        cell=plan.cell,
        is_forced=is_forced,
        is_trusted=is_trusted,
    )
    return job.resume_as(wish)


def show(job: TrainingJob) -> None:
    """Display a job's dashboard, the same one in every cell that asks for it."""
    follow(job).show()


def follow(job: TrainingJob) -> Screen:
    """List a job in JupyterLab's side panel, with or without a display; return what draws it."""
    if job.screen is None:
        screen = Dashboard(job_id=job.id, on_request=job.obey)
        # The first picture should have the history in it, but a slow disk must not hold it up.
        job.subscribe(screen.add_events).wait(2.0)
        screen.follow()
        job.screen = screen
    return job.screen


def open_panel() -> None:
    """Let JupyterLab find this kernel, and answer its side panel."""
    if not has_front_end():
        return

    def attach_quietly(job_id: str) -> str:
        # Not `attach`: what is done in the panel must not change whom `%etrain stop` means.
        follow(hold(open_runs().find(job_id)))
        return ""

    link().panel.serve(
        look=lambda ids, is_asked: look_around(open_runs(), ids, is_asked=is_asked),
        attach=attach_quietly,
        template=lambda: f"%%etrain distributed\n{template()}",
    )
    link().open()


def distributed(body: Mapping[str, Any] | None = None, /, **keys: Any) -> TrainingJob:
    """Submit a job from Python: the keys of the cell's body, as a mapping, as keywords or both.

    References are expressions over the caller's names, or the objects themselves.
    """
    caller = sys._getframe(1)
    names = {**caller.f_globals, **caller.f_locals}
    job = submit(plan_job(parse_mapping({**(body or {}), **keys}, names), names))
    if has_front_end():
        show(job)
    return job
