"""Cost of measuring the parts of every step: accounting on and off, in pairs of short blocks.

One job trains. All of its ranks turn the accounting on and off every few steps, in the order on,
off, off, on, so that each pair of neighboring blocks ran under the same load. The figure is the
median of the pairs' ratios with its confidence interval, for wall time and for processor time of
the trainer processes. Processor time is the more certain one on a machine that others use.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import ours, report
from benchmarks.accounting_job import BLOCK, FOLDER, PAIRS

WORLD_SIZE = 2
BAR = 0.005
"""Largest share of a step that the accounting may cost."""
TIMEOUT_S = 300.0
JOB = "benchmarks.accounting_job"
MODELS = {"small MLP": f"{JOB}:build_small", "cnn": "benchmarks.workloads:build_cnn"}
BATCHES = {"small MLP": 64, "cnn": 128}
STEPS = {"small MLP": 40, "cnn": 8}
"""Counted steps of a block: about 0.3 s, which is shorter than most changes of the load."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line options."""
    parser.add_argument("--pairs", type=int, help="pairs of blocks (default 150; quick: 20)")
    parser.add_argument("--model", choices=MODELS, action="append", help="default: all")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every model."""
    num_pairs = options.pairs or (20 if options.quick else 150)
    models = {name: run(name, num_pairs) for name in options.model or MODELS}
    return {
        "benchmark": "accounting",
        "bar": BAR,
        "num_pairs": num_pairs,
        "world_size": WORLD_SIZE,
        "models": models,
        "is_within_bar": all(
            one["cpu"]["ratio"] - 1 <= BAR and one["wall"]["low"] - 1 <= BAR
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
    """Return the ratios of the pairs of all ranks, and the time of a step without accounting.

    Args:
        ranks: The blocks of each rank, in order.
    """
    return {
        "step_s": statistics.median(one["wall_s"] for own in ranks for one in own),
        "wall": interval_of(mean_ratios(ranks, "wall_s")),
        "cpu": interval_of(mean_ratios(ranks, "cpu_s")),
    }


def mean_ratios(ranks: Sequence[Sequence[dict[str, Any]]], key: str) -> list[float]:
    """Return the time of a step with accounting by that without it, for each pair of blocks.

    The ranks run in lockstep, so their ratios are not independent: a pair has one ratio, that of
    the sums over the ranks.
    """
    ratios = []
    for blocks in zip(*ranks, strict=True):
        ratios.append((blocks[0]["is_on"], sum(one[key] for one in blocks)))
    pairs = zip(ratios[::2], ratios[1::2], strict=True)
    return [(a / b if first_is_on else b / a) for (first_is_on, a), (_, b) in pairs]


def interval_of(ratios: Sequence[float]) -> dict[str, float]:
    """Return the median and its 95 % confidence interval, which assumes no distribution.

    The number of ratios below the true median is binomial, so the interval is between two of the
    sorted ratios.

    >>> interval_of([1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6])
    {'ratio': 1.3, 'low': 1.0, 'high': 1.6}
    """
    ordered, count = sorted(ratios), len(ratios)
    below, outside = 0.0, 0
    while below + math.comb(count, outside) / 2**count <= 0.025:
        below += math.comb(count, outside) / 2**count
        outside += 1
    first = max(0, outside - 1)
    return {
        "ratio": statistics.median(ordered),
        "low": ordered[first],
        "high": ordered[count - 1 - first],
    }


def table_of(result: dict[str, Any]) -> str:
    """Format the figures as a Markdown table."""
    rows = [
        (name, f"{1e3 * one['step_s']:.2f} ms", *(_cell(one[key]) for key in ("wall", "cpu")))
        for name, one in result["models"].items()
    ]
    head = ("model", "step", "wall time", "processor time")
    return (
        f"Cost of the accounting, as a share of a step, with its 95 % confidence interval; "
        f"{result['num_pairs']} pairs of blocks. Bar: {BAR:.1%}.\n\n{report.table(head, rows)}"
    )


def _cell(one: dict[str, float]) -> str:
    ratio, low, high = one["ratio"], one["low"], one["high"]
    return f"{ratio - 1:+.2%} ({low - 1:+.2%} to {high - 1:+.2%})"
