"""etrain-jupyter as the benchmarks use it: from Python, through its public names."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import etrain_jupyter
from benchmarks.workloads import GLOBAL_BATCH_SIZE, LEARNING_RATE, MOMENTUM
from etrain_jupyter import TrainingJob
from etrain_jupyter.events.types import StepCompleted
from etrain_jupyter.pools import registry

ROOT = Path(__file__).parents[1]


def prepare() -> None:
    """Give this process clusters and runs of its own, one thread a rank; call it first."""
    # Ended by `timeout` or a CI system, it must still end its cluster.
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
    """Whatever is submitted inside runs on a new cluster, which is ended afterwards."""
    try:
        yield
    finally:
        registry.down()


def submit(workload: str, *, num_steps: int, world_size: int) -> TrainingJob:
    """Start a job that never saves before its end, like the peers."""
    return etrain_jupyter.distributed(
        name=f"bench-{workload}",
        model=f"benchmarks.workloads:build_{workload}",
        data={"train": "benchmarks.workloads:make_images"},
        loss="torch.nn.functional:cross_entropy",
        optimizer={"name": "SGD", "lr": LEARNING_RATE, "momentum": MOMENTUM},
        batch={"global": GLOBAL_BATCH_SIZE},
        steps=num_steps,
        workers={"min": 1, "max": world_size},
        checkpoint={"every": "100000000 steps"},
    )


def steps_of(job: TrainingJob) -> list[StepCompleted]:
    """The steps that the job has committed so far."""
    return [event for event in job.events() if isinstance(event, StepCompleted)]
