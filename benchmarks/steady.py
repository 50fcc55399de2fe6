"""Throughput while nothing happens: what elasticity costs those who do not need it.

Two ranks, one thread each. Pairs of runs, ours and plain DDP, in alternating order; the figure is
the median of the pairs' ratios, so that what else the machine does in the meantime falls out.
Each side tells when each of its steps was done; the second half counts. That leaves start-up out,
and the spare trainers that our workers start some seconds after a job's first step. Our cluster is
ended before the peer runs, so that the peer does not even pay for its heartbeats.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import ours, report
from benchmarks.workloads import GLOBAL_BATCH_SIZE, MODELS

WORLD_SIZE = 2
ROOT = Path(__file__).parents[1]
PEER_TIMEOUT_S = 600


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what can be chosen on the command line."""
    parser.add_argument("--pairs", type=int, help="pairs of runs a workload (default 5)")
    parser.add_argument("--steps", type=int, help="steps a run (default 400)")
    parser.add_argument("--workload", choices=MODELS, action="append", help="default: all")
    parser.add_argument("--loader", action="store_true", help="the peer reads through DataLoader")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every workload; the one with the lowest ratio stands at the top of the result."""
    num_pairs = options.pairs or (2 if options.quick else 5)
    num_steps = options.steps or (250 if options.quick else 400)
    workloads = {
        name: measure_workload(name, num_pairs, num_steps, loader=options.loader)
        for name in options.workload or MODELS
    }
    worst = min(workloads.values(), key=lambda result: float(result["ratio"]))
    peer = "torchrun DDP, DataLoader" if options.loader else "torchrun DDP, tensors by index"
    headline = {key: worst[key] for key in ("ratio", "ours", "ddp")}
    return {"benchmark": "steady", "peer": peer, **headline, "workloads": workloads}


def measure_workload(
    name: str, num_pairs: int, num_steps: int, *, loader: bool = False
) -> dict[str, Any]:
    """Measure ``num_pairs`` pairs of runs of one workload."""
    sides: dict[str, Callable[[], float]] = {
        "ours": lambda: run_ours(name, num_steps),
        "ddp": lambda: run_ddp(name, num_steps, loader=loader),
    }
    rates: dict[str, list[float]] = {"ours": [], "ddp": []}
    for pair in range(num_pairs):
        for side in sorted(sides, reverse=pair % 2 == 1):
            rate = sides[side]()
            rates[side].append(rate)
            print(
                f"steady {name}, pair {pair + 1}/{num_pairs}, {side}: {rate:.0f} samples/s",
                flush=True,
            )
    ratios = [mine / theirs for mine, theirs in zip(rates["ours"], rates["ddp"], strict=True)]
    return {
        "ratio": statistics.median(ratios),
        "ours": statistics.median(rates["ours"]),
        "ddp": statistics.median(rates["ddp"]),
        "ratios": ratios,
        "rates": rates,
        "world_size": WORLD_SIZE,
        "steps": num_steps,
        "global_batch_size": GLOBAL_BATCH_SIZE,
    }


def run_ours(name: str, num_steps: int) -> float:
    """Train with etrain-jupyter; return samples a second."""
    with ours.cluster():
        job = ours.submit(name, num_steps=num_steps, world_size=WORLD_SIZE)
        job.result()
    # A step of a generation that is still filling up is start-up.
    whole = [step for step in ours.steps_of(job) if step.world_size == WORLD_SIZE]
    return report.steady_rate([step.time for step in whole], GLOBAL_BATCH_SIZE)


def run_ddp(name: str, num_steps: int, *, loader: bool = False) -> float:
    """Train with ``torchrun`` and plain DDP; return samples a second."""
    with tempfile.TemporaryDirectory() as folder:
        times = Path(folder) / "times.json"
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        script = [f"--nproc-per-node={WORLD_SIZE}", "-m", "benchmarks.peers.ddp_train"]
        choice = [f"--workload={name}", f"--steps={num_steps}", f"--json={times}"]
        subprocess.run(
            [*launch, *script, *choice, *(["--loader"] if loader else [])],
            check=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            timeout=PEER_TIMEOUT_S,
        )
        done = json.loads(times.read_text(encoding="utf-8"))["times"]
    return report.steady_rate(done, GLOBAL_BATCH_SIZE)


def table_of(result: dict[str, Any]) -> str:
    """Return the table for the reader."""
    head = ("workload", "ours, samples/s", f"{result['peer']}, samples/s", "ratio", "pairs")
    return report.table(
        head,
        [
            (
                name,
                f"{found['ours']:.0f}",
                f"{found['ddp']:.0f}",
                f"{found['ratio']:.3f}",
                " ".join(f"{ratio:.3f}" for ratio in found["ratios"]),
            )
            for name, found in result["workloads"].items()
        ],
    )
