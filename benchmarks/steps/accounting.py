"""Cost of measuring the parts of every step: accounting on and off, in pairs of short blocks.

One job trains. All of its ranks turn the accounting on and off every few steps, in the order on,
off, off, on, so that each pair of neighboring blocks ran under the same load. The figures are the
medians of the pairs' ratios and differences with their confidence intervals, for wall time and for
processor time of the trainer processes. Processor time is the more certain one on a machine that
others use.

The accounting makes the same calls in a step of any length, so the difference in the shortest step
shows its cost in microseconds, with a narrower interval than a share of a long step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import ours, report
from benchmarks.steps.accounting_job import BLOCK, FOLDER, PAIRS

WORLD_SIZE = 2
BAR = 0.005
"""Largest share of a step that the accounting may cost."""
TIMEOUT_S = 300.0
JOB = "benchmarks.steps.accounting_job"
MODELS = {
    "linear": f"{JOB}:build_linear",
    "small MLP": f"{JOB}:build_small",
    "cnn": "benchmarks.common.workloads:build_cnn",
}
BATCHES = {"linear": 4, "small MLP": 64, "cnn": 128}
STEPS = {"linear": 21, "small MLP": 15, "cnn": 5}
"""Counted steps of a block: 0.1 to 0.2 s, which is shorter than most changes of the load."""
NUM_PAIRS = {"linear": 800, "small MLP": 700, "cnn": 200}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line options."""
    parser.add_argument("--pairs", type=int, help="pairs of blocks (default 200 to 800; quick: 20)")
    parser.add_argument("--model", choices=MODELS, action="append", help="default: all")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every model."""
    models = {
        name: run(name, options.pairs or (20 if options.quick else NUM_PAIRS[name]))
        for name in options.model or MODELS
    }
    return {
        "benchmark": "accounting",
        "bar": BAR,
        "world_size": WORLD_SIZE,
        "models": models,
        "is_within_bar": all(
            one["cpu"]["median"] - 1 <= BAR and one["wall"]["low"] - 1 <= BAR
            for one in models.values()
        ),
    }


def run(name: str, num_pairs: int) -> dict[str, Any]:
    """Train one model on two ranks, and compare the blocks of each rank."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {FOLDER: folder, BLOCK: str(STEPS[name]), PAIRS: str(num_pairs)}
        with ours.cluster():
            job = ours.submit(
                "accounting", num_steps=ours.NEVER, world_size=WORLD_SIZE, model=MODELS[name],
                loss=f"{JOB}:switching_loss", batch={"global": BATCHES[name]},
                workers={"min": WORLD_SIZE, "max": WORLD_SIZE},
            )  # fmt: skip
            deadline = time.monotonic() + TIMEOUT_S + num_pairs
            paths: list[Path] = []
            while len(paths) < WORLD_SIZE:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{job!r} measured no {num_pairs} pairs of blocks in time")
                time.sleep(0.5)
                paths = sorted(Path(folder).glob("*.json"))
            ranks = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
            job.stop(now=True)
            job.wait()
    return result_of(ranks)


def result_of(ranks: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """Return the ratios and differences of the pairs of all ranks, and the time of a step.

    Args:
        ranks: The blocks of each rank, in order.
    """
    wall, cpu = (pairs_of(ranks, key) for key in ("wall_s", "cpu_s"))
    return {
        "num_pairs": len(cpu),
        "step_s": statistics.median(one["wall_s"] for own in ranks for one in own),
        "wall": report.interval_of([on / off for on, off in wall]),
        "cpu": report.interval_of([on / off for on, off in cpu]),
        "cpu_us": report.interval_of([1e6 * (on - off) for on, off in cpu]),
    }


def pairs_of(ranks: Sequence[Sequence[dict[str, Any]]], key: str) -> list[tuple[float, float]]:
    """Return the time of a step with accounting and that without it, for each pair of blocks.

    The ranks run in lockstep, so their times are not independent: a pair has one value for each
    setting, the mean over the ranks.
    """
    means = []
    for blocks in zip(*ranks, strict=True):
        means.append((blocks[0]["is_on"], statistics.fmean(one[key] for one in blocks)))
    pairs = zip(means[::2], means[1::2], strict=True)
    return [(a, b) if first_is_on else (b, a) for (first_is_on, a), (_, b) in pairs]


def table_of(result: dict[str, Any]) -> str:
    """Format the figures as a Markdown table."""
    rows = [
        (
            name, f"{1e3 * one['step_s']:.2f} ms", str(one["num_pairs"]),
            *(_share(one[key]) for key in ("wall", "cpu")), _microseconds(one["cpu_us"]),
        )
        for name, one in result["models"].items()
    ]  # fmt: skip
    head = ("model", "step", "pairs", "wall time", "processor time", "processor time of a rank, us")
    return (
        f"Cost of the accounting in a step, with its 95 % confidence interval. Bar: {BAR:.1%}.\n\n"
        f"{report.table(head, rows)}"
    )


def _share(one: dict[str, float]) -> str:
    median, low, high = (one[key] - 1 for key in ("median", "low", "high"))
    return f"{median:+.2%} ({low:+.2%} to {high:+.2%})"


def _microseconds(one: dict[str, float]) -> str:
    return f"{one['median']:+.1f} ({one['low']:+.1f} to {one['high']:+.1f})"
