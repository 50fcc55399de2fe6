"""Cost and time of jobs by how they are sized, on recorded spot markets, in virtual time.

A job takes all of its workers or waits (``fixed``), all that the pool has (``greedy``), or as many
as are worth their cost (``workers.target: goodput``, through the rule of the head). One job alone,
and two jobs on one pool. 8 hours on 16 workers, from the same random times, on spot machines at
30 % of the on-demand price. The bar is the rule's own: the product of time and cost.
"""

from __future__ import annotations

import argparse
import math
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.advice.policies import HOUR_S, TRACES
from benchmarks.common import report
from etrain_jupyter.plugins.planner.simulation.job import Outcome, SimulatedJob
from etrain_jupyter.plugins.planner.simulation.policies import PolicyResult, simulate_sizes
from etrain_jupyter.plugins.planner.simulation.sizing import SIZINGS, ring_rates
from etrain_jupyter.plugins.planner.simulation.trace_files import read_trace

FILES = {"p3": "bamboo/p3-trace.csv", "g4dn": "bamboo/g4dn-trace.csv"}
WORKERS = 16
HOURS = 8.0
JOBS = ((0.9,), (0.6,), (0.4,), (0.2,), (0.9, 0.4))
"""Scaling efficiencies of the jobs that share a pool."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line options."""
    parser.add_argument("--traces", type=Path, default=TRACES, help="folder with the traces")
    parser.add_argument("--starts", type=int, help="runs per case (30; quick: 4)")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Simulate every case whose trace exists."""
    num_starts = options.starts or (4 if options.quick else 30)
    cases: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    for name, file in FILES.items():
        path = options.traces / file
        if not path.is_file():
            skipped[name] = f"there is no {file} in the folder of traces (--traces)"
            continue
        for efficiencies in JOBS:
            title = f"{name}, {' and '.join(f'{one:.0%}' for one in efficiencies)}"
            cases[title] = run_case(path, efficiencies, num_starts)
            print(f"sizing: {title}, {cases[title]['processor_s']:.0f} s", flush=True)
    return {"benchmark": "sizing", "num_starts": num_starts, "cases": cases, "skipped": skipped}


def run_case(path: Path, efficiencies: tuple[float, ...], num_starts: int) -> dict[str, Any]:
    """Simulate jobs with these scaling efficiencies on one trace."""
    began = time.process_time()
    jobs = [
        SimulatedJob(
            workers=WORKERS, duration_s=HOURS * HOUR_S, deadline_s=4 * HOURS * HOUR_S,
            on_demand_usd=1.0, spot_usd=0.3, efficiency=one, own_rates=ring_rates(WORKERS, one),
        )
        for one in efficiencies
    ]  # fmt: skip
    done = simulate_sizes(read_trace(path), jobs, num_starts=num_starts)
    sizings = {name: figures_of(done[f"spot {name}"], done.on_demand_usd) for name in SIZINGS}
    return {"sizings": sizings, "processor_s": time.process_time() - began}


def figures_of(result: PolicyResult, on_demand_usd: float) -> dict[str, Any]:
    """Return the figures of one way to size the jobs."""
    hours = [
        result.percentile(partial(_finish_h, number), 0.5)
        for number in range(len(result.outcomes[0].job_finishes_s))
    ]
    share = result.mean_usd / on_demand_usd
    return {
        "cost_share": share,
        # JSON has no infinity.
        "median_hours": [None if math.isinf(one) else one for one in hours],
        "time_times_cost": None if math.isinf(max(hours)) else share * max(hours),
        "mean_workers": result.mean(lambda one: one.mean_workers),
    }


def _finish_h(job: int, one: Outcome) -> float:
    return one.job_finishes_s[job] / HOUR_S


def table_of(result: dict[str, Any]) -> str:
    """Format the figures as a Markdown table."""
    rows = [
        (title, *(_cell(case["sizings"][name]) for name in SIZINGS))
        for title, case in result["cases"].items()
    ]
    lines = [
        "Mean cost / cost on demand, median hours of each job, mean number of workers; "
        f"{result['num_starts']} runs each.",
        "",
        report.table(("trace, scaling efficiency of 16 workers", *SIZINGS), rows)
        if rows
        else "No trace was found.",
    ]
    return "\n".join([*lines, *(f"Skipped: {n}: {why}." for n, why in result["skipped"].items())])


def _cell(one: dict[str, Any]) -> str:
    hours = " and ".join("never" if h is None else f"{h:.1f} h" for h in one["median_hours"])
    return f"{one['cost_share']:.3f}, {hours}, {one['mean_workers']:.1f}"
