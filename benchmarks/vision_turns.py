"""Throughput of two systems that take turns: one trains a block of steps while the other waits.

Both run at the same time, so that the blocks of a pair are seconds apart and see the same load of
the machine. Before a step, a rank waits until a file allows it. The first step of a block does not
count, because the rank has waited in it.
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from torch import nn

from benchmarks import ours
from benchmarks.peers.run import python_path
from benchmarks.squad import ranks_of, trainers_of
from benchmarks.vision_processes import current_update
from benchmarks.vision_work import RESNET_BATCH, photo_batches, photo_resnet, photo_step, read

RANKS = 2
WARM_UP = 60
"""Steps of each side before the first block. Spare trainers are launched meanwhile."""
POLL_S = 0.02
TIMEOUT_S = 300.0
SIDES = ("ours", "ddp")


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Number of steps that a side may train, in a file."""

    folder: str
    side: str

    @property
    def path(self) -> Path:
        """The file."""
        return Path(self.folder) / self.side

    def allow(self, num_steps: int) -> None:
        """Let the ranks train up to this step."""
        temporary = self.path.with_suffix(".new")
        temporary.write_text(str(num_steps), encoding="utf-8")
        os.replace(temporary, self.path)

    def wait_for(self, step: int) -> None:
        """Wait, on a rank, until the step is allowed."""
        while not self.path.exists() or int(self.path.read_text(encoding="utf-8")) < step:
            time.sleep(POLL_S)


@dataclass(frozen=True, kw_only=True)
class TurnStep:
    """A ``step`` that waits for its turn."""

    turn: Turn

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        """Return the loss of a batch."""
        if model.training:
            self.turn.wait_for(current_update(seed=0))
        return photo_step(model, batch)


@dataclass(kw_only=True)
class Side:
    """A system that has been started."""

    turn: Turn
    pids: Callable[[], list[int]]
    """Returns the processes of the ranks."""
    num_steps: Callable[[], int]
    """Returns the number of steps trained so far."""
    times: Callable[[], Sequence[float]]
    """Returns their completion times."""
    allowed: int = 0

    def train(self, num_steps: int) -> float:
        """Train a block of steps; return the processor time of the ranks."""
        pids = self.pids()
        before = cpu_s(pids)
        self.allowed += num_steps
        self.turn.allow(self.allowed)
        deadline = time.monotonic() + TIMEOUT_S
        while self.num_steps() < self.allowed:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.turn.side} did not train {self.allowed} steps")
            time.sleep(POLL_S)
        return cpu_s(pids) - before


def measure_turns(
    data: str, *, num_pairs: int, num_steps: int, limit_s: float = math.inf
) -> dict[str, Any]:
    """Train both sides in turns.

    Args:
        data: Folder with the stored samples.
        num_pairs: Blocks of each side.
        num_steps: Steps per block.
        limit_s: Seconds after which no further pair begins.

    Returns:
        ``rates``: samples per second of each block, and ``cpu_s``: processor seconds per sample,
        by side.
    """
    deadline = time.monotonic() + limit_s
    os.environ["ETRAIN_HANG_S"] = str(TIMEOUT_S)  # a rank that waits for its turn is not hung
    used: dict[str, list[float]] = {name: [] for name in SIDES}
    with (
        tempfile.TemporaryDirectory(prefix="etrain-bench-") as folder,
        start_ours(Turn(folder=folder, side="ours"), data) as own,
        start_ddp(Turn(folder=folder, side="ddp"), data) as ddp,
    ):
        sides = {"ours": own, "ddp": ddp}
        for side in sides.values():
            side.train(WARM_UP)
        for pair in range(num_pairs):
            if time.monotonic() > deadline:
                break
            for name in sorted(sides, reverse=pair % 2 == 1):
                used[name].append(sides[name].train(num_steps) / (num_steps * RESNET_BATCH))
        times = {name: side.times() for name, side in sides.items()}
    return {
        "rates": {name: block_rates(times[name], num_steps) for name in SIDES},
        "cpu_s": used,
    }


def block_rates(times: Sequence[float], num_steps: int) -> list[float]:
    """Return the samples per second of each block, without its first step.

    >>> block_rates([0.0] * 60 + [10.0, 11.0, 12.0, 20.0, 22.0, 24.0], 3)
    [64.0, 32.0]
    """
    blocks = [times[first : first + num_steps] for first in range(WARM_UP, len(times), num_steps)]
    return [(num_steps - 1) * RESNET_BATCH / (block[-1] - block[0]) for block in blocks]


@contextlib.contextmanager
def start_ours(turn: Turn, data: str) -> Iterator[Side]:
    """Start our job."""
    with ours.cluster():
        job = ours.submit(
            "resnet",
            num_steps=ours.NEVER,
            world_size=RANKS,
            workers={"min": RANKS, "max": RANKS},
            model=photo_resnet,
            data={"train": lambda: read(data, "photos", "train"), "collate": photo_batches()},
            loss=None,
            step=TurnStep(turn=turn),
            batch={"global": RESNET_BATCH},
        )
        yield Side(
            turn=turn,
            pids=lambda: trainers_of(job),
            num_steps=lambda: job.step,
            times=lambda: [step.time for step in ours.steps_of(job)],
        )
        job.stop()
        turn.allow(ours.NEVER)  # it stops after the current step
        job.wait(TIMEOUT_S)


@contextlib.contextmanager
def start_ddp(turn: Turn, data: str) -> Iterator[Side]:
    """Start DDP under torchrun."""
    times_file = turn.path.with_suffix(".times")
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    script = ["-m", "benchmarks.peers.vision_train", f"--data={data}"]
    process = subprocess.Popen(
        [sys.executable, *launch, *script, f"--times={times_file}", f"--turn={turn.folder}"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()},
        stderr=subprocess.DEVNULL,  # torchrun reports the signal that ends it
    )

    def times() -> list[float]:
        if process.poll():
            raise RuntimeError(f"torchrun ended with status {process.returncode}")
        if not times_file.exists():
            return []
        return [float(line) for line in times_file.read_text(encoding="utf-8").splitlines()]

    try:
        yield Side(
            turn=turn,
            pids=lambda: ranks_of(process.pid),
            num_steps=lambda: len(times()),
            times=times,
        )
    finally:
        process.terminate()
        process.wait()


def cpu_s(pids: list[int]) -> float:
    """Return the processor time of processes, in seconds."""
    used = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(one.user + one.system for one in used)
