"""The sub-commands ``plan`` and ``simulate``, and the words that their arguments accept."""

from __future__ import annotations

from typing import Annotated, Any

from etrain_jupyter.errors import ConfigError
from etrain_jupyter.notebook.commands.arguments import Number, Seconds, Spelling, StoreCount
from etrain_jupyter.notebook.commands.subcommands import CellSurface, Surface
from etrain_jupyter.plugins.ec2.type_table import MACHINE_TYPES
from etrain_jupyter.plugins.planner.planning.line import plan as make_plan
from etrain_jupyter.plugins.planner.planning.line import types_of
from etrain_jupyter.plugins.planner.planning.plan import TrainingPlan
from etrain_jupyter.plugins.planner.simulation.line import (
    efficiencies_of,
    gaps_of,
    policies_of,
    simulate_text,
    sizings_of,
)
from etrain_jupyter.plugins.planner.simulation.policies import POLICIES
from etrain_jupyter.plugins.planner.simulation.trace_files import GAPS

WORDS = {"policy": POLICIES, "gaps": GAPS, "types": tuple(MACHINE_TYPES)}

CountOf = Annotated[int, Spelling(metavar="N", action=StoreCount)]
Share = Annotated[float | None, Spelling(metavar="SHARE")]
Usd = Annotated[float | None, Spelling(metavar="USD")]
File = Annotated[str | None, Spelling(metavar="FILE")]


def plan(
    surface: Surface,
    job: str | None = None,
    *,
    deadline: Seconds | None = None,
    budget: Usd = None,
    types: Annotated[str | None, Spelling(metavar="TYPES")] = None,
    workers: Annotated[int | None, Spelling(metavar="N", action=StoreCount)] = None,
    pool: str | None = None,
    trace: File = None,
) -> str:
    """Predict time and cost on other numbers and types of workers, and recommend one.

    Args:
        deadline: Time until the job must have finished, for example 2h.
        budget: Most that the job may cost, in US dollars.
        types: Machine types with commas, for example g5.xlarge,g6.xlarge (those of the pool).
        workers: Maximum number of workers (the pool's workers.max, or 16).
        pool: Pool in pools.yaml whose types, prices and limits apply (the job's pool).
        trace: Also simulate the spot options on this recorded market.

    Example:
        plan digits --deadline 2h --budget 20
    """
    values: dict[str, Any] = {"types": types, "workers": workers, "pool": pool, "trace": trace}
    made = _make_plan(job, deadline=deadline, budget=budget, **values, store=surface.store)
    return surface.show_result(made)


def plan_cell(surface: CellSurface, line: str, body: str, **values: Any) -> str:
    """Profile a cell for at most a minute, and plan its whole job."""
    named = values.pop("job")
    if named is not None:
        raise ConfigError(
            f"%%etrain plan {named}: the body and the name are two jobs",
            hint=f"type %etrain plan {named} for the job, or leave out its name for the cell",
        )
    job = surface.profile(line, body)
    return surface.show_result(_make_plan(job, **values, is_profile=True))


def _make_plan(
    job: Any, *, deadline: float | None, budget: float | None, types: str | None, **others: Any
) -> TrainingPlan:
    deadline_h = None if deadline is None else deadline / 3600
    return make_plan(job, deadline_h=deadline_h, budget_usd=budget, types=types_of(types), **others)


def simulate(
    surface: Surface,
    *,
    trace: File = None,
    workers: Annotated[int | None, Spelling(metavar="N", action=StoreCount)] = None,
    work: Seconds = 28800.0,
    deadline: Seconds | None = None,
    policy: Annotated[str | None, Spelling(metavar="NAME")] = None,
    size: Annotated[str | None, Spelling(metavar="NAME")] = None,
    jobs: Annotated[str | None, Spelling(metavar="SHARES")] = None,
    keep: Share = None,
    pool: str | None = None,
    on_demand_usd: Usd = None,
    spot_usd: Usd = None,
    efficiency: Share = 1.0,
    boot: Seconds = 300.0,
    shortage: Share = 0.0,
    scale: CountOf = 1,
    gaps: Annotated[str, Spelling(metavar="KIND")] = "error",
    starts: CountOf = 50,
    seed: Number = None,
    json: File = None,
) -> str:
    """Compare capacity policies in virtual time on a recorded spot market.

    Args:
        trace: The recorded market.
        workers: Maximum number of workers, up to 1000 (the pool's workers.max, or 16).
        work: Time of the whole job on all workers, undisturbed (8h).
        deadline: Time until the job must have finished (the pool's finish_by, or the work and a
            quarter of it).
        policy: One policy, or several with commas; by default all, with --size or --jobs spot.
        size: Compare ways to size a job: fixed, greedy, goodput, several with commas, or all.
        jobs: Scaling efficiencies of several jobs that share the pool, for example 0.9,0.5.
        keep: Part of the spare time that the policy deadline keeps for the end (0.5).
        pool: Pool in pools.yaml whose rules and prices apply.
        on_demand_usd: US dollars an hour for a machine on demand.
        spot_usd: US dollars an hour for a spot machine, if the trace has no prices.
        efficiency: Scaling efficiency of all workers, for example 0.8 (1).
        boot: Longest time from a launch until a worker trains (5min).
        shortage: Share of on-demand requests that are refused (0).
        scale: Count each machine of the trace N times (1).
        gaps: Gaps in the trace: error (default), hold the last capacity, or cut them out.
        starts: Number of random start times, the same for each policy (50).
        seed: Random seed (0).
        json: Also write all runs to this file.

    Example:
        simulate --trace p3-trace.csv --workers 32 --work 8h --deadline 10h
    """
    if trace is None:
        raise ConfigError(
            "simulate needs a recorded spot market",
            hint="%etrain simulate --trace FILE; docs: how-to/simulate-a-policy",
        )
    return simulate_text(
        json_path=json,
        trace=trace,
        workers=workers,
        work_s=work,
        deadline_s=deadline,
        policies=policies_of(policy),
        sizings=sizings_of(size),
        jobs=efficiencies_of(jobs),
        keep=keep,
        pool=pool,
        on_demand_usd=on_demand_usd,
        spot_usd=spot_usd,
        efficiency=1.0 if efficiency is None else efficiency,
        boot_s=boot,
        shortage=shortage or 0.0,
        scale=scale,
        gaps=gaps_of(gaps),
        starts=starts,
        seed=seed or 0,
    )
