"""Cost and missed deadlines of capacity policies on recorded spot markets, in virtual time.

Each case is a job of 8 hours (4 on the recordings of one hour) on all its workers, with a deadline
that leaves a fifth of the time as slack. All policies start at the same random times. Spot machines
cost 30 % of the on-demand price. ``plugins.planner.simulation`` describes the simulation.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common import report
from etrain_jupyter.plugins.planner.simulation.job import SimulatedJob, usual_deadline_s
from etrain_jupyter.plugins.planner.simulation.policies import POLICIES, simulate
from etrain_jupyter.plugins.planner.simulation.trace_files import Gaps, read_trace

HOUR_S = 3600.0
TRACES = Path(__file__).parents[3] / "shared" / "data" / "traces"
GANG = "uniform-gang"
ELASTIC = ("deadline", "uniform")
"""Compared with the gang: ``keep`` of 0.5 and 1."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A trace and a job."""

    name: str
    file: str
    """Path below the folder of traces."""
    workers: int = 32
    hours: float = 8.0
    gaps: Gaps = "error"
    shortage: float = 0.0
    """Share of on-demand requests that are refused."""
    efficiency: float = 1.0


# parcae/p3.csv has the counts of bamboo/p3-trace.csv, so it is left out.
CASES = (
    Case(name="p3, 32 workers", file="bamboo/p3-trace.csv"),
    Case(name="p3, 16", file="bamboo/p3-trace.csv", workers=16),
    Case(name="p3, 8", file="bamboo/p3-trace.csv", workers=8),
    Case(name="p3, 84 % efficient", file="bamboo/p3-trace.csv", efficiency=0.84),
    Case(name="p3, on demand short 90 %", file="bamboo/p3-trace.csv", shortage=0.9),
    Case(name="p3, on demand short 97 %", file="bamboo/p3-trace.csv", shortage=0.97),
    Case(name="g4dn, 32", file="bamboo/g4dn-trace.csv"),
    Case(name="g4dn, 16", file="bamboo/g4dn-trace.csv", workers=16),
    Case(name="v100, 64", file="bamboo/v100x1-east1c.txt", workers=64),
    Case(name="a100, 64, gaps cut", file="bamboo/a100x1-east1b.txt", workers=64, gaps="cut"),
    Case(name="Parcae hh, 32", file="parcae/bert_trace_hh_55_65.txt", hours=4.0),
    Case(name="Parcae hl, 32", file="parcae/bert_trace_hl_15_25.txt", hours=4.0),
    Case(name="Parcae lh, 32", file="parcae/bert_trace_lh_80_90.txt", hours=4.0),
    Case(name="Parcae ll, 32", file="parcae/bert_trace_ll_10_11.txt", hours=4.0),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line options."""
    parser.add_argument("--traces", type=Path, default=TRACES, help="folder with the traces")
    parser.add_argument("--starts", type=int, help="runs per policy and case (30; quick: 4)")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Simulate every case whose trace exists."""
    num_starts = options.starts or (4 if options.quick else 30)
    cases: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    for case in CASES:
        path = options.traces / case.file
        if not path.is_file():
            skipped[case.name] = f"there is no {case.file} in the folder of traces (--traces)"
            print(f"policies: skipped {case.name}: {skipped[case.name]}", flush=True)
            continue
        cases[case.name] = run_case(case, path, num_starts)
        print(f"policies: {case.name}, {cases[case.name]['processor_s']:.0f} s", flush=True)
    worse = {
        policy: [name for name, one in cases.items() if policy in one["worse_than_gang"]]
        for policy in ELASTIC
    }
    return {
        "benchmark": "policies",
        "num_starts": num_starts,
        "cases": cases,
        "skipped": skipped,
        "worse_than_gang": worse,
    }


def run_case(case: Case, path: Path, num_starts: int) -> dict[str, Any]:
    """Simulate all policies on one trace."""
    began = time.process_time()
    job = SimulatedJob(
        workers=case.workers,
        duration_s=case.hours * HOUR_S,
        deadline_s=usual_deadline_s(case.hours * HOUR_S),
        on_demand_usd=1.0,
        spot_usd=0.3,
        efficiency=case.efficiency,
        shortage=case.shortage,
    )
    trace = replace(read_trace(path, gaps=case.gaps), name=case.name)
    done = simulate(trace, job, num_starts=num_starts)
    policies = {
        one.policy: {
            "cost_share": one.mean_usd / done.on_demand_usd,
            "late_share": one.late_share,
            "goodput": one.mean(lambda run: run.goodput),
        }
        for one in done.results
    }
    gang = policies[GANG]
    return {
        "policies": policies,
        "worse_than_gang": [
            policy
            for policy in ELASTIC
            if any(
                policies[policy][figure] > gang[figure] for figure in ("cost_share", "late_share")
            )
        ],
        "hours_simulated": sum(
            min(run.finish_s, job.horizon_s) / HOUR_S
            for one in done.results
            for run in one.outcomes
        ),
        "processor_s": time.process_time() - began,
    }


def table_of(result: dict[str, Any]) -> str:
    """Format the figures as a Markdown table."""
    rows = []
    for name, case in result["cases"].items():
        cells = [_cell(case["policies"][policy]) for policy in POLICIES]
        rows.append((name, *cells))
    hours = sum(case["hours_simulated"] for case in result["cases"].values())
    seconds = sum(case["processor_s"] for case in result["cases"].values())
    lines = [
        f"Mean cost / cost on demand (share of runs that missed the deadline); "
        f"{result['num_starts']} runs each.",
        "",
        report.table(("", *POLICIES), rows) if rows else "No trace was found.",
        "",
        *(
            f"Cases in which {policy} costs more or misses more than {GANG}: "
            f"{', '.join(worse) or 'none'}."
            for policy, worse in result["worse_than_gang"].items()
        ),
        f"{hours / 24:.0f} days simulated in {seconds:.0f} s of processor time.",
    ]
    lines += [f"Skipped: {name}: {why}." for name, why in result["skipped"].items()]
    return "\n".join(lines)


def _cell(policy: dict[str, float]) -> str:
    late = policy["late_share"]
    return f"{policy['cost_share']:.3f}" + (f" ({late:.2f})" if late else "")
