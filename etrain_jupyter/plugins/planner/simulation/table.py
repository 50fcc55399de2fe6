"""Format simulations: text table, rows for a DataFrame, and JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from etrain_jupyter.display.tables import align_columns
from etrain_jupyter.errors import TraceError
from etrain_jupyter.plugins.planner.simulation.job import Outcome
from etrain_jupyter.plugins.planner.simulation.policies import PolicyResult, Simulation

COLUMNS = ("POLICY", "COST", "OF ON DEMAND", "P95", "LATE", "HOURS", "P95", "GOODPUT", "SPOT h",
           "ON DEMAND h", "WAIVED")  # fmt: skip
ABOUT = {
    "on-demand": "all workers on demand",
    "spot": "all workers on spot machines, whatever the deadline",
    "fallback": "spot; workers missing for 120 s run on demand (capacity.on_demand)",
    "greedy-gang": "all workers on spot or none, on demand when the deadline requires it",
    "uniform-gang": "the same with uniform progress (Can't Be Late, NSDI 2024)",
    "lazy": "capacity.policy: deadline with keep: 0",
    "deadline": "capacity.policy: deadline with keep: {keep:g}",
    "uniform": "capacity.policy: deadline with keep: 1",
    "fixed": "workers: {{min: N, max: N}}: all workers, or it waits",
    "greedy": "workers: {{min: 1, max: N}}: all workers that the pool has",
    "goodput": "workers: {{min: 1, max: N, target: goodput}}: as many as are worth their cost",
}
"""One line about each policy and each way to size a job."""


def table_of(simulation: Simulation, notes: Sequence[str] = ()) -> str:
    """Return the table, with the assumptions above it and the policies below it."""
    job, trace = simulation.job, simulation.trace
    capacity = (
        f"{trace.mean_capacity:.1f} machines on average, at most {trace.max_capacity}, "
        f"{trace.losses_per_node_hour:.2f} losses per machine and hour"
    )
    num_runs = len(simulation.results[0].outcomes)
    efficiencies = " and ".join(f"{one.efficiency:.0%}" for one in simulation.jobs)
    head = "Job" if not simulation.others else f"{len(simulation.jobs)} jobs on one pool, each"
    lines = [
        f"{trace.name}: {trace.length_s / 3600:.1f} h, {capacity}.",
        f"{head}: {job.duration_s / 3600:.3g} h on {job.workers} workers (scaling efficiency "
        f"{efficiencies}), deadline {job.deadline_s / 3600:.3g} h. Means and percentiles of "
        f"{num_runs} runs.",
        *notes,
    ]
    if trace.max_capacity < job.workers:
        lines.append(
            f"The trace never has {job.workers} machines, so a gang cannot run on spot. --scale 2 "
            "counts each machine twice."
        )
    rows = [_columns_of(simulation), *(_row_of(simulation, one) for one in simulation.results)]
    width = max(len(row[0]) for row in rows)
    lines += ["", align_columns(rows, num_left=1), ""]
    names = [one.policy for one in simulation.results]
    names += [one.sizing for one in simulation.results if one.sizing]
    lines += [
        f"{name:<{width}}  {ABOUT[name].format(keep=job.keep)}" for name in dict.fromkeys(names)
    ]
    best = simulation.best
    lines += [
        "",
        f"Cheapest with the fewest missed deadlines ({best.late_share:.0%}): {best.label}, "
        f"{best.mean_usd / simulation.on_demand_usd:.0%} of the cost on demand.",
    ]
    return "\n".join(lines)


def _columns_of(simulation: Simulation) -> tuple[str, ...]:
    if not simulation.is_sized:
        return COLUMNS
    jobs = range(1, len(simulation.jobs) + 1) if simulation.others else ()
    return (*COLUMNS, "WORKERS", "CHANGES", *(f"JOB {number} h" for number in jobs))


def _row_of(simulation: Simulation, result: PolicyResult) -> tuple[str, ...]:
    full = simulation.on_demand_usd

    def hours(one: Outcome) -> float:
        return one.finish_s / 3600

    cells = (
        result.label,
        f"{result.mean_usd:.2f}",
        f"{result.mean_usd / full:.1%}",
        f"{result.percentile(lambda one: one.cost_usd, 0.95) / full:.1%}",
        f"{result.late_share:.1%}",
        _hours(result.percentile(hours, 0.5)),
        _hours(result.percentile(hours, 0.95)),
        f"{result.mean(lambda one: one.goodput):.2f}",
        f"{result.mean(lambda one: one.spot_hours):.1f}",
        f"{result.mean(lambda one: one.on_demand_hours):.1f}",
        f"{result.mean(lambda one: one.waived_usd) / full:.1%}",
    )
    if not simulation.is_sized:
        return cells
    return (
        *cells,
        f"{result.mean(lambda one: one.mean_workers):.1f}",
        f"{result.mean(lambda one: one.num_changes):.0f}",
        *(
            _hours(result.percentile(partial(_finish_h, number), 0.5))
            for number in range(len(simulation.jobs) if simulation.others else 0)
        ),
    )


def _finish_h(job: int, one: Outcome) -> float:
    return one.job_finishes_s[job] / 3600


def _hours(value: float) -> str:
    return "never" if math.isinf(value) else f"{value:.2f}"


def rows_of(simulation: Simulation) -> list[dict[str, Any]]:
    """Return one row per policy, sizing and run, for ``pandas.DataFrame``.

    Times are in seconds; ``finish_s`` is None if a run was given up. ``cost_share`` is relative to
    the cost of the job on demand without interruptions.
    """
    rows = []
    for result in simulation.results:
        for number, one in enumerate(result.outcomes):
            values = dataclasses.asdict(one)
            # JSON has no infinity.
            values["finish_s"] = _if_finite(one.finish_s)
            values["job_finishes_s"] = [_if_finite(each) for each in one.job_finishes_s]
            share = one.cost_usd / simulation.on_demand_usd
            names = {"policy": result.policy, "sizing": result.sizing or ""}
            rows.append({**names, "run": number, **values, "cost_share": share})
    return rows


def _if_finite(seconds: float) -> float | None:
    return None if math.isinf(seconds) else seconds


def to_dict(simulation: Simulation) -> dict[str, Any]:
    """Return the JSON form: the assumptions, a summary of each policy, and all runs."""
    trace = simulation.trace
    return {
        "trace": {
            "name": trace.name,
            "hours": trace.length_s / 3600,
            "mean_capacity": trace.mean_capacity,
            "max_capacity": trace.max_capacity,
            "losses_per_node_hour": trace.losses_per_node_hour,
        },
        "job": dataclasses.asdict(simulation.job),
        "other_jobs": [dataclasses.asdict(one) for one in simulation.others],
        "on_demand_usd": simulation.on_demand_usd,
        "policies": {one.label: _summary_of(simulation, one) for one in simulation.results},
        "best": simulation.best.label,
        "runs": rows_of(simulation),
    }


def _summary_of(simulation: Simulation, result: PolicyResult) -> dict[str, Any]:
    return {
        "mean_usd": result.mean_usd,
        "cost_share": result.mean_usd / simulation.on_demand_usd,
        "late_share": result.late_share,
        "goodput": result.mean(lambda one: one.goodput),
        "spot_hours": result.mean(lambda one: one.spot_hours),
        "on_demand_hours": result.mean(lambda one: one.on_demand_hours),
        "finish_hours": {
            name: _if_finite(value / 3600)
            for name, share in (("p5", 0.05), ("p50", 0.5), ("p95", 0.95))
            for value in (result.percentile(lambda one: one.finish_s, share),)
        },
    }


def write_json(simulation: Simulation, path: str | Path) -> None:
    """Write the JSON form to a file.

    Raises:
        TraceError: If the file cannot be written.
    """
    text = json.dumps(to_dict(simulation), indent=2)
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as exc:
        raise TraceError(f"--json {path}: the file cannot be written ({exc.strerror}).") from exc
