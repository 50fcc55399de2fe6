"""Training stall caused by a checkpoint, compared with ``torch.save`` and ``async_save``.

Two ranks train with SGD and momentum, so the state is twice the size of the weights. They save
checkpoints at a fixed interval to a local folder. ``stall_s`` is the time for which saving blocks
training on rank 0: copying the state for etrain-jupyter and ``async_save``, writing the whole file
for ``torch.save``. ``cost_s`` also covers the background write: it is the total time of all steps,
minus the time of the same number of median steps, divided by the number of checkpoints.
etrain-jupyter also syncs every file, reads it back and verifies its SHA-256; the peers do not.

``ours_s3`` saves to an S3 server in a separate process on the same machine (moto, in memory). Both
ranks write to it. The server's own CPU time counts in ``cost_s``, not in ``stall_s``.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.common import ours, report
from benchmarks.common.workloads import LARGE_MODELS
from benchmarks.peers.run import python_path
from benchmarks.steps.steady import PEER_TIMEOUT_S, WORLD_SIZE
from etrain_jupyter.log.events import CheckpointCommitted
from etrain_jupyter.testing.s3_server import S3Server

EVERY = {"mlp": 12, "wide": 6}
"""Steps between two checkpoints, by workload."""
NUM_WARM = 2
"""Checkpoint intervals to discard: they include start-up."""
NAMES = {
    "ours": ours.NAME,
    "ours_s3": f"{ours.NAME}, S3",
    "async": "DDP, async_save",
    "save": "DDP, torch.save",
}

Run = dict[str, list[float]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line options."""
    parser.add_argument("--rounds", type=int, help="rounds per workload (default 3)")
    parser.add_argument("--checkpoints", type=int, help="measured checkpoints per run (default 6)")
    parser.add_argument("--side", choices=NAMES, action="append", help="default: all")
    parser.add_argument("--workload", choices=LARGE_MODELS, action="append", help="default: both")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every workload; put the largest state's figures at the top of the result."""
    num_rounds = options.rounds or (1 if options.quick else 3)
    count = options.checkpoints or (3 if options.quick else 6)
    workloads = {
        name: measure_workload(name, num_rounds, count, options.side or list(NAMES))
        for name in options.workload or (["mlp"] if options.quick else LARGE_MODELS)
    }
    last = list(workloads.values())[-1]
    return {
        "benchmark": "checkpoint",
        "stall_s": last["systems"].get("ours", {}).get("stall_s"),
        "ratio_to_async_save": last["ratio_to_async_save"],
        "workloads": workloads,
    }


def measure_workload(
    name: str, num_rounds: int, count: int, chosen: Collection[str]
) -> dict[str, Any]:
    """Measure ``count`` checkpoints per run, running the sides in alternating order."""
    num_steps = EVERY[name] * (NUM_WARM + count + 1)
    sides: dict[str, Callable[[], Run]] = {
        "ours": lambda: run_ours(name, num_steps),
        "ours_s3": lambda: run_ours_on_s3(name, num_steps),
    }
    for how in ("async", "save"):
        sides[how] = functools.partial(run_peer, name, how, num_steps)
    sides = {side: run for side, run in sides.items() if side in chosen}
    runs: dict[str, list[Run]] = {side: [] for side in sides}
    for number in range(num_rounds):
        for side in sorted(sides, reverse=number % 2 == 1):
            runs[side].append(sides[side]())
            stall = statistics.median(runs[side][-1]["stalls"])
            head = f"checkpoint {name}, round {number + 1}/{num_rounds}"
            print(f"{head}, {side}: {stall * 1000:.0f} ms", flush=True)
    medians = {side: [statistics.median(run["stalls"]) for run in runs[side]] for side in runs}
    both = zip(medians.get("ours", ()), medians.get("async", ()), strict=False)
    ratios = [mine / other for mine, other in both]
    return {
        "systems": {side: summary_of(runs[side]) for side in runs},
        "ratio_to_async_save": statistics.median(ratios) if ratios else None,
        "num_parameters": sum(p.numel() for p in LARGE_MODELS[name]().parameters()),
        "world_size": WORLD_SIZE,
        "steps": num_steps,
        "every": EVERY[name],
        "rounds": num_rounds,
    }


def summary_of(runs: list[Run]) -> dict[str, Any]:
    """Summarize all runs of one side."""
    stalls = [stall for run in runs for stall in run["stalls"]]
    return {
        "stall_s": statistics.median(stalls),
        "stall_p95_s": report.percentile(stalls, 0.95),
        "cost_s": statistics.median(cost_of(run) for run in runs),
        "step_s": statistics.median(d for run in runs for d in durations(run["times"])),
        "stalls": stalls,
    }


def cost_of(run: Run) -> float:
    """Return the extra seconds per checkpoint, relative to median steps."""
    each = durations(run["times"])
    return (sum(each) - len(each) * statistics.median(each)) / len(run["stalls"])


def durations(times: list[float]) -> list[float]:
    """Return the duration of each step.

    >>> durations([1.0, 1.5, 3.0])
    [0.5, 1.5]
    """
    return [after - before for before, after in itertools.pairwise(times)]


def counted(times: list[float], stalls: dict[int, float], every: int) -> Run:
    """Discard start-up and everything after the last complete interval.

    Args:
        times: Completion time of each step, from step 1.
        stalls: Seconds of stall, by step.
        every: Steps between two checkpoints.
    """
    first, last = every * (NUM_WARM + 1), len(times)
    kept = [stall for step, stall in stalls.items() if first <= step < last]
    return {"times": times[first - 1 :], "stalls": kept}


def run_ours_on_s3(name: str, num_steps: int) -> Run:
    """Train with checkpoints in a bucket on this machine."""
    with S3Server() as server, patch.dict(os.environ, server.environment):
        server.make_bucket("bench")
        return run_ours(name, num_steps, to="s3://bench/runs")


def run_ours(name: str, num_steps: int, to: str | None = None) -> Run:
    """Train with etrain-jupyter, keeping only the newest checkpoint, as the peers do."""
    with ours.cluster():
        job = ours.submit(
            name,
            num_steps=num_steps,
            world_size=WORLD_SIZE,
            workers={"min": WORLD_SIZE, "max": WORLD_SIZE},
            checkpoint={"every": f"{EVERY[name]} steps", "keep": 1, "to": to},
        )
        job.result()
    saved = [event for event in job.events() if isinstance(event, CheckpointCommitted)]
    times = [step.time for step in ours.steps_of(job)]
    return counted(times, {event.step: event.stall_s for event in saved}, EVERY[name])


def run_peer(name: str, how: str, num_steps: int) -> Run:
    """Train with ``torchrun`` and DDP; ``how`` selects the way to save."""
    with tempfile.TemporaryDirectory(prefix="etrain-bench-") as folder:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        agent = [f"--nproc-per-node={WORLD_SIZE}", f"--log-dir={folder}"]
        script = ["-m", "benchmarks.peers.checkpoint_train"]
        choice = [f"--workload={name}", f"--how={how}", f"--steps={num_steps}"]
        subprocess.run(
            [*launch, *agent, *script, *choice, f"--every={EVERY[name]}", f"--folder={folder}"],
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()},
            timeout=PEER_TIMEOUT_S,
        )
        result = json.loads((Path(folder) / "result.json").read_text(encoding="utf-8"))
    return counted(result["times"], dict(result["stalls"]), EVERY[name])


def table_of(result: dict[str, Any]) -> str:
    """Format the figures as a Markdown table."""
    head = ("parameters", "system", "stall, ms", "p95", "cost, ms", "ordinary step, ms")
    rows = []
    for found in result["workloads"].values():
        for side, figures in found["systems"].items():
            keys = ("stall_s", "stall_p95_s", "cost_s", "step_s")
            shown = [f"{figures[key] * 1000:.0f}" for key in keys]
            size = f"{found['num_parameters'] / 1e6:.0f} M"
            rows.append((size, NAMES[side], *shown))
    return report.table(head, rows)
