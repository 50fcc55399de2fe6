"""Throughput without faults: the overhead of elasticity, compared with plain DDP.

Two ranks, one thread each. Each round runs all systems once, in alternating order. The reported
figure is the median over the rounds of the ratio to plain DDP, which reduces the effect of other
load on the machine. Each side records the completion time of every step, and the second half of the
steps counts. That excludes start-up. A system is shut down completely before the next one starts.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import ours, report
from benchmarks.common.step_log import committed_at
from benchmarks.common.workloads import GLOBAL_BATCH_SIZE, MODELS
from benchmarks.peers.run import last_whole, python_path
from benchmarks.peers.systems import System, new_task, runnable

WORLD_SIZE = 2
PEER_TIMEOUT_S = 600.0
POLL_S = 0.5
"""Poll rarely, because reading the step logs uses the cores that train."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line options."""
    add_pair_arguments(parser)
    parser.add_argument("--loader", action="store_true", help="let DDP read through DataLoader")
    parser.add_argument("--no-peers", action="store_true", help="only etrain-jupyter and plain DDP")


def add_pair_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of benchmarks that compare two sides in rounds."""
    parser.add_argument("--pairs", type=int, help="rounds per workload (default 5)")
    parser.add_argument("--steps", type=int, help="steps per run (default 400)")
    parser.add_argument(
        "--workload", choices=MODELS, action="append", help="default: all; quick: cnn"
    )


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every workload and put the figures of the lowest ratio at the top of the result."""
    systems, skipped = ([], {}) if options.no_peers else runnable(survivors=True)
    measure_one = functools.partial(measure_workload, systems=systems, loader=options.loader)
    return {
        "benchmark": "steady",
        "peer": f"torchrun DDP, {'DataLoader' if options.loader else 'tensors by index'}",
        **measure_workloads(options, measure_one),
        "skipped": skipped,
        "versions": {system.name: system.version() for system in systems},
    }


def measure_workloads(
    options: argparse.Namespace, measure_one: Callable[[str, int, int], dict[str, Any]]
) -> dict[str, Any]:
    """Measure the chosen workloads and add the figures of the one with the lowest ratio.

    Args:
        options: The options of ``add_pair_arguments``, and ``quick``.
        measure_one: Measures a workload, given its name, the number of rounds and the steps per
            run.
    """
    num_pairs = options.pairs or (2 if options.quick else 5)
    num_steps = options.steps or (250 if options.quick else 400)
    workloads = {
        name: measure_one(name, num_pairs, num_steps)
        for name in options.workload or (["cnn"] if options.quick else MODELS)
    }
    worst = min(workloads.values(), key=lambda result: float(result["ratio"]))
    return {**{key: worst[key] for key in ("ratio", "ours", "ddp")}, "workloads": workloads}


def measure_workload(
    name: str, num_pairs: int, num_steps: int, *, systems: list[System], loader: bool = False
) -> dict[str, Any]:
    """Measure ``num_pairs`` rounds of one workload."""
    sides: dict[str, Callable[[], float]] = {
        "ours": lambda: run_ours(name, num_steps),
        "ddp": lambda: run_ddp(name, num_steps, *(["--loader"] if loader else [])),
    }
    for system in systems:
        sides[system.name] = functools.partial(run_peer, system, name, num_steps)
    rates = alternate(f"steady {name}", sides, num_pairs)
    return {
        **figures_of(rates, num_steps),
        "peers": {
            system.name: {
                "rate": statistics.median(rates[system.name]),
                "ratio": statistics.median(ratios_to_ddp(rates, system.name)),
            }
            for system in systems
        },
    }


def figures_of(rates: dict[str, list[float]], num_steps: int) -> dict[str, Any]:
    """Compare etrain-jupyter with DDP over all rounds.

    Args:
        rates: Samples per second of each round, by side, including ``ours`` and ``ddp``.
        num_steps: Steps per run.
    """
    ratios = ratios_to_ddp(rates, "ours")
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


def ratios_to_ddp(rates: dict[str, list[float]], side: str) -> list[float]:
    """Return the ratio of one side to DDP in each round."""
    return [rate / ddp for rate, ddp in zip(rates[side], rates["ddp"], strict=True)]


def alternate(
    title: str, sides: dict[str, Callable[[], float]], num_pairs: int
) -> dict[str, list[float]]:
    """Run all sides ``num_pairs`` times, in alternating order; return the rates of each."""
    rates: dict[str, list[float]] = {side: [] for side in sides}
    for pair in range(num_pairs):
        for side in sorted(sides, reverse=pair % 2 == 1):
            rates[side].append(sides[side]())
            head = f"{title}, round {pair + 1}/{num_pairs}"
            print(f"{head}, {side}: {rates[side][-1]:.0f} samples/s", flush=True)
    return rates


def run_ours(name: str, num_steps: int, **keys: Any) -> float:
    """Train with etrain-jupyter, with optional extra keys; return samples per second."""
    with ours.cluster():
        job = ours.submit(name, num_steps=num_steps, world_size=WORLD_SIZE, **keys)
        job.result()
    # Steps of generations that are not yet at full size are part of start-up.
    whole = [step for step in ours.steps_of(job) if step.world_size == WORLD_SIZE]
    return report.steady_rate([step.time for step in whole], GLOBAL_BATCH_SIZE)


def run_ddp(name: str, num_steps: int, *more: str) -> float:
    """Train with ``torchrun`` and plain DDP, without logging; return samples per second."""
    with tempfile.TemporaryDirectory() as folder:
        times = Path(folder) / "times.json"
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        agent = [f"--nproc-per-node={WORLD_SIZE}", f"--log-dir={folder}"]
        script = ["-m", "benchmarks.peers.ddp_train"]
        choice = [f"--workload={name}", f"--steps={num_steps}", f"--json={times}"]
        subprocess.run(
            [*launch, *agent, *script, *choice, *more],
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()},
            timeout=PEER_TIMEOUT_S,
        )
        done = json.loads(times.read_text(encoding="utf-8"))["times"]
    return report.steady_rate(done, GLOBAL_BATCH_SIZE)


def run_peer(system: System, name: str, num_steps: int) -> float:
    """Train with a peer, without kills or checkpoints; return samples per second."""
    with tempfile.TemporaryDirectory(prefix="etrain-bench-") as parent:
        task = new_task(Path(parent), workload=name, num_steps=num_steps, world_size=WORLD_SIZE)
        run = system.start(task)
        with run:
            deadline = time.monotonic() + PEER_TIMEOUT_S
            while run.history().newest_step < num_steps:
                run.check()
                if time.monotonic() > deadline:
                    waited = f"{system.name} timed out after {PEER_TIMEOUT_S:.0f} s"
                    raise TimeoutError(f"{waited}; output:\n{run.output()}")
                time.sleep(POLL_S)
        whole = last_whole(run.history(), WORLD_SIZE)
    return report.steady_rate([committed_at(done) for done in whole], GLOBAL_BATCH_SIZE)


def table_of(result: dict[str, Any]) -> str:
    """Format the figures as a Markdown table."""
    head = ("workload", "system", "samples/s", "ratio to DDP", "rounds")
    rows = []
    for name, found in result["workloads"].items():
        rates = found["rates"]["ours"]
        rounds = " ".join(f"{ratio:.3f}" for ratio in found["ratios"])
        rows.append((name, ours.NAME, f"{found['ours']:.0f}", f"{found['ratio']:.3f}", rounds))
        rows.append((name, result["peer"], f"{found['ddp']:.0f}", "1", str(len(rates))))
        for peer, figures in found["peers"].items():
            rate, ratio = f"{figures['rate']:.0f}", f"{figures['ratio']:.3f}"
            rows.append((name, peer, rate, ratio, str(len(rates))))
    rows += [("all", name, f"not run: {why}", "-", "-") for name, why in result["skipped"].items()]
    return report.table(head, rows)
