"""``shard: optimizer`` on real processes: no kill changes a bit, and none needs a checkpoint."""

from __future__ import annotations

import functools
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from etrain_jupyter.log.events import (
    CheckpointCommitted,
    Event,
    GenerationFormed,
    JobRestored,
    LogLine,
    StepCompleted,
    WeightsHashed,
    WorkerLost,
)
from etrain_jupyter.storage.checkpoints import open_newest, open_store
from etrain_jupyter.testing import FaultPlan
from etrain_jupyter.testing.invariants import assert_invariants
from etrain_jupyter.testing.s3_faults import S3Fault
from etrain_jupyter.testing.s3_server import S3Server
from tests.capabilities import long
from tests.chaos.rig import MakeRig, RigJob, run_job
from tests.chaos.workload import STEPS_PER_EPOCH, accuracy, make_data

pytestmark = pytest.mark.forked

NUM_STEPS = 3 * STEPS_PER_EPOCH
PLACES = ("forward", "all_reduce", "commit", "agree", "agreed", "updated")


class Wide(nn.Module):
    """Enough elements for shards that begin in the middle of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(8, 48), nn.BatchNorm1d(48), nn.Dropout(0.1), nn.ReLU()),
            *(nn.Linear(48, 37), nn.ReLU(), nn.Linear(37, 2)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def keys(**changes: Any) -> dict[str, Any]:
    return {
        "model": Wide,
        "data": {"train": make_data, "eval": make_data},
        "loss": F.cross_entropy,
        "metrics": {"accuracy": accuracy},
        "optimizer": {"name": "AdamW", "lr": 0.01, "no_decay": "auto"},
        "clip_grad_norm": 0.5,
        "ema": 0.9,
        "batch": {"global": 8},
        "reproducible": {"shards": 4},
        "shard": "optimizer",
        "checkpoint": {"every": "1000 steps"},
        "epochs": 3,
        "workers": {"min": 1, "max": 3},
        **changes,
    }


def results(log: list[Event]) -> tuple[dict[int, float], set[tuple[int, str]]]:
    """Return the loss of each step, and the steps and digests of the hashed weights."""
    steps = {e.step: e.loss for e in log if isinstance(e, StepCompleted)}
    return steps, {(e.step, e.digest) for e in log if isinstance(e, WeightsHashed)}


async def undisturbed(
    make: MakeRig, zygote: Any, folder: Path, **changes: Any
) -> tuple[dict[int, float], set[tuple[int, str]]]:
    """Return the results of a job whose state is not divided, on one worker."""
    body = keys(shard="none", workers={"min": 1, "max": 1}, **changes)
    async with make(zygote, folder / "calm") as rig:
        return results((await run_job(rig, body)).events())


def saved_steps(job: RigJob) -> list[int]:
    return [e.step for e in job.found(CheckpointCommitted)]


async def test_kills_at_every_point_of_a_step_change_no_bit(
    zygote: Any, folder: Path, limits: None, make: MakeRig
) -> None:
    expected = await undisturbed(make, zygote, folder)
    plan = FaultPlan()
    for number, place in enumerate(PLACES):
        plan = plan.kill(rank=number % 3, step=8 + 12 * number, at=place)
    async with make(zygote, folder / "killed", slots=4) as rig:
        job = await run_job(rig, keys(), plan)

    assert len(job.found(WorkerLost)) == len(PLACES), job.describe()
    assert not job.found(JobRestored), job.describe()
    assert {2, 3} <= {e.world_size for e in job.found(StepCompleted)}
    assert results(job.events()) == expected
    # The ranks saved the last state together, in a generation of their own.
    assert job.found(GenerationFormed)[-1].why == "save"
    assert saved_steps(job) == [NUM_STEPS]


async def test_loss_of_two_neighbors_restores_the_newest_checkpoint(
    zygote: Any, folder: Path, limits: None, make: MakeRig
) -> None:
    changes: dict[str, Any] = {"steps": 24, "epochs": None}
    expected = await undisturbed(make, zygote, folder, **changes)
    plan = FaultPlan().kill(rank=1, step=14).kill(rank=2, step=14)
    body = keys(**changes, checkpoint={"every": "6 steps"}, workers={"min": 2, "max": 4})
    async with make(zygote, folder / "lost", slots=4) as rig:
        job = await run_job(rig, body, plan)

    [restored] = job.found(JobRestored)
    assert restored.step == 12, job.describe()
    assert "were neighbors in the order of ranks" in restored.reason
    assert results(job.events()) == expected


async def test_neighbors_that_leave_as_planned_hand_over_their_shards(
    zygote: Any, folder: Path, limits: None, make: MakeRig
) -> None:
    changes: dict[str, Any] = {"steps": 40, "epochs": None}
    expected = await undisturbed(make, zygote, folder, **changes)
    async with make(zygote, folder / "scaled", slots=4) as rig:
        job = await rig.submit(keys(**changes, workers={"min": 1, "max": 4}))
        await job.until(lambda: job.step >= 4 and len(job.ranks) == 4)
        await job.request("scale", min=1, max=1)
        await job.end()

    assert job.status == "finished", job.describe()
    assert_invariants(job.events())
    assert not job.found(JobRestored), job.describe()
    sizes = [e.world_size for e in job.found(GenerationFormed)]
    assert sizes[-1] == 1
    assert results(job.events()) == expected


@pytest.mark.parametrize("shard", ["none", "optimizer"])
async def test_checkpoint_of_three_ranks_is_resumed_by_one(
    zygote: Any, folder: Path, limits: None, make: MakeRig, shard: str
) -> None:
    expected = await undisturbed(make, zygote, folder, steps=20, epochs=None)
    async with make(zygote, folder / "resumed", slots=3) as rig:
        job = await run_job(rig, keys(steps=10, epochs=None, workers={"min": 3, "max": 3}))
        parts = open_newest(open_store(str(job.folder)), job_id=job.id).manifest.parts
        assert {f"optimizer-0000{number}-of-00003.safetensors" for number in (1, 2, 3)} <= {*parts}
        more = keys(steps=20, epochs=None, shard=shard, workers={"min": 1, "max": 1})
        job = await rig.resume(job, more)
        await job.end()

    assert job.status == "finished", job.describe()
    losses, digests = results(job.events())
    assert losses == expected[0]
    assert max(digests) == max(expected[1])


def keys_on(server: S3Server, bucket: str, **changes: Any) -> dict[str, Any]:
    """Return the keys of a job with checkpoints in S3, whose model sets the server's address."""
    to = {"to": f"s3://{bucket}/runs", "every": "6 steps"}
    model = functools.partial(wide_with, dict(server.environment))
    return keys(**{"model": model, "checkpoint": to, "epochs": None, **changes})


def wide_with(environment: dict[str, str]) -> nn.Module:
    """Set the server's address in the trainers: the zygote started before the server."""
    os.environ.update(environment)
    return Wide()


def messages(job: RigJob, start: str) -> list[str]:
    return [e.text for e in job.found(LogLine) if e.text.startswith(start)]


@long
async def test_checkpoint_of_three_ranks_in_s3_is_resumed_by_two(
    zygote: Any, folder: Path, limits: None, make: MakeRig, s3_server: S3Server, s3_bucket: str
) -> None:
    expected = await undisturbed(make, zygote, folder, steps=20, epochs=None)
    async with make(zygote, folder / "resumed", slots=3) as rig:
        three = keys_on(s3_server, s3_bucket, steps=10, workers={"min": 3, "max": 3})
        job = await run_job(rig, three)
        s3_server.set_faults()
        two = keys_on(s3_server, s3_bucket, steps=20, workers={"min": 2, "max": 2})
        job = await rig.resume(job, two)
        await job.end()

    assert job.status == "finished", job.describe()
    assert not job.hosted.spec.run_dir.joinpath("manifests").exists()
    [read] = messages(job, "each rank read its part of the optimizer's state")
    assert read.count(",") == 1
    losses, digests = results(job.events())
    assert losses == expected[0]
    assert max(digests) == max(expected[1])


async def test_resume_falls_back_if_one_part_of_the_newest_checkpoint_is_corrupt(
    zygote: Any, folder: Path, limits: None, make: MakeRig, s3_server: S3Server, s3_bucket: str
) -> None:
    expected = await undisturbed(make, zygote, folder, steps=20, epochs=None)
    async with make(zygote, folder / "resumed", slots=3) as rig:
        three = functools.partial(keys_on, s3_server, s3_bucket, workers={"min": 3, "max": 3})
        job = await run_job(rig, three(steps=6))
        job = await rig.resume(job, three(steps=10))
        await job.end()
        assert saved_steps(job) == [6, 10]
        store = open_store(f"s3://{s3_bucket}/runs/{job.id}")
        part = store.read_manifest(10).parts["optimizer-00003-of-00003.safetensors"]
        key = f"runs/{job.id}/{part.key}"
        data = s3_server.read(s3_bucket, key)
        s3_server.write(s3_bucket, key, data[:-1] + bytes([data[-1] ^ 1]))
        two = keys_on(s3_server, s3_bucket, steps=20, workers={"min": 2, "max": 2})
        job = await rig.resume(job, two)
        await job.end()

    assert job.status == "finished", job.describe()
    assert job.found(JobRestored)[-1].step == 6, job.describe()
    [skipped] = messages(job, "checkpoint skipped: step_00000010: ")
    assert "optimizer-00003-of-00003.safetensors was altered" in skipped
    losses, digests = results(job.events())
    assert losses == expected[0]
    assert max(digests) == max(expected[1])


@long
async def test_ranks_lost_during_a_joint_write_leave_the_previous_checkpoint(
    zygote: Any, folder: Path, limits: None, make: MakeRig, s3_server: S3Server, s3_bucket: str
) -> None:
    expected = await undisturbed(make, zygote, folder, steps=24, epochs=None)
    # The store is still writing rank 1's part of step 12 when that rank and its neighbor are lost.
    slow = S3Fault(kind="slow", seconds=4.0, match="step_00000012/optimizer-00002")
    plan = FaultPlan().kill(rank=1, step=13).kill(rank=2, step=13)
    body = functools.partial(keys_on, s3_server, s3_bucket, workers={"min": 2, "max": 4})
    async with make(zygote, folder / "lost", slots=4) as rig:
        job = await run_job(rig, body(steps=6))
        s3_server.set_faults(slow)
        job = await rig.resume(job, body(steps=24), faults=plan.to_list())
        await job.end()

    assert job.status == "finished", job.describe()
    assert [e.step for e in job.found(JobRestored)] == [6, 6], job.describe()
    assert len(job.found(WorkerLost)) == 2
    losses, digests = results(job.events())
    assert losses == expected[0]
    assert max(digests) == max(expected[1])
    # The next attempt at step 12 has other keys, and nothing of the first one is left.
    store = open_store(f"s3://{s3_bucket}/runs/{job.id}")
    assert {
        key.split("/")[3] for key in s3_server.list_keys(s3_bucket, f"runs/{job.id}/check")
    } == {
        part.key.split("/")[1]
        for step in store.list_steps()
        for part in store.read_manifest(step).parts.values()
    }


@pytest.mark.slow
@long
async def test_twenty_random_kills_cost_no_step_from_a_checkpoint(
    zygote: Any, folder: Path, limits: None, make: MakeRig
) -> None:
    changes: dict[str, Any] = {"steps": 420, "epochs": None}
    expected = await undisturbed(make, zygote, folder, **changes)
    rng, plan = random.Random(0), FaultPlan()
    for number in range(20):
        plan = plan.kill(rank=rng.randrange(3), step=10 + 20 * number, at=rng.choice(PLACES))
    async with make(zygote, folder / "killed", slots=4) as rig:
        job = await run_job(rig, keys(**changes), plan)

    assert len(job.found(WorkerLost)) == 20, job.describe()
    assert not job.found(JobRestored), job.describe()
    assert results(job.events()) == expected
