"""Throughput while nothing happens: what elasticity costs those who do not need it.

Two ranks, one thread each. Rounds of runs, ours and every peer's, in alternating order; the figure
is the median of the rounds' ratios to plain DDP, so that what else the machine does in the meantime
falls out. Each side tells when each of its steps was done; the second half counts. That leaves
start-up out, and the spare trainers that our workers start some seconds after a job's first step.
A cluster is ended before the next system runs, so that nobody pays for another's heartbeats.
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

from benchmarks import ours, report
from benchmarks.peers.run import last_whole, python_path
from benchmarks.peers.systems import System, new_task, runnable
from benchmarks.step_log import committed_at
from benchmarks.workloads import GLOBAL_BATCH_SIZE, MODELS

WORLD_SIZE = 2
PEER_TIMEOUT_S = 600.0
POLL_S = 0.5
"""Seldom: the files are read on the cores that train."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what can be chosen on the command line."""
    add_pair_arguments(parser)
    parser.add_argument("--loader", action="store_true", help="DDP reads through DataLoader")
    parser.add_argument("--no-peers", action="store_true", help="ours and plain DDP alone")


def add_pair_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what every benchmark that compares rounds of two sides lets choose."""
    parser.add_argument("--pairs", type=int, help="rounds of runs a workload (default 5)")
    parser.add_argument("--steps", type=int, help="steps a run (default 400)")
    parser.add_argument(
        "--workload", choices=MODELS, action="append", help="default: all; quick: cnn"
    )


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every workload; the one with the lowest ratio stands at the top of the result."""
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
    """Measure the chosen workloads and put the figures of the worst beside them.

    Args:
        options: What ``add_pair_arguments`` declared, and ``quick``.
        measure_one: Takes a workload's name, the number of rounds and that of the steps of a run.
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
    """Return what the rounds say of our side beside DDP.

    Args:
        rates: Samples a second of each round, by side; ``ours`` and ``ddp`` are among them.
        num_steps: Steps of a run.
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
    """Return the ratio of each round."""
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
    """Train with etrain-jupyter, perhaps with further keys; return samples a second."""
    with ours.cluster():
        job = ours.submit(name, num_steps=num_steps, world_size=WORLD_SIZE, **keys)
        job.result()
    # A step of a generation that is still filling up is start-up.
    whole = [step for step in ours.steps_of(job) if step.world_size == WORLD_SIZE]
    return report.steady_rate([step.time for step in whole], GLOBAL_BATCH_SIZE)


def run_ddp(name: str, num_steps: int, *more: str) -> float:
    """Train with ``torchrun`` and plain DDP, which writes nothing; return samples a second."""
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
    """Train with a peer that is never disturbed and never saves; return samples a second."""
    with tempfile.TemporaryDirectory(prefix="etrain-bench-") as parent:
        task = new_task(Path(parent), workload=name, num_steps=num_steps, world_size=WORLD_SIZE)
        run = system.start(task)
        with run:
            deadline = time.monotonic() + PEER_TIMEOUT_S
            while run.history().newest_step < num_steps:
                run.check()
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{system.name} took too long; output:\n{run.output()}")
                time.sleep(POLL_S)
        whole = last_whole(run.history(), WORLD_SIZE)
    return report.steady_rate([committed_at(done) for done in whole], GLOBAL_BATCH_SIZE)


def table_of(result: dict[str, Any]) -> str:
    """Return the table for the reader."""
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
