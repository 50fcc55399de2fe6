"""Throughput without faults in pairs of short blocks: etrain-jupyter next to plain DDP.

Both jobs run all the time, and take turns at a gate in their loss (``gate.py``): one trains a block
of about a second while the other is blocked without using a processor. The two blocks of a pair run
under nearly the same load, and the order within a pair alternates. The figure is the median of the
pairs' ratios with its 95 % confidence interval, for wall time and for processor time.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import gate, ours, report
from benchmarks.common.gate import Gate
from benchmarks.common.workloads import GLOBAL_BATCH_SIZE, MODELS, PHOTOS
from benchmarks.peers.run import python_path
from etrain_jupyter.log.events import TERMINAL_STATUSES

BAR = 0.98
SIDE = "PAIRED_SIDE"
"""Variable with the name of the side, in the environment of all of its processes."""
READY_S = 180.0
"""Limit for a side's start and its first steps, in seconds."""
STEPS = {"cnn": 24, "mlp": 10, PHOTOS: 10}
"""Steps of a block: about a second on two ranks."""
KINDS = ("trainer", "worker", "head", "fork_server")
"""Processes of a job, by a word of their command line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line options."""
    parser.add_argument("--pairs", type=int, help="pairs of blocks (default 60; quick: 10)")
    parser.add_argument("--world-size", type=int, default=2, help="ranks of each side (default 2)")
    help = f"default: {' and '.join(MODELS)}; {PHOTOS} needs torchvision"
    parser.add_argument("--workload", choices=[*MODELS, PHOTOS], action="append", help=help)
    help = f"data-loading processes per rank of the workload {PHOTOS} (default 0)"
    parser.add_argument("--num-workers", type=int, default=0, help=help)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every workload and put the figures of the lowest ratio at the top of the result."""
    num_pairs = options.pairs or (10 if options.quick else 60)
    names = options.workload or (["cnn"] if options.quick else list(MODELS))
    workloads = {
        name: measure_workload(name, num_pairs, options.world_size, options.num_workers)
        for name in names
    }
    worst = min(workloads.values(), key=lambda result: float(result["ratio"]))
    return {
        "benchmark": "paired",
        "peer": "torchrun DDP",
        "bar": BAR,
        **{key: worst[key] for key in ("ratio", "low", "high", "ours", "ddp")},
        "world_size": options.world_size,
        "num_pairs": num_pairs,
        "workloads": workloads,
    }


@dataclass(frozen=True, kw_only=True)
class Block:
    """One block of a side."""

    wall_s: float
    """Duration, from the grant until the last rank has arrived, in seconds."""
    cpu_s: dict[str, float]
    """Processor time of the side's processes, in seconds, by kind of process."""


def measure_workload(
    name: str, num_pairs: int, world_size: int, num_workers: int
) -> dict[str, Any]:
    """Run the pairs of blocks of one workload."""
    num_steps = STEPS[name]
    with (
        tempfile.TemporaryDirectory(prefix="etrain-paired-") as folder,
        running_ddp(name, Path(folder) / "ddp", world_size, num_workers) as ddp,
        running_ours(name, Path(folder) / "ours", world_size, num_workers) as own,
    ):
        sides = {"ours": own, "ddp": ddp}
        for side in sides.values():
            side.gate.wait(side.check, READY_S)
        blocks: dict[str, list[Block]] = {side: [] for side in sides}
        for pair in range(-1, num_pairs):  # the first pair does not count
            for key in sorted(sides, reverse=pair % 2 == 1):
                block = sides[key].run(num_steps)
                if pair >= 0:
                    blocks[key].append(block)
    return figures_of(blocks, num_steps)


@dataclass(frozen=True, kw_only=True)
class Side:
    """A running job at its gate."""

    name: str
    gate: Gate
    check: Callable[[], None]
    """Raises an error if the job has ended."""

    def run(self, num_steps: int) -> Block:
        """Let the job train a block."""
        before = processor_times(self.name)
        wall_s = self.gate.run(num_steps, self.check)
        after = processor_times(self.name)
        used = {pid: after[pid][1] - before.get(pid, ("", 0.0))[1] for pid in after}
        kinds = {kind for kind, _ in after.values()}
        return Block(
            wall_s=wall_s,
            cpu_s={
                kind: sum(used[pid] for pid in after if after[pid][0] == kind)
                for kind in sorted(kinds)
            },
        )


def processor_times(side: str) -> dict[int, tuple[str, float]]:
    """Return the kind and the processor time so far, in seconds, of each process of a side.

    The process of the benchmark itself is the kernel of ``ours``, which follows the job.
    """
    found = {}
    if side == "ours":
        found[os.getpid()] = ("kernel", time.process_time())
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(SIDE) != side or process.pid == os.getpid():
                continue
            command = " ".join(process.cmdline())
            kind = next((kind for kind in KINDS if kind in command), "other")
            found[process.pid] = (kind, sum(process.cpu_times()[:2]))
    return found


@contextlib.contextmanager
def running_ours(name: str, folder: Path, world_size: int, num_workers: int) -> Iterator[Side]:
    """Run a job of etrain-jupyter with its normal settings; stop it at the end."""
    folder.mkdir()
    os.environ |= {SIDE: "ours", gate.FOLDER: str(folder)}
    barrier = Gate(folder, world_size)
    keys: dict[str, Any] = {"workers": {"min": world_size, "max": world_size}}
    if name == PHOTOS:
        data = {
            "train": "benchmarks.common.photos:Photos",
            "collate": "benchmarks.common.photos:collate",
        }
        keys |= {
            "model": "benchmarks.common.photos:build",
            "data": {**data, "num_workers": num_workers},
        }
    with ours.cluster():
        job = ours.submit(
            name,
            num_steps=ours.NEVER,
            world_size=world_size,
            loss="benchmarks.common.gate:gated_loss",
            **keys,
        )

        def check() -> None:
            if job.status in TERMINAL_STATUSES:
                raise RuntimeError(f"{job!r} ended: {job.status}")

        yield Side(name="ours", gate=barrier, check=check)
        barrier.grant(ours.NEVER)
        job.stop(now=True)
        job.wait()


@contextlib.contextmanager
def running_ddp(name: str, folder: Path, world_size: int, num_workers: int) -> Iterator[Side]:
    """Run plain DDP under ``torchrun``; end it at the end."""
    folder.mkdir()
    barrier = Gate(folder, world_size)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    agent = [f"--nproc-per-node={world_size}", f"--log-dir={folder}"]
    script = ["-m", "benchmarks.peers.ddp_train", "--gated", f"--workload={name}"]
    choice = [f"--steps={ours.NEVER}", f"--json={folder / 'times.json'}"]
    choice += [f"--num-workers={num_workers}"]
    own = {SIDE: "ddp", gate.FOLDER: str(folder), "OMP_NUM_THREADS": "1"}
    log = folder / "output.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*launch, *agent, *script, *choice],
            env={**os.environ, **own, "PYTHONPATH": python_path()},
            stdout=output,
            stderr=subprocess.STDOUT,
        )

    def check() -> None:
        if process.poll() is not None:
            raise RuntimeError(f"torchrun ended with code {process.returncode}:\n{log.read_text()}")

    try:
        yield Side(name="ddp", gate=barrier, check=check)
    finally:
        process.terminate()
        process.wait()


def figures_of(blocks: dict[str, list[Block]], num_steps: int) -> dict[str, Any]:
    """Compare both sides.

    Args:
        blocks: The blocks of each side in order: ``ours`` and ``ddp``.
        num_steps: Steps of a block.

    Returns:
        ``ratio``, ``low`` and ``high``: throughput of ``ours`` by that of ``ddp``, the median of
        the pairs and its 95 % confidence interval. ``cpu``: the same for samples per second of
        processor time.
    """
    pairs = list(zip(blocks["ours"], blocks["ddp"], strict=True))
    samples = num_steps * GLOBAL_BATCH_SIZE
    return {
        **ratio_of([ddp.wall_s / own.wall_s for own, ddp in pairs]),
        "cpu": ratio_of([_total(ddp) / _total(own) for own, ddp in pairs]),
        **{
            side: samples / statistics.median(block.wall_s for block in found)
            for side, found in blocks.items()
        },
        "cpu_ms_per_step": {
            side: _cpu_ms_per_step(found, num_steps) for side, found in blocks.items()
        },
        "walls": {side: [block.wall_s for block in found] for side, found in blocks.items()},
        "steps": num_steps,
    }


def ratio_of(ratios: list[float]) -> dict[str, float]:
    """Return the median ratio with its 95 % confidence interval."""
    found = report.interval_of(ratios)
    return {"ratio": found["median"], "low": found["low"], "high": found["high"]}


def _total(block: Block) -> float:
    return sum(block.cpu_s.values())


def _cpu_ms_per_step(found: list[Block], num_steps: int) -> dict[str, float]:
    kinds = sorted({kind for block in found for kind in block.cpu_s})
    return {
        kind: 1e3 * statistics.mean(block.cpu_s.get(kind, 0.0) for block in found) / num_steps
        for kind in kinds
    }


def table_of(result: dict[str, Any]) -> str:
    """Format the figures as Markdown tables."""
    head = ("workload", "ours, samples/s", "DDP", "ratio", "95 % interval", "processor time", "")
    rows = []
    parts = []
    for name, one in result["workloads"].items():
        cells = (f"{one['low']:.3f} to {one['high']:.3f}", f"{one['cpu']['ratio']:.3f}")
        cpu = f"{one['cpu']['low']:.3f} to {one['cpu']['high']:.3f}"
        rows.append(
            (name, f"{one['ours']:.0f}", f"{one['ddp']:.0f}", f"{one['ratio']:.3f}", *cells, cpu)
        )
        for side, kinds in one["cpu_ms_per_step"].items():
            shares = ", ".join(f"{kind} {ms:.2f}" for kind, ms in kinds.items())
            parts.append((name, side, f"{sum(kinds.values()):.2f}", shares))
    return (
        f"Throughput of {result['world_size']} ranks by that of {result['peer']}; "
        f"{result['num_pairs']} pairs of blocks. Bar: {BAR}.\n\n{report.table(head, rows)}\n\n"
        "Processor time of all processes, ms per step:\n\n"
        f"{report.table(('workload', 'side', 'total', 'by process'), parts)}"
    )
