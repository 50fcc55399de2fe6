"""Throughput with several passes a step and one communication: ours beside DDP's ``no_sync``.

The same as ``steady`` but for the passes: ``batch.aggregation_frequency`` on our side, and on DDP's
all passes but the last under ``no_sync``. A step is the same 128 samples, a pass 16 on each of two
ranks. The figure is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from benchmarks import ours, report
from benchmarks.steady import WORLD_SIZE, alternate, run_ddp, run_ours
from benchmarks.workloads import GLOBAL_BATCH_SIZE, MODELS

NUM_PASSES = 4
BAR = 0.98
"""Lowest ratio that is good enough."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what can be chosen on the command line."""
    parser.add_argument("--pairs", type=int, help="rounds of runs a workload (default 5)")
    parser.add_argument("--steps", type=int, help="steps a run (default 400)")
    parser.add_argument(
        "--workload", choices=MODELS, action="append", help="default: all; quick: cnn"
    )


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every workload; the one with the lowest ratio stands at the top of the result."""
    num_pairs = options.pairs or (2 if options.quick else 5)
    num_steps = options.steps or (250 if options.quick else 400)
    workloads = {
        name: measure_workload(name, num_pairs, num_steps)
        for name in options.workload or (["cnn"] if options.quick else MODELS)
    }
    worst = min(workloads.values(), key=lambda result: float(result["ratio"]))
    return {
        "benchmark": "aggregation",
        "peer": f"torchrun DDP, no_sync {NUM_PASSES}",
        **{key: worst[key] for key in ("ratio", "ours", "ddp")},
        "bar": BAR,
        "workloads": workloads,
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
    ratios = [our / ddp for our, ddp in zip(rates["ours"], rates["ddp"], strict=True)]
    return {
        "ratio": statistics.median(ratios),
        "ours": statistics.median(rates["ours"]),
        "ddp": statistics.median(rates["ddp"]),
        "ratios": ratios,
        "rates": rates,
        "world_size": WORLD_SIZE,
        "steps": num_steps,
        "global_batch_size": GLOBAL_BATCH_SIZE,
        "aggregation_frequency": NUM_PASSES,
    }


def table_of(result: dict[str, Any]) -> str:
    """Return the table for the reader."""
    head = ("workload", "system", "samples/s", "ratio to DDP", "rounds")
    rows = []
    for name, found in result["workloads"].items():
        rounds = " ".join(f"{ratio:.3f}" for ratio in found["ratios"])
        rows.append((name, ours.NAME, f"{found['ours']:.0f}", f"{found['ratio']:.3f}", rounds))
        rows.append((name, result["peer"], f"{found['ddp']:.0f}", "1", str(len(found["ratios"]))))
    return report.table(head, rows)
