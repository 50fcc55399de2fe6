"""Time from submitting a job to its first step, on an idle pool and right after another job.

The two cases alternate, so that other load on the machine affects both. All jobs run on two workers
that already exist. A job is short, because only its start is measured.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from benchmarks.common import ours, report
from etrain_jupyter.log.events import TERMINAL_STATUSES

WORLD_SIZE = 2
REST_S = 8.0
"""Pause before a job on an idle pool."""
NUM_STEPS = 3
END_S = 120.0
CASES = ("idle pool", "right after a job")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line options."""
    parser.add_argument("--jobs", type=int, help="jobs per case (default 10)")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Submit jobs in both cases, in turns."""
    count = options.jobs or (5 if options.quick else 10)
    times: dict[str, list[float]] = {case: [] for case in CASES}
    with ours.cluster():
        start_once()  # starts the cluster
        for _ in range(count):
            for case in CASES:
                if case == "idle pool":
                    time.sleep(REST_S)
                times[case].append(start_once())
                print(f"starts {case}: {times[case][-1] * 1e3:.0f} ms", flush=True)
    return {"benchmark": "starts", "jobs": count} | {
        case: {**report.median_and_p95(found), "times": found} for case, found in times.items()
    }


def start_once() -> float:
    """Run a job, and return the time from the call to its first committed step."""
    started = time.time()
    job = ours.submit(
        "cnn",
        num_steps=NUM_STEPS,
        world_size=WORLD_SIZE,
        workers={"min": WORLD_SIZE, "max": WORLD_SIZE},
    )
    deadline = time.monotonic() + END_S
    while job.status not in TERMINAL_STATUSES:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{job!r} did not end within {END_S:.0f} s")
        time.sleep(0.01)  # the next job must follow at once
    return ours.steps_of(job)[0].time - started


def table_of(result: dict[str, Any]) -> str:
    """Return a table with a row per case."""
    rows = [
        [case, *(f"{result[case][key] * 1e3:.0f}" for key in ("median_s", "p95_s"))]
        for case in CASES
    ]
    return report.table(["submitted", "median, ms", "p95, ms"], rows)
