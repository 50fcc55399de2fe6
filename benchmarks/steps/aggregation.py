"""Throughput of gradient accumulation, compared with DDP's ``no_sync``.

Like ``steady``, but each step takes four passes and one communication. etrain-jupyter uses
``batch.aggregation_frequency``; DDP runs all passes except the last under ``no_sync``. A step is
the same 128 samples; a pass is 16 samples on each of two ranks. The reported ratio is the median
over the rounds.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.common import ours, report
from benchmarks.common.workloads import GLOBAL_BATCH_SIZE
from benchmarks.steps.steady import (
    add_pair_arguments,
    alternate,
    figures_of,
    measure_workloads,
    run_ddp,
    run_ours,
)

NUM_PASSES = 4
BAR = 0.98
"""Minimum ratio to DDP that passes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line options."""
    add_pair_arguments(parser)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every workload and put the figures of the lowest ratio at the top of the result."""
    return {
        "benchmark": "aggregation",
        "peer": f"torchrun DDP, no_sync {NUM_PASSES}",
        **measure_workloads(options, measure_workload),
        "bar": BAR,
    }


def measure_workload(name: str, num_pairs: int, num_steps: int) -> dict[str, Any]:
    """Measure ``num_pairs`` rounds of one workload."""
    batch = {"global": GLOBAL_BATCH_SIZE, "aggregation_frequency": NUM_PASSES}
    rates = alternate(
        f"aggregation {name}",
        {
            "ours": lambda: run_ours(name, num_steps, batch=batch),
            "ddp": lambda: run_ddp(name, num_steps, f"--aggregation={NUM_PASSES}"),
        },
        num_pairs,
    )
    return {**figures_of(rates, num_steps), "aggregation_frequency": NUM_PASSES}


def table_of(result: dict[str, Any]) -> str:
    """Format the figures as a Markdown table."""
    head = ("workload", "system", "samples/s", "ratio to DDP", "rounds")
    rows = []
    for name, found in result["workloads"].items():
        rounds = " ".join(f"{ratio:.3f}" for ratio in found["ratios"])
        rows.append((name, ours.NAME, f"{found['ours']:.0f}", f"{found['ratio']:.3f}", rounds))
        rows.append((name, result["peer"], f"{found['ddp']:.0f}", "1", str(len(found["ratios"]))))
    return report.table(head, rows)
