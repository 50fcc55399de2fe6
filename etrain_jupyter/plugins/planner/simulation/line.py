"""Carry out ``etrain simulate``: options, defaults from a pool, and the table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from etrain_jupyter.errors import ConfigError, PoolError
from etrain_jupyter.plugins.ec2.head.view import Rules
from etrain_jupyter.plugins.ec2.spec import KIND, AwsSpotSpec
from etrain_jupyter.plugins.ec2.type_table import ON_DEMAND_USD, TABLE_DATE, TABLE_REGION
from etrain_jupyter.plugins.planner.simulation.job import SimulatedJob, usual_deadline_s
from etrain_jupyter.plugins.planner.simulation.policies import (
    POLICIES,
    Simulation,
    simulate,
    simulate_sizes,
)
from etrain_jupyter.plugins.planner.simulation.sizing import SIZINGS, Sizing, ring_rates
from etrain_jupyter.plugins.planner.simulation.table import table_of, write_json
from etrain_jupyter.plugins.planner.simulation.trace import SpotTrace
from etrain_jupyter.plugins.planner.simulation.trace_files import GAPS, Gaps, read_trace
from etrain_jupyter.pools.catalog import read_catalog

USUAL_WORKERS = 16
USUAL_SPOT_SHARE = 0.3
"""Price of a spot machine as a share of the on-demand price, if neither is known."""
LEAST_BOOT_SHARE = 0.4
"""Shortest boot time as a share of the longest."""
MAX_WORKERS = 1000


def run_simulation(
    *,
    trace: str,
    workers: int | None = None,
    work_s: float = 8 * 3600.0,
    deadline_s: float | None = None,
    policies: tuple[str, ...] | None = None,
    sizings: tuple[Sizing, ...] = (),
    jobs: tuple[float, ...] = (),
    keep: float | None = None,
    pool: str | None = None,
    on_demand_usd: float | None = None,
    spot_usd: float | None = None,
    efficiency: float = 1.0,
    boot_s: float = 300.0,
    shortage: float = 0.0,
    scale: int = 1,
    gaps: Gaps = "error",
    starts: int = 50,
    seed: int = 0,
) -> tuple[Simulation, list[str]]:
    """Carry out the line; return the result, and notes about assumptions.

    For an option that is None, the pool or a default decides. ``sizings`` are the ways of sizing
    the job to compare. ``jobs`` has the scaling efficiency of each job on the pool, in order of
    submission.

    Raises:
        ConfigError: If an option is invalid, or the deadline cannot be met.
        PoolError: If the pool does not exist, or has no prices.
        TraceError: If the trace cannot be used.
    """
    spec = _spec_of(pool) if pool else None
    market = read_trace(trace, gaps=gaps).scaled(scale)
    _check_range("--workers", workers, 1, MAX_WORKERS)
    _check_range("--scale", scale, 1, MAX_WORKERS)
    _check_range("--shortage", shortage, 0.0, 1.0)
    _check_range("--keep", keep, 0.0, 1.0)
    _check_range("--on-demand-usd", on_demand_usd, 1e-6, 1e6)
    _check_range("--spot-usd", spot_usd, 1e-6, 1e6)
    workers = workers or (spec.workers.max if spec else USUAL_WORKERS)
    for one in (efficiency, *jobs):
        _check_range("--jobs" if jobs else "--efficiency", one, 1 / workers + 1e-9, 1.0)
    on_demand_usd, spot_usd, notes = _prices_of(on_demand_usd, spot_usd, pool, spec, market)
    finish_by = spec.capacity.finish_by if spec else None
    if keep is None:
        keep = spec.capacity.keep if spec else 0.5
    job = SimulatedJob(
        workers=workers,
        duration_s=work_s,
        deadline_s=deadline_s or finish_by or usual_deadline_s(work_s),
        on_demand_usd=on_demand_usd,
        spot_usd=spot_usd,
        keep=keep,
        efficiency=efficiency,
        boot_s=(LEAST_BOOT_SHARE * boot_s, boot_s),
        shortage=shortage,
    )
    common: dict[str, Any] = {
        "num_starts": starts,
        "seed": seed,
        "rules": Rules.of(spec, "simulated") if spec else None,
    }
    if not sizings and not jobs:
        return simulate(market, job, policies=policies or POLICIES, **common), notes
    sized = [
        replace(job, efficiency=one, own_rates=ring_rates(workers, one))
        for one in jobs or (efficiency,)
    ]
    done = simulate_sizes(
        market, sized, policies=policies or ("spot",), sizings=sizings or SIZINGS, **common
    )
    return done, notes


def simulate_text(*, json_path: str | None = None, **options: Any) -> str:
    """Simulate, write the JSON file if one is given, and return the table."""
    done, notes = run_simulation(**options)
    if json_path:
        write_json(done, json_path)
        notes = [*notes, f"All runs are in {json_path}."]
    return table_of(done, notes)


def policies_of(text: str | None) -> tuple[str, ...] | None:
    """Return the policies in a comma-separated list; None for None."""
    known = f"known policies: {', '.join(POLICIES)}"
    return _known(_words_of(text), POLICIES, "--policy {}: unknown policy", known) or None


def sizings_of(text: str | None) -> tuple[Sizing, ...]:
    """Return the ways to size a job in a comma-separated list; ``all`` is all of them."""
    names = SIZINGS if text == "all" else _words_of(text)
    error = "--size {}: unknown way to size a job. Nothing was simulated"
    return cast(
        "tuple[Sizing, ...]", _known(names, SIZINGS, error, f"known: {', '.join(SIZINGS)}, or all")
    )


def gaps_of(text: str) -> Gaps:
    """Return the choice for gaps."""
    _known((text,), GAPS, "--gaps {}: unknown value", f"known values: {', '.join(GAPS)}")
    return cast("Gaps", text)


def _known(words: tuple[str, ...], known: Sequence[str], error: str, hint: str) -> tuple[str, ...]:
    for word in words:
        if word not in known:
            raise ConfigError(error.format(word), hint=hint)
    return words


def _words_of(text: str | None) -> tuple[str, ...]:
    return tuple(word.strip() for word in (text or "").split(",") if word.strip())


def efficiencies_of(text: str | None) -> tuple[float, ...]:
    """Return the scaling efficiencies in a comma-separated list.

    Raises:
        ConfigError: If one is not a number.
    """
    try:
        return tuple(map(float, _words_of(text)))
    except ValueError:
        raise ConfigError(
            f"--jobs {text}: scaling efficiencies are needed, one per job. Nothing was simulated",
            hint="--jobs 0.9,0.5",
        ) from None


def _spec_of(pool: str) -> AwsSpotSpec:
    catalog = read_catalog()
    if pool not in catalog:
        raise PoolError(
            f"pools.yaml does not define the pool {pool!r}. It defines "
            f"{', '.join(catalog) or 'none'}. Nothing was simulated. Name one of them, or leave "
            "out --pool and give --on-demand-usd and --spot-usd."
        )
    entry = catalog[pool]
    if entry.kind != KIND:
        raise PoolError(
            f"pool {pool!r} is of kind {entry.kind!r}, which has no spot machines and no prices. "
            f"Nothing was simulated. Name a pool of kind {KIND}, or leave out --pool and give "
            "--on-demand-usd and --spot-usd."
        )
    return entry.read_as(AwsSpotSpec)


def _prices_of(
    on_demand: float | None,
    spot: float | None,
    pool: str | None,
    spec: AwsSpotSpec | None,
    trace: SpotTrace,
) -> tuple[float, float, list[str]]:
    """Return the hourly on-demand and spot prices of a machine, and notes on assumptions."""
    notes = []
    if on_demand is None and spec is not None:
        known = [name for name in spec.capacity.types if name in ON_DEMAND_USD]
        if spec.capacity.gpu or not known:
            types = "capacity.gpu" if spec.capacity.gpu else ", ".join(spec.capacity.types)
            raise PoolError(
                f"pool {pool!r} has no known on-demand price: {types} is not in the "
                f"built-in table ({TABLE_REGION}, {TABLE_DATE}), and a simulation does not query "
                "AWS. Nothing was simulated. Add --on-demand-usd and --spot-usd, in US dollars an "
                "hour."
            )
        on_demand = ON_DEMAND_USD[known[0]]
        notes.append(
            f"On-demand price: {on_demand:g} US dollars an hour for {known[0]} (built-in table, "
            f"{TABLE_REGION}, {TABLE_DATE})."
        )
    if on_demand is None:
        on_demand = 1.0
        notes.append("Costs are in hours of an on-demand machine (--on-demand-usd sets a price).")
    if spot is None:
        spot = USUAL_SPOT_SHARE * on_demand
        if not trace.prices:
            notes.append(
                f"Assumed: a spot machine costs {USUAL_SPOT_SHARE:.0%} of one on demand "
                "(--spot-usd, or a column spot_usd in the trace)."
            )
    return on_demand, spot, notes


def _check_range(flag: str, value: float | None, least: float, most: float) -> None:
    if (value is not None and not least <= value <= most) or (
        value is not None and math.isnan(value)
    ):
        raise ConfigError(
            f"{flag} {value:g} is not between {least:.4g} and {most:g}. Nothing was simulated.",
            hint=f"write for example {flag} {most if least < 1 <= most else least:g}",
        )
