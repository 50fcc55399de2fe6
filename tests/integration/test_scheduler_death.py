"""Jobs survive a killed scheduler, which the keeper restarts; with real processes."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from etrain_jupyter.log.event_log import read_events
from etrain_jupyter.log.events import (
    CheckpointCommitted,
    GenerationFormed,
    JobRestored,
    SchedulerRestarted,
    StepCompleted,
    WeightsHashed,
    WorkerLost,
)
from etrain_jupyter.notebook.job.training_job import TrainingJob
from etrain_jupyter.pools.base import Leftovers
from etrain_jupyter.pools.local import LocalPool
from etrain_jupyter.process.cluster_dir import ClusterRecord, cluster_dirs
from etrain_jupyter.storage.bucket_log.chain import Chain
from etrain_jupyter.storage.bucket_log.local_copy import LogCopy
from etrain_jupyter.storage.bucket_log.objects import RunObjects
from etrain_jupyter.testing.invariants import assert_invariants
from etrain_jupyter.testing.s3_server import S3Server
from tests.capabilities import LONG, long
from tests.integration.conftest import PATIENCE_S, until

pytestmark = pytest.mark.slow

SLOW = Path(tempfile.mkdtemp()) / "slow"
"""While this file exists, steps are slow but use no CPU time."""

Submit = Callable[..., TrainingJob]


def make_data() -> TensorDataset:
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(3))
    return TensorDataset(x, (x.sum(1) > 0).long())


def slow_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if SLOW.exists():
        time.sleep(0.03)
    return F.cross_entropy(output, target)


def body(**changes: Any) -> dict[str, Any]:
    return {
        "model": lambda: nn.Linear(8, 2),
        "data": {"train": make_data, "eval": make_data},
        "loss": slow_loss,
        "optimizer": {"name": "AdamW", "lr": 0.01},
        "batch": {"global": 16},
        "epochs": 100,
        "workers": {"min": 1, "max": 2},
        "checkpoint": {"every": "20 steps"},
        "reproducible": True,
        **changes,
    }


@pytest.fixture(autouse=True)
def slow(runs: Path) -> Iterator[None]:
    """Make steps slow until ``finish`` is called, and use a new cluster for each test.

    The keeper shuts a cluster down if its scheduler dies five times within a minute.
    """
    SLOW.touch()
    yield
    SLOW.unlink(missing_ok=True)
    assert LocalPool().down() == Leftovers()


def record() -> ClusterRecord:
    [cluster] = cluster_dirs()
    found = cluster.record()
    assert found is not None
    return found


def kill_scheduler() -> None:
    """Kill the scheduler and wait until the next one is running."""
    before = record()
    os.kill(before.scheduler_pid, signal.SIGKILL)
    until(lambda: record().num_lives > before.num_lives, "another scheduler")
    assert record().pid == before.pid, "the keeper is the same"


def found(job: TrainingJob, kind: type) -> list[Any]:
    return [event for event in job.events() if isinstance(event, kind)]


def run(submit: Submit, **changes: Any) -> TrainingJob:
    """Submit a job and wait until two workers train it."""
    job = submit(**body(**changes))
    until(lambda: job.world_size == 2 and job.step >= 10, "ten steps on two workers")
    return job


def await_restart(job: TrainingJob, num_restarts: int = 1) -> None:
    """Wait until a job that has survived its scheduler completes more steps."""
    until(lambda: len(found(job, SchedulerRestarted)) >= num_restarts, "the event of the restart")
    step = job.step
    until(lambda: job.step > step + 5 or job.status == "finished", f"step {step + 5}")


def finish(job: TrainingJob) -> str:
    """Wait for the job's end, assert the invariants, and return the digest of its weights."""
    SLOW.unlink()
    assert job.wait(timeout=PATIENCE_S) == "finished", job
    assert job.history()["step"] == list(range(1, 401))
    assert_invariants(job.events())
    return str(found(job, WeightsHashed)[-1].digest)


@pytest.fixture(scope="module")
def undisturbed(runs: Path) -> str:
    """Return the digest of the final weights of an undisturbed job."""
    import etrain_jupyter

    SLOW.unlink(missing_ok=True)
    job = etrain_jupyter.distributed(body())
    assert job.wait(timeout=PATIENCE_S) == "finished", job
    return str(found(job, WeightsHashed)[-1].digest)


def test_trainers_keep_training_while_the_scheduler_is_dead(
    submit: Submit, undisturbed: str
) -> None:
    SLOW.touch()
    job = run(submit)
    trainers = found(job, GenerationFormed)[-1].trainer_pids

    kill_scheduler()
    await_restart(job)
    kill_scheduler()
    await_restart(job, 2)

    digest = finish(job)
    steps = [event.step for event in found(job, StepCompleted)]
    assert steps == list(range(1, 401)), "every step is logged exactly once"
    assert found(job, GenerationFormed)[-1].trainer_pids == trainers
    assert len(found(job, GenerationFormed)) <= 2, "no restart may form a new generation"
    assert [event.lost for event in found(job, SchedulerRestarted)] == [[], []]
    assert digest == undisturbed


@long
def test_divided_optimizer_state_survives_the_scheduler(submit: Submit, undisturbed: str) -> None:
    SLOW.touch()
    job = run(submit, shard="optimizer", checkpoint={"every": "1000 steps"})
    trainers = found(job, GenerationFormed)[-1].trainer_pids

    kill_scheduler()
    await_restart(job)
    # The survivor has a copy of the other rank's part. A scheduler that has just been restarted
    # must let it complete that part.
    victim = job.workers()[0]
    os.kill(victim["pid"], signal.SIGKILL)
    until(lambda: found(job, WorkerLost), "the loss of the worker")
    kill_scheduler()
    await_restart(job, 2)

    digest = finish(job)
    assert found(job, JobRestored) == [], "the survivor had the newest state"
    assert len(set(trainers) & set(found(job, GenerationFormed)[-1].trainer_pids)) == 1
    assert digest == undisturbed


@long
def test_worker_that_dies_with_the_scheduler_is_replaced(submit: Submit, undisturbed: str) -> None:
    SLOW.touch()
    job = run(submit)
    victim, survivor = job.workers()
    os.kill(victim["pid"], signal.SIGKILL)
    kill_scheduler()
    await_restart(job)

    digest = finish(job)
    assert victim["worker"] in {event.worker for event in found(job, WorkerLost)}
    assert survivor["trainer_pid"] in found(job, GenerationFormed)[-1].trainer_pids
    assert found(job, JobRestored) == [], "the survivor had the newest state"
    assert digest == undisturbed


def test_job_restores_its_newest_checkpoint_when_scheduler_and_workers_die(
    submit: Submit, undisturbed: str
) -> None:
    SLOW.touch()
    job = run(submit)
    until(lambda: found(job, CheckpointCommitted), "a checkpoint")
    for worker in job.workers():
        os.kill(worker["pid"], signal.SIGKILL)
    kill_scheduler()
    await_restart(job)

    digest = finish(job)
    [restarted] = found(job, SchedulerRestarted)
    assert restarted.workers == []
    assert digest == undisturbed


def test_job_with_its_log_in_a_bucket_survives_its_scheduler(
    submit: Submit,
    undisturbed: str,
    s3_server: S3Server,
    s3_bucket: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    LocalPool().down()  # the running cluster has no access to this S3 server
    root = f"s3://{s3_bucket}/runs"
    monkeypatch.setenv("ETRAIN_RUNS", root)
    SLOW.touch()
    job = run(submit)
    trainers = found(job, GenerationFormed)[-1].trainer_pids

    kill_scheduler()
    await_restart(job)

    assert finish(job) == undisturbed
    assert found(job, GenerationFormed)[-1].trainer_pids == trainers
    copy = tmp_path / "copy" / "events.jsonl"
    LogCopy(Chain(RunObjects(f"{root}/{job.id}")), copy).refresh()
    assert read_events(copy) == job.events()


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        pytest.param("JobSubmitted", 1, marks=LONG),
        pytest.param("WorkerWarmed", 1, marks=LONG),
        pytest.param("GenerationFormed", 1, marks=LONG),
        ("GenerationFormed", 2),
        pytest.param("EvalCompleted", 1, marks=LONG),
        ("CheckpointCommitted", 2),
    ],
)
def test_job_has_the_same_result_whenever_the_scheduler_dies(
    submit: Submit, runs: Path, undisturbed: str, kind: str, count: int
) -> None:
    SLOW.touch()
    before = {folder.name for folder in runs.iterdir()}
    job = submit(**body())
    [folder] = [folder for folder in runs.iterdir() if folder.name not in before]
    if (kind, count) == ("GenerationFormed", 2):
        # The first generation may include both workers; if not, the second worker's join forms
        # another one.
        until(lambda: job.step >= 5, "steps of the first generation")
        if job.world_size == 2:
            job.scale(max=1)

    def has_happened() -> bool:
        log = folder / "events.jsonl"
        return log.exists() and log.read_bytes().count(f'"event":"{kind}"'.encode()) >= count

    # An event is logged before its message is sent.
    until(has_happened, f"{kind} {count}")
    kill_scheduler()
    await_restart(job)

    digest = finish(job)
    assert [event.seq for event in job.events()] == list(range(1, len(job.events()) + 1))
    assert digest == undisturbed


@long
def test_paused_job_stays_paused_and_can_be_resumed(submit: Submit) -> None:
    job = run(submit)
    job.pause()
    until(lambda: job.status == "paused", "the pause")
    step = job.step

    kill_scheduler()
    until(lambda: found(job, SchedulerRestarted), "the event of the restart")
    assert (job.status, job.step) == ("paused", step)
    job.resume()
    until(lambda: job.step > step + 5, "steps after the pause")
    finish(job)


@long
def test_job_stops_although_the_scheduler_dies_after_the_request(submit: Submit) -> None:
    job = run(submit)
    scheduler = record().scheduler_pid
    job.stop()
    os.kill(scheduler, signal.SIGKILL)

    assert job.wait(timeout=PATIENCE_S) == "stopped"
    step = found(job, StepCompleted)[-1].step
    assert found(job, CheckpointCommitted)[-1].step == step
    assert_invariants(job.events())


@long
def test_scheduler_that_dies_before_the_first_step_keeps_the_job(submit: Submit) -> None:
    job = submit(**body(epochs=10))

    kill_scheduler()
    SLOW.unlink()

    assert job.wait(timeout=PATIENCE_S) == "finished", job
    assert job.history()["step"] == list(range(1, 41))
    assert_invariants(job.events())


@long
def test_worker_that_warms_up_during_a_restart_is_admitted_later(submit: Submit) -> None:
    job = submit(**body(workers={"min": 1, "max": 1}, reproducible={"shards": 2}))
    until(lambda: job.step > 5, "steps of one worker")
    job.scale(max=2)

    kill_scheduler()
    until(lambda: job.world_size == 2, "the second worker")
    finish(job)


def test_request_while_the_scheduler_is_dead_waits_for_the_next_one(submit: Submit) -> None:
    job = run(submit)
    os.kill(record().scheduler_pid, signal.SIGKILL)

    states = [node.state for node in LocalPool().nodes()]
    await_restart(job)

    assert len(states) == 2
    finish(job)
