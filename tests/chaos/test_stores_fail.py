"""Checkpoint stores that fail and recover, and ranks that die while saving."""

from __future__ import annotations

import functools
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from etrain_jupyter.log.events import (
    CheckpointCommitted,
    CheckpointFailed,
    Event,
    JobRestored,
    StepUndone,
    WorkerLost,
)
from etrain_jupyter.notebook.job.job_record import RunRecord
from etrain_jupyter.notebook.job.weights import find_saved, load_weights
from etrain_jupyter.storage.checkpoints import LocalStore, open_newest, open_store
from etrain_jupyter.testing.invariants import assert_invariants
from etrain_jupyter.testing.s3_faults import S3Fault
from etrain_jupyter.testing.s3_server import S3Server
from etrain_jupyter.trainer.state import sharded_write
from tests.capabilities import long
from tests.chaos.rig import Rig, RigJob
from tests.chaos.workload import Net, body


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the hang timeout: a slow store on a busy machine must not count as a hang."""
    monkeypatch.setenv("ETRAIN_HANG_S", "15")


def net_with(environment: dict[str, str]) -> nn.Module:
    """Set the server's address in the trainers: the zygote started before the server."""
    os.environ.update(environment)
    return Net()


def body_on(server: S3Server, bucket: str, **keys: Any) -> dict[str, Any]:
    to = {"to": f"s3://{bucket}/runs", "every": "4 steps"}
    model = functools.partial(net_with, dict(server.environment))
    return body(**{"model": model, "checkpoint": to, **keys})


def found(log: list[Event], kind: type[Event]) -> list[Any]:
    return [event for event in log if isinstance(event, kind)]


@pytest.mark.forked
async def test_acknowledged_checkpoints_in_s3_survive_deaths_while_saving(
    rig: Rig, s3_server: S3Server, s3_bucket: str
) -> None:
    s3_server.set_faults(
        # Slow, so that ranks die while saving: a checkpoint takes about twenty requests.
        S3Fault(kind="slow", seconds=0.02),
        S3Fault(kind="lose_answer", every=23),
        S3Fault(kind="spoil_upload", every=11, match="PUT "),
    )
    keys = body_on(s3_server, s3_bucket, epochs=1000, workers={"min": 2, "max": 2})
    job = await rig.submit(keys)
    for _ in range(3):
        await kill_while_saving(job, s3_server, num_ranks=1)
    await kill_while_saving(job, s3_server, num_ranks=2)
    acknowledged = max(e.step for e in job.found(CheckpointCommitted))
    restored = (await job.until(lambda: went_back(job)))[-1]
    await job.until(lambda: job.found(CheckpointCommitted)[-1].step > restored.step)
    await job.request("stop")
    log = await job.end()

    assert job.status == "stopped", job.describe()
    assert_invariants(log)
    assert len(found(log, WorkerLost)) == 5
    assert len({e.step for e in found(log, StepUndone)}) <= 4
    assert restored.step >= acknowledged
    store = open_store(f"s3://{s3_bucket}/runs/{job.id}")
    newest = open_newest(store, job_id=job.id)
    assert (newest.manifest.step, newest.skipped) == (job.step, [])
    assert len(store.list_steps()) == 3
    assert not list(job.hosted.spec.run_dir.glob("manifests/*"))
    assert sorted(load_weights(find_saved(record_of(job), "last", {}))) == sorted(
        Net().state_dict()
    )


def net_that_is_sharded(environment: dict[str, str]) -> nn.Module:
    """Make the ranks write even this small state together."""
    sharded_write.SHARDED_BYTES = 1
    return net_with(environment)


@pytest.mark.forked
@long
async def test_ranks_may_die_while_writing_a_sharded_checkpoint(
    rig: Rig, s3_server: S3Server, s3_bucket: str
) -> None:
    s3_server.set_faults(S3Fault(kind="slow", seconds=0.02))
    keys = body_on(s3_server, s3_bucket, epochs=1000, workers={"min": 2, "max": 3})
    keys["model"] = functools.partial(net_that_is_sharded, dict(s3_server.environment))
    job = await rig.submit(keys)
    store = open_store(f"s3://{s3_bucket}/runs/{job.id}")
    seen: set[str] = set()

    def together() -> bool:
        for key in s3_server.list_keys(s3_bucket):
            name = key.rpartition("/")[2]
            seen.add(name)
        return "optimizer-00002-of-00002.safetensors" in seen

    await job.until(lambda: len(job.ranks) == 3)
    await job.until(together)
    for number in (2, 0, 1):
        known = len(job.found(CheckpointCommitted))
        await job.until(
            lambda known=known: len(job.found(CheckpointCommitted)) > known and len(job.ranks) == 3
        )
        await job.request("kill", worker=job.ranks[number])
    known = len(job.found(CheckpointCommitted))
    await job.until(lambda: len(job.found(CheckpointCommitted)) > known)
    await job.request("stop")
    log = await job.end()

    assert job.status == "stopped", job.describe()
    assert_invariants(log)
    assert len(found(log, WorkerLost)) == 3
    newest = open_newest(store, job_id=job.id)
    assert (newest.manifest.step, newest.skipped) == (job.step, [])


def went_back(job: RigJob) -> list[JobRestored]:
    """Return the restores from a checkpoint, as opposed to those from a survivor."""
    return [e for e in job.found(JobRestored) if e.num_undone > 1]


async def kill_while_saving(job: RigJob, server: S3Server, *, num_ranks: int) -> None:
    """Wait for an acknowledged checkpoint and the start of the next one, then kill ranks."""
    known = len(job.found(CheckpointCommitted))
    await job.until(lambda: len(job.found(CheckpointCommitted)) > known and len(job.ranks) == 2)
    puts = server.counts()["PUT"]
    await job.until(lambda: server.counts()["PUT"] > puts + 1 and len(job.ranks) == 2)
    for worker in job.ranks[:num_ranks]:
        await job.request("kill", worker=worker)


def record_of(job: RigJob) -> RunRecord:
    order = job.hosted.spec
    return RunRecord(
        job_id=job.id, name="job", created=0.0, folder=order.run_dir, config=order.config
    )


@pytest.mark.forked
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("no_bucket", "there is no such bucket. Create it, or correct checkpoint.to"),
        ("slow_down", "S3 limits the request rate"),
    ],
)
async def test_job_keeps_training_while_s3_refuses_and_saves_afterwards(
    rig: Rig, s3_server: S3Server, s3_bucket: str, kind: Any, words: str
) -> None:
    @contextmanager
    def failing() -> Iterator[None]:
        s3_server.set_faults(S3Fault(kind=kind))
        yield
        s3_server.set_faults()

    keys = body_on(s3_server, s3_bucket, epochs=1000, workers={"min": 1, "max": 2})
    job = await rig.submit(keys)
    await assert_trains_on(job, failing, words)


def limited_loss(flag: str, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Make all file writes of this process fail while the flag file exists."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    soft = 64 if os.path.exists(flag) else hard
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return F.cross_entropy(output, target)


async def test_job_keeps_training_while_writes_fail_and_saves_afterwards(
    rig: Rig, tmp_path: Path
) -> None:
    flag = tmp_path / "full"

    @contextmanager
    def failing() -> Iterator[None]:
        flag.touch()
        yield
        flag.unlink()

    job = await rig.submit(
        body(
            loss=functools.partial(limited_loss, str(flag)),
            checkpoint={"every": "4 steps"},
            epochs=1000,
            workers={"min": 1, "max": 2},
        )
    )
    await assert_trains_on(job, failing, "File too large")


@pytest.mark.forked
@long
async def test_job_keeps_training_while_its_folder_is_unusable_and_saves_afterwards(
    rig: Rig, tmp_path: Path
) -> None:
    to = tmp_path / "elsewhere"
    job = await rig.submit(
        body(
            checkpoint={"to": str(to), "every": "4 steps"},
            epochs=1000,
            workers={"min": 1, "max": 2},
        )
    )

    @contextmanager
    def failing() -> Iterator[None]:
        # Root can write to a read-only folder, so replace the folder by a file.
        folder = to / job.id
        folder.rename(tmp_path / "aside")
        folder.touch()
        yield
        folder.unlink()
        (tmp_path / "aside").rename(folder)

    await assert_trains_on(
        job,
        failing,
        f"{job.id} cannot be listed (Not a directory)",
        interrupted=(
            f"cannot be written in {to / job.id}: Not a directory",
            "cannot be read (Not a directory)",
        ),
    )
    assert LocalStore(to / job.id).list_steps()[-1] == job.step


async def assert_trains_on(
    job: RigJob,
    failing: Callable[[], contextmanager[None]],
    words: str,
    *,
    interrupted: tuple[str, ...] = (),
) -> None:
    """Make the store fail between two checkpoints; assert that the job trains and recovers.

    The first error has ``words``, or one of ``interrupted`` if a save had begun before the failure.
    """
    await job.until(lambda: job.found(CheckpointCommitted))
    with failing():
        [failed, *_] = await job.until(lambda: job.found(CheckpointFailed))
        await job.until(lambda: job.step > failed.step + 20)
        last = max(e.step for e in job.found(CheckpointFailed))
    await job.until(lambda: job.found(CheckpointCommitted)[-1].step > last)
    await job.request("stop")
    log = await job.end()

    assert job.status == "stopped", job.describe()
    assert_invariants(log)
    assert any(text in failed.error for text in (words, *interrupted)), failed.error
    assert found(log, WorkerLost) == found(log, StepUndone) == []
    assert found(log, CheckpointCommitted)[-1].step == job.step
