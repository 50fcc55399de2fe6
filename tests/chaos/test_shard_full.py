"""``shard: full`` on real processes: kills lose no weights, and losses are those of one worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from etrain_jupyter.log.events import (
    CheckpointCommitted,
    EvalCompleted,
    Event,
    GenerationFormed,
    JobRestored,
    StepCompleted,
    WorkerLost,
)
from etrain_jupyter.storage.checkpoints import open_newest, open_store
from etrain_jupyter.testing import FaultPlan
from etrain_jupyter.testing.invariants import assert_invariants
from tests.chaos.rig import MakeRig, RigJob, run_job
from tests.chaos.workload import STEPS_PER_EPOCH, accuracy, make_data

pytestmark = pytest.mark.forked

PLACES = ("forward", "all_reduce", "commit", "agree", "agreed")


class Block(nn.Module):
    """A residual block whose rows do not divide evenly among 2, 3 or 4 ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.back = nn.LayerNorm(13), nn.Linear(13, 37), nn.Linear(37, 13)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.back(F.gelu(self.wide(self.norm(x))))


class Deep(nn.Module):
    """Repeated blocks, a frozen layer, and weights with fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.last = nn.Linear(8, 13), nn.Linear(13, 13), nn.Linear(13, 2)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def keys(**changes: Any) -> dict[str, Any]:
    return {
        "model": Deep,
        "data": {"train": make_data, "eval": make_data},
        "loss": F.cross_entropy,
        "metrics": {"accuracy": accuracy},
        "optimizer": {"name": "AdamW", "lr": 0.01, "no_decay": "auto"},
        "clip_grad_norm": 0.5,
        "batch": {"global": 8},
        "shard": "full",
        "checkpoint": {"every": "1000 steps"},
        "epochs": 3,
        "workers": {"min": 1, "max": 4},
        **changes,
    }


def losses_of(log: list[Event]) -> dict[int, float]:
    return {e.step: e.loss for e in log if isinstance(e, StepCompleted)}


def evaluated(log: list[Event]) -> dict[int, float]:
    return {e.step: e.loss for e in log if isinstance(e, EvalCompleted)}


def assert_same_results(job: RigJob, expected: list[Event]) -> None:
    """Assert that losses differ by rounding only."""
    assert losses_of(job.events()) == pytest.approx(losses_of(expected), rel=2e-3, abs=2e-4)
    calm = evaluated(expected)
    found = {step: loss for step, loss in evaluated(job.events()).items() if step in calm}
    assert found == pytest.approx(calm, rel=2e-3, abs=2e-4)


async def undisturbed(make: MakeRig, zygote: Any, folder: Path, **changes: Any) -> list[Event]:
    """Return the log of a job whose state is not divided, on one worker."""
    body = keys(shard="none", workers={"min": 1, "max": 1}, **changes)
    async with make(zygote, folder / "calm") as rig:
        return (await run_job(rig, body)).events()


async def test_kills_at_every_point_of_a_step_lose_no_weights(
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
    assert {3, 4} <= {e.world_size for e in job.found(StepCompleted)}
    assert_same_results(job, expected)
    # The ranks saved the last state together, in a generation of their own.
    assert job.found(GenerationFormed)[-1].why == "save"
    assert [e.step for e in job.found(CheckpointCommitted)] == [3 * STEPS_PER_EPOCH]


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
    assert "the weights and the optimizer state of" in restored.reason
    assert "were neighbors in the order of ranks" in restored.reason
    assert_same_results(job, expected)


async def test_workers_that_join_and_leave_as_planned_hand_over_their_shards(
    zygote: Any, folder: Path, limits: None, make: MakeRig
) -> None:
    changes: dict[str, Any] = {"steps": 60, "epochs": None}
    expected = await undisturbed(make, zygote, folder, **changes)
    async with make(zygote, folder / "scaled", slots=4) as rig:
        job = await rig.submit(keys(**changes, workers={"min": 1, "max": 1}))
        await job.until(lambda: job.step >= 4)
        await job.request("scale", min=1, max=4)
        await job.until(lambda: len(job.ranks) == 4 and job.step >= 8)
        await job.request("scale", min=1, max=1)
        await job.end()

    assert job.status == "finished", job.describe()
    assert_invariants(job.events())
    assert not job.found(JobRestored), job.describe()
    sizes = [e.world_size for e in job.found(GenerationFormed)]
    assert sizes[0] == sizes[-1] == 1, sizes
    assert 4 in sizes
    assert_same_results(job, expected)


async def test_worker_with_a_notice_hands_over_its_shards(
    zygote: Any, folder: Path, limits: None, make: MakeRig
) -> None:
    changes: dict[str, Any] = {"steps": 30, "epochs": None}
    expected = await undisturbed(make, zygote, folder, **changes)
    plan = FaultPlan().notice(rank=1, step=10)
    async with make(zygote, folder / "noticed", slots=3) as rig:
        job = await run_job(rig, keys(**changes, workers={"min": 2, "max": 3}), plan)

    assert not job.found(JobRestored), job.describe()
    assert not job.found(WorkerLost), job.describe()
    assert_same_results(job, expected)


@pytest.mark.parametrize(("shard", "num_workers"), [("none", 1), ("optimizer", 2), ("full", 2)])
async def test_checkpoint_of_three_ranks_is_resumed_with(
    zygote: Any, folder: Path, limits: None, make: MakeRig, shard: str, num_workers: int
) -> None:
    expected = await undisturbed(make, zygote, folder, steps=20, epochs=None)
    async with make(zygote, folder / "resumed", slots=3) as rig:
        job = await run_job(rig, keys(steps=10, epochs=None, workers={"min": 3, "max": 3}))
        parts = open_newest(open_store(str(job.folder)), job_id=job.id).manifest.parts
        assert {f"optimizer-0000{number}-of-00003.safetensors" for number in (1, 2, 3)} <= {*parts}
        workers = {"min": num_workers, "max": num_workers}
        job = await rig.resume(job, keys(steps=20, epochs=None, shard=shard, workers=workers))
        await job.end()

    assert job.status == "finished", job.describe()
    assert_same_results(job, expected)


async def test_best_weights_of_divided_evaluations_are_saved(
    zygote: Any, folder: Path, limits: None, make: MakeRig
) -> None:
    changes: dict[str, Any] = {
        "eval": "4 steps",
        "checkpoint": {"every": "1000 steps", "best": {"metric": "loss", "mode": "min"}},
        "batch": {"global": 8, "micro": 2},
        "steps": 12,
        "epochs": None,
    }
    expected = await undisturbed(make, zygote, folder, **changes)
    async with make(zygote, folder / "best", slots=3) as rig:
        job = await run_job(rig, keys(**changes, workers={"min": 3, "max": 3}))

    assert [e.step for e in job.found(EvalCompleted)] == [4, 8, 12]
    assert {4, 8, 12} >= {e.step for e in job.found(CheckpointCommitted)} >= {12}
    assert_same_results(job, expected)
