"""Fixtures for a real local cluster that the tests of a module share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import etrain_jupyter
from etrain_jupyter.notebook.job.training_job import TrainingJob
from etrain_jupyter.pools.local import LocalPool

PATIENCE_S = 150.0


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Provide a run store and a state directory for the module; assert that no process is left."""
    folder = tmp_path_factory.mktemp("cluster")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ETRAIN_STATE", str(folder / "state"))
        patch.setenv("ETRAIN_RUNS", str(folder / "runs"))
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield folder / "runs"
        leftovers = LocalPool().down(timeout_s=10.0)
        assert not leftovers.processes
        assert processes_of(folder) == []


def processes_of(folder: Path) -> list[psutil.Process]:
    """Return every process that belongs to the cluster of this folder."""
    me = psutil.Process()
    mine = {me.pid, *(child.pid for child in me.parents())}
    found = []
    for process in psutil.process_iter():
        try:
            is_ours = process.environ().get("ETRAIN_STATE", "").startswith(str(folder))
            if is_ours and process.pid not in mine and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


@pytest.fixture
def submit(runs: Path) -> Iterator[Callable[..., TrainingJob]]:
    """Provide a function that submits jobs; stop those that a test leaves running."""
    started: list[TrainingJob] = []

    def submit_job(**keys: Any) -> TrainingJob:
        job = etrain_jupyter.distributed(keys)
        started.append(job)
        return job

    yield submit_job
    for job in started:
        if job.status not in ("finished", "stopped", "failed"):
            job.stop(now=True)
            job.wait(timeout=PATIENCE_S)


def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait until ``condition()`` is true and return it."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen in {PATIENCE_S:.0f} s"
        time.sleep(0.02)
    return found
