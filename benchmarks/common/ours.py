"""Helpers that run etrain-jupyter in benchmarks, through its public Python API."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import etrain_jupyter
from benchmarks.common.workloads import GLOBAL_BATCH_SIZE, LEARNING_RATE, MOMENTUM
from etrain_jupyter import TrainingJob
from etrain_jupyter.log.events import TERMINAL_STATUSES, StepCompleted
from etrain_jupyter.pools import clusters

ROOT = Path(__file__).parents[2]
NAME = "etrain-jupyter"
NEVER = 100_000_000
"""Number of steps that no run reaches."""
POLL_S = 0.1

T = TypeVar("T")


def prepare() -> None:
    """Isolate this process's clusters and runs, and set one thread per rank; call it first."""
    # Shut down the cluster even if `timeout` or a CI system terminates this process.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    folder = Path(tempfile.mkdtemp(prefix="etrain-benchmarks-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["ETRAIN_STATE"] = str(folder / "state")
    os.environ["ETRAIN_RUNS"] = str(folder / "runs")
    os.environ["OMP_NUM_THREADS"] = "1"
    # The ranks import the workloads.
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


@contextlib.contextmanager
def cluster() -> Iterator[None]:
    """Run the jobs submitted inside on a new cluster, and shut it down at the end."""
    try:
        yield
    finally:
        with signals_ignored():
            clusters.down(all_clusters=True)


@contextlib.contextmanager
def signals_ignored() -> Iterator[None]:
    """Ignore SIGINT and SIGTERM inside, so that a second signal does not interrupt the cleanup.

    ``timeout`` and a terminal signal a benchmark and its processes, and the benchmark then
    terminates these processes, too.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in handlers:
        signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def child(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a process that has a cluster of its own.

    If the block ends before the process, for example because of a signal, the process is
    terminated, and shuts its cluster down before the block is left.

    Args:
        command: The command and its arguments.
        options: Further arguments of ``subprocess.Popen``.
    """
    with subprocess.Popen(command, text=True, **options) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
                with signals_ignored():
                    process.communicate()


def submit(
    workload: str, *, num_steps: int, world_size: int, checkpoint_every: int = 0, **keys: Any
) -> TrainingJob:
    """Start a job with the same workload as the peers.

    Args:
        workload: Name of a model in ``workloads``.
        num_steps: Length of the job.
        world_size: Maximum number of workers; the job starts as soon as one worker is warm.
        checkpoint_every: Steps between two checkpoints; 0 for none before the end.
        keys: Additional keys of the cell's body; they override the defaults.
    """
    body: dict[str, Any] = dict(
        name=f"bench-{workload}",
        model=f"benchmarks.common.workloads:build_{workload}",
        data={"train": "benchmarks.common.workloads:make_images"},
        loss="torch.nn.functional:cross_entropy",
        optimizer={"name": "SGD", "lr": LEARNING_RATE, "momentum": MOMENTUM},
        batch={"global": GLOBAL_BATCH_SIZE},
        steps=num_steps,
        workers={"min": 1, "max": world_size},
        checkpoint={"every": f"{checkpoint_every or NEVER} steps"},
    )
    return etrain_jupyter.distributed({**body, **keys})


def steps_of(job: TrainingJob) -> list[StepCompleted]:
    """Return the steps that the job has committed so far."""
    return [event for event in job.events() if isinstance(event, StepCompleted)]


def is_whole(job: TrainingJob, world_size: int) -> bool:
    """Return whether the job has its full world size and every rank has a worker."""
    if job.world_size != world_size:
        return False
    return len([worker for worker in job.workers() if worker["rank"] is not None]) == world_size


def settled_steps(job: TrainingJob, world_size: int, count: int) -> list[StepCompleted]:
    """Return the current generation's steps if it has full size and over ``count`` steps."""
    generation = job.generation
    recent = [step for step in steps_of(job) if step.generation == generation]
    return recent if len(recent) > count and is_whole(job, world_size) else []


def wait_for(
    condition: Callable[[], T],
    timeout_s: float,
    what: str,
    job: TrainingJob,
    *,
    poll_s: float = POLL_S,
) -> T:
    """Poll ``condition`` until it is true, and return its value."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline or job.status in TERMINAL_STATUSES:
            raise TimeoutError(f"{job!r} did not reach {what} within {timeout_s:.0f} s")
        time.sleep(poll_s)
    return value


def wait_for_step(job: TrainingJob, step: int, timeout_s: float) -> None:
    """Wait until ``step`` is committed; poll every 10 ms, because the caller acts at once."""
    wait_for(lambda: job.step >= step, timeout_s, f"step {step}", job, poll_s=0.01)


def wait_for_generation(job: TrainingJob, after: int, timeout_s: float) -> None:
    """Wait for the first step of a generation later than ``after``."""
    wait_for(
        lambda: any(step.generation > after for step in steps_of(job)),
        timeout_s,
        f"a step after generation {after}",
        job,
    )


def trainer_of(job: TrainingJob, rank: int) -> int:
    """Return the process id of a rank's trainer."""
    return next(int(w["trainer_pid"]) for w in job.workers() if w["rank"] == rank)
