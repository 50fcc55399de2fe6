"""Resume ended jobs, and jobs whose workers and coordinator have died."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from etrain_jupyter.log.events import (
    CheckpointCommitted,
    GenerationFormed,
    JobPlanned,
    JobRestored,
    JobResumed,
    LogLine,
    StepCompleted,
    UserErrorRaised,
    WeightsHashed,
)
from etrain_jupyter.notebook.audit import audit_log
from etrain_jupyter.storage.checkpoints import LocalStore
from etrain_jupyter.testing.invariants import assert_invariants
from tests.chaos.rig import MakeRig, Rig
from tests.chaos.trainers import Trainers
from tests.chaos.workload import STEPS_PER_EPOCH, Net, body

SAME_BITS = {"reproducible": {"shards": 4}}


def digest(job: Any) -> str:
    """Return the last step and the digest of the final weights of a job."""
    hashed = job.found(WeightsHashed)
    last = max(event.step for event in hashed)
    [found] = {event.digest for event in hashed if event.step == last}
    return f"{last} {found}"


def curve(job: Any) -> dict[int, float]:
    """Return the final loss of each step, without undone steps."""
    return {event.step: event.loss for event in job.found(StepCompleted)}


@pytest.mark.forked
async def test_resume_with_another_world_size_is_bitwise_equal_to_an_undisturbed_run(
    rig: Rig,
) -> None:
    undisturbed = await rig.submit(body(**SAME_BITS, workers={"min": 1, "max": 1}))
    await undisturbed.end()
    job = await rig.submit(body(**SAME_BITS, workers={"min": 1, "max": 2}))
    await job.until(lambda: job.step >= STEPS_PER_EPOCH + 5)
    await job.request("stop")
    await job.end()
    stopped_at = job.step

    await rig.resume(job, body(**SAME_BITS, workers={"min": 3, "max": 4}))
    log = await job.end()

    assert job.status == "finished"
    [resumed] = job.found(JobResumed)
    assert (resumed.from_status, resumed.step) == ("stopped", stopped_at)
    assert job.found(JobRestored)[-1].step == stopped_at
    assert job.found(GenerationFormed)[-1].world_size >= 3
    assert digest(job) == digest(undisturbed)
    assert curve(job) == curve(undisturbed)
    assert_invariants(log)


async def test_job_resumes_after_all_workers_and_the_coordinator_died(
    trainers: Trainers, folder: Path, limits: None, make: MakeRig
) -> None:
    keys = body(**SAME_BITS, checkpoint={"every": "10 steps"}, workers={"min": 1, "max": 2})
    async with make(trainers, folder) as first:
        undisturbed = await first.submit(keys)
        await undisturbed.end()
        expected = digest(undisturbed)
        job = await first.submit(keys)
        await job.until(lambda: job.step >= 25 and job.found(CheckpointCommitted))
        first.crash(job)
    generation = max(e.generation for e in job.events())

    async with make(trainers, folder) as second:
        job = await second.resume(job, keys)
        log = await job.end()

        assert job.status == "finished"
        assert digest(job) == expected
        resumed = next(e for e in log if isinstance(e, JobResumed))
        assert resumed.from_status == "running"
        assert [e.generation for e in log if isinstance(e, GenerationFormed)][-1] > generation
        assert_invariants(log)


@pytest.mark.forked
async def test_finished_job_resumes_for_more_epochs(rig: Rig) -> None:
    job = await rig.submit(body(epochs=1))
    await job.end()

    await rig.resume(job, body(epochs=2))
    log = await job.end()

    assert sorted(curve(job)) == list(range(1, 2 * STEPS_PER_EPOCH + 1))
    assert [event.total_steps for event in job.found(JobPlanned)] == [29, 58]
    report = audit_log(log)
    assert report.ok, str(report)
    assert [(row.epoch, row.seen_once, row.is_complete) for row in report.epochs] == [
        (0, 230, True),
        (1, 230, True),
    ]


@pytest.mark.forked
async def test_job_without_a_checkpoint_restarts_at_step_zero_in_the_same_log(
    trainers: Trainers, folder: Path, limits: None, make: MakeRig
) -> None:
    async with make(trainers, folder) as first:
        job = await first.submit(body(epochs=1))
        await job.until(lambda: job.step >= 5)
        first.crash(job)

    async with make(trainers, folder) as second:
        job = await second.resume(job, body(epochs=1))
        log = await job.end()

        assert job.found(JobRestored)[-1].step == 0
        assert curve(job).keys() == set(range(1, STEPS_PER_EPOCH + 1))
        assert_invariants(log)


class Broken(Net):
    """Raises an error in the second epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.passes += 1
        if self.passes > STEPS_PER_EPOCH + 5:
            raise ValueError("a mistake in the notebook")
        return super().forward(x)


class Fixed(Broken):
    """The same model without the error."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Net.forward(self, x)


@pytest.mark.forked
async def test_failed_job_resumes_with_fixed_code(rig: Rig) -> None:
    one = {"workers": {"min": 1, "max": 1}}
    job = await rig.submit(body(model=Broken, **one))
    await job.end()
    assert job.status == "failed"
    failed_at = job.step

    await rig.resume(job, body(model=Fixed, **one), differs=["code"])
    log = await job.end()

    assert job.status == "finished"
    assert job.found(JobRestored)[-1].step == failed_at
    assert_invariants(log)


class Wider(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.mark.forked
async def test_resume_with_another_model_fails_and_keeps_all_checkpoints(rig: Rig) -> None:
    job = await rig.submit(body(epochs=1))
    await job.end()
    saved = LocalStore(job.hosted.spec.run_dir).list_steps()

    await rig.resume(job, body(model=Wider, epochs=2), is_forced=True)
    await job.end()

    assert job.status == "failed"
    assert "does not fit this model" in job.found(UserErrorRaised)[-1].error
    assert LocalStore(job.hosted.spec.run_dir).list_steps() == saved
    await rig.resume(job, body(epochs=2))
    log = await job.end()
    assert job.status == "finished"
    assert_invariants(log)


def fewer() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(100, 8, generator=torch.Generator().manual_seed(4))
    return x, (x.sum(dim=1) > 0).long()


@pytest.mark.forked
async def test_resume_with_data_of_another_length_requires_force(rig: Rig) -> None:
    job = await rig.submit(body(epochs=1))
    await job.end()
    other = body(epochs=6, data={"train": fewer, "eval": fewer})

    await rig.resume(job, other)
    await job.end()

    assert job.status == "failed"
    assert "has 100 samples, but had 230" in job.found(UserErrorRaised)[-1].error
    await rig.resume(job, other, is_forced=True)
    log = await job.end()
    assert job.status == "finished"
    report = audit_log(log)
    assert report.ok, str(report)


@pytest.mark.forked
async def test_resume_with_another_optimizer_resets_its_state_and_logs_it(rig: Rig) -> None:
    job = await rig.submit(body(epochs=1, loss=F.cross_entropy))
    await job.end()
    other = body(epochs=2, optimizer={"name": "SGD", "lr": 0.05, "momentum": 0.9})

    await rig.resume(job, other, is_forced=True)
    log = await job.end()

    assert job.status == "finished"
    assert any("from AdamW to SGD" in event.text for event in job.found(LogLine))
    assert job.found(StepCompleted)[-1].lr == 0.05
    assert_invariants(log)
