"""Training on SLURM jobs, with the simulated SLURM."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from etrain_jupyter.log.events import (
    PreemptionNoticed,
    StepUndone,
    UserErrorRaised,
    WorkerJoined,
    WorkerLost,
)
from etrain_jupyter.notebook.job.open_jobs import attach
from etrain_jupyter.notebook.job.training_job import TrainingJob
from etrain_jupyter.plugins.slurm.pool import SlurmPool
from etrain_jupyter.plugins.slurm.simulator import FakeSlurm
from etrain_jupyter.pools.base import Leftovers
from etrain_jupyter.pools.registry import get_pool
from etrain_jupyter.process.cluster_dir import cluster_dirs
from etrain_jupyter.testing.invariants import assert_invariants
from tests.capabilities import long, needs_module
from tests.integration.slow_jobs import PATIENCE_S, await_steps, submit, until

pytestmark = [pytest.mark.timeout(400), needs_module("dask_jobqueue")]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSlurm]:
    """Provide a SLURM with four nodes, and the pool ``hpc`` of at most two workers."""
    entry = {
        "kind": "slurm",
        "cores": 1,
        "memory": "1 GiB",
        "folder": str(tmp_path / "shared"),
        "head_host": "127.0.0.1",
        "workers": {"max": 2},
        "price": 3.6,
        "tick": "0.5 s",
    }
    # JSON is YAML.
    (tmp_path / "pools.yaml").write_text(json.dumps({"hpc": entry}))
    monkeypatch.setenv("ETRAIN_POOLS", str(tmp_path / "pools.yaml"))
    monkeypatch.setenv("ETRAIN_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("ETRAIN_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("DASK_CONFIG", str(tmp_path / "dask"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with FakeSlurm(kill_wait_s=30.0) as slurm:
        monkeypatch.setenv("PATH", slurm.path)
        yield slurm
        get_pool("hpc").down(timeout_s=60.0)  # after a failure, too


def joined(job: TrainingJob) -> list[str]:
    return [event.worker for event in job.events() if isinstance(event, WorkerJoined)]


def await_replacement(job: TrainingJob, num_joined: int) -> None:
    """Wait until this number of workers has joined in total, and two of them train."""
    until(lambda: len(set(joined(job))) == num_joined, f"{num_joined} workers have joined")
    await_steps(job, world_size=2)


def test_workers_leave_at_a_step_boundary_and_are_replaced(slurm: FakeSlurm) -> None:
    job = submit("hpc")
    await_steps(job, world_size=2)
    first, second = (one["id"] for one in slurm.running())

    # A preemption that is announced by SIGUSR1.
    slurm.preempt(first, grace_s=60.0, sends_signal=True)
    await_replacement(job, 3)

    # Near its time limit, a worker leaves once its replacement has started, without a signal.
    slurm.set_time_left(second, 600.0)
    await_replacement(job, 4)
    until(lambda: second not in {one["id"] for one in slurm.running()}, "the end of its job")

    # scancel, and by default a preemption: SIGTERM, to all processes of the job.
    third, _ = (one["id"] for one in slurm.running())
    slurm.preempt(third, grace_s=0.0)
    await_replacement(job, 5)

    events = job.events()
    noticed = [event.worker for event in events if isinstance(event, PreemptionNoticed)]
    assert noticed == ["w1", "w2", "w3"]
    assert [e for e in events if isinstance(e, WorkerLost | StepUndone | UserErrorRaised)] == []
    assert get_pool("hpc").cost().spent_usd > 0.0
    assert get_pool("hpc").down(timeout_s=60.0) == Leftovers()
    assert job.wait(timeout=PATIENCE_S) == "stopped"
    assert_invariants(job.events())
    assert job.audit().ok
    assert slurm.running() == []


@long
def test_another_head_takes_over_the_jobs_in_the_queue(slurm: FakeSlurm) -> None:
    job = submit("hpc")
    await_steps(job, world_size=2)
    before = {one["id"] for one in slurm.running()}
    [cluster] = cluster_dirs()
    record = cluster.record()
    assert record is not None
    os.kill(record.pid, signal.SIGKILL)  # the keeper, and with it the scheduler
    until(lambda: not record.is_alive, "the end of the keeper")

    pool = get_pool("hpc")
    assert isinstance(pool, SlurmPool)
    assert pool.up().cluster_id == cluster.cluster_id
    job = attach(job.id)  # a kernel that saw the end of the scheduler has stopped following
    await_steps(job, world_size=2)

    assert {one["id"] for one in slurm.running()} == before
    assert [e for e in job.events() if isinstance(e, WorkerLost)] == []
    assert pool.down(timeout_s=60.0) == Leftovers()
    assert job.wait(timeout=PATIENCE_S) == "stopped"
    assert job.audit().ok
