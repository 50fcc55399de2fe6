"""Best weights, early stopping and non-finite losses while processes are killed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from etrain_jupyter.log.events import (
    BestReached,
    CheckpointCommitted,
    EarlyStopped,
    EvalCompleted,
    Event,
    GenerationFormed,
    JobStatusChanged,
    LogLine,
    LossNotFinite,
    StepCompleted,
    StepUndone,
    UserErrorRaised,
    WorkerLost,
)
from etrain_jupyter.notebook.audit import audit_log
from etrain_jupyter.notebook.job.job_record import RunRecord
from etrain_jupyter.notebook.job.weights import find_saved, load_weights
from etrain_jupyter.storage.checkpoints import LocalStore
from etrain_jupyter.testing import FaultPlan
from etrain_jupyter.testing.invariants import assert_invariants
from tests.chaos.rig import Rig, RigJob
from tests.chaos.workload import STEPS_PER_EPOCH, Net, body

PATH = (0.5, 0.6, 0.9, 0.7, 0.8, 0.75, 0.7, 0.65)
"""Score of each evaluation in order; the third one is the best."""
EVAL_STEPS = 10


class Scripted(nn.Module):
    """Counts its steps in a buffer, the only value that its evaluations depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.passes += 1
        return torch.cat([self.layer(x), self.passes.expand(len(x), 1)], dim=1)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output[:, :2], target)


def score(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    number = max(1, min(len(PATH), round(float(output[0, 2]) / EVAL_STEPS)))
    return torch.full((len(target),), PATH[number - 1])


def scripted(**keys: Any) -> dict[str, Any]:
    return body(
        model=Scripted,
        loss=loss,
        metrics={"score": score},
        eval={"every": f"{EVAL_STEPS} steps"},
        epochs=None,
        steps=80,
        **keys,
    )


BEST = {"checkpoint": {"best": {"metric": "score", "mode": "max"}, "keep": 1}}
STOP = {"early_stopping": {"metric": "score", "mode": "max", "patience": 3}}
BEST_STEP, STOP_STEP = 30, 60


def forked_but(plans: dict[str, FaultPlan], served: str) -> list[Any]:
    """Return a parameter for each plan; ``served`` names the one for the product's fork server."""
    return [
        pytest.param(name, marks=() if name == served else pytest.mark.forked) for name in plans
    ]


def found(log: list[Event], kind: type[Event]) -> list[Any]:
    return [event for event in log if isinstance(event, kind)]


def best_weights(job: RigJob) -> dict[str, torch.Tensor]:
    order = job.hosted.spec
    record = RunRecord(
        job_id=job.id, name="job", created=0.0, folder=order.run_dir, config=order.config
    )
    reached = {e.step: e.value for e in job.found(BestReached)}
    return load_weights(find_saved(record, "best", reached))


KILLS = {
    "rank 0 dies in the step after the best": FaultPlan().kill(rank=0, step=BEST_STEP + 1),
    "rank 0 dies in the evaluation that is the best": FaultPlan().kill(
        rank=0, step=BEST_STEP, at="eval"
    ),
    "rank 0 dies before it can save the best": FaultPlan().kill(
        rank=0, step=BEST_STEP, at="evaluated"
    ),
    "two die around it": FaultPlan()
    .kill(rank=1, step=BEST_STEP, at="commit")
    .kill(rank=0, step=BEST_STEP + 1),
}


@pytest.mark.parametrize("name", forked_but(KILLS, "two die around it"))
async def test_best_weights_survive_deaths_around_the_best_step(rig: Rig, name: str) -> None:
    job = await rig.submit(scripted(**BEST), faults=KILLS[name].to_list())
    log = await job.end()

    assert job.status == "finished", job.describe()
    assert_invariants(log)
    assert len(found(log, WorkerLost)) == len(KILLS[name].faults)
    reached = [(e.step, round(e.value, 6)) for e in found(log, BestReached)]
    assert reached == [(10, 0.5), (20, 0.6), (30, 0.9)]
    assert LocalStore(job.hosted.spec.run_dir).list_steps() == [30, 80]
    assert best_weights(job)["passes"] == 30


async def test_best_step_is_found_again_after_the_job_restored_an_older_checkpoint(
    rig: Rig,
) -> None:
    # All ranks die after the best step was saved; the next generation restores a checkpoint.
    plan = FaultPlan()
    for rank in range(4):
        plan = plan.kill(rank=rank, step=45, at="forward")
    job = await rig.submit(scripted(**BEST, workers={"min": 4, "max": 4}), faults=plan.to_list())
    log = await job.end()

    assert job.status == "finished", job.describe()
    assert_invariants(log)
    assert LocalStore(job.hosted.spec.run_dir).list_steps() == [30, 80]
    assert best_weights(job)["passes"] == 30


ENDS = {
    "rank 0 dies in the deciding evaluation": FaultPlan().kill(rank=0, step=STOP_STEP, at="eval"),
    "two die after the deciding evaluation": FaultPlan()
    .kill(rank=0, step=STOP_STEP, at="evaluated")
    .kill(rank=1, step=STOP_STEP, at="evaluated"),
    "rank 1 dies in the deciding evaluation": FaultPlan().kill(rank=1, step=STOP_STEP, at="eval"),
    "all but one die before it": FaultPlan()
    .kill(rank=0, step=STOP_STEP - 3)
    .kill(rank=1, step=STOP_STEP - 3)
    .kill(rank=2, step=STOP_STEP - 3),
}


@pytest.mark.parametrize("name", forked_but(ENDS, "all but one die before it"))
async def test_early_stopping_ends_at_the_same_step_despite_deaths(rig: Rig, name: str) -> None:
    job = await rig.submit(scripted(**STOP), faults=ENDS[name].to_list())
    log = await job.end()

    assert job.status == "finished", job.describe()
    assert_invariants(log)
    [ended] = found(log, EarlyStopped)
    assert (ended.step, ended.best_step, ended.num_evals) == (STOP_STEP, BEST_STEP, 3)
    assert ended.best == pytest.approx(0.9)
    assert [e.step for e in found(log, EvalCompleted)] == [10, 20, 30, 40, 50, 60]
    assert max(e.step for e in found(log, StepCompleted)) == STOP_STEP
    assert max(e.step for e in found(log, CheckpointCommitted)) == STOP_STEP
    assert found(log, JobStatusChanged)[-1].reason == (
        "early stopping: score has not improved in 3 evaluations since its best, 0.9 at step 30"
    )
    assert "one cut short: the job ended early" in audit_log(log).verdict


@pytest.mark.forked
async def test_restored_ranks_keep_the_early_stopping_counter(rig: Rig) -> None:
    plan = FaultPlan()
    for rank in range(4):  # all ranks, so that the counter must come from a checkpoint
        plan = plan.kill(rank=rank, step=58, at="forward")
    keys = {"checkpoint": {"every": "7 steps"}, "workers": {"min": 4, "max": 4}}
    job = await rig.submit(scripted(**STOP, **keys), faults=plan.to_list())
    log = await job.end()

    assert job.status == "finished", job.describe()
    assert_invariants(log)
    assert [e.step for e in found(log, EarlyStopped)] == [STOP_STEP]


NAN_STEP = 17


@pytest.mark.forked
async def test_nan_loss_fails_the_job_after_the_last_good_step(rig: Rig) -> None:
    plan = FaultPlan().nan_loss(rank=2, step=NAN_STEP)
    job = await rig.submit(body(workers={"min": 4, "max": 4}), faults=plan.to_list())
    log = await job.end()

    assert job.status == "failed", job.describe()
    assert_invariants(log)
    formed = found(log, GenerationFormed)[-1]
    words = (
        f"the loss of step 17 is nan on rank 2 ({formed.ranks[2]}); no rank updated its weights, "
        "which are those of step 16; the newest checkpoint is of step 16"
    )
    assert found(log, JobStatusChanged)[-1].reason == words
    [detected] = found(log, LossNotFinite)
    assert (detected.step, detected.ranks, detected.workers) == (NAN_STEP, [2], [formed.ranks[2]])
    assert math.isnan(detected.loss)
    assert [e.error for e in found(log, UserErrorRaised)] == [words]
    assert max(e.step for e in found(log, StepCompleted)) == NAN_STEP - 1
    assert [e.step for e in found(log, CheckpointCommitted)][-1] == NAN_STEP - 1
    assert found(log, StepUndone) == found(log, WorkerLost) == []
    assert len(found(log, GenerationFormed)) == 1  # no rank had to be aborted


async def test_nan_loss_pauses_the_job_and_resume_retries_the_step(rig: Rig) -> None:
    plan = FaultPlan().nan_loss(rank=1, step=NAN_STEP)
    keys = {"on_nan_loss": "pause", "workers": {"min": 4, "max": 4}}
    job = await rig.submit(body(**keys), faults=plan.to_list())
    await job.until(lambda: job.status == "paused")

    reason = job.hosted.state.reason
    assert "the loss of step 17 is nan on rank 1" in reason
    assert "%etrain resume retries the step" in reason
    assert job.step == NAN_STEP - 1
    assert await job.request("resume") == "continues"
    log = await job.end()
    assert job.status == "finished", job.describe()
    assert_invariants(log)
    assert max(e.step for e in found(log, StepCompleted)) == 3 * STEPS_PER_EPOCH
    assert found(log, StepUndone) == found(log, WorkerLost) == []


@pytest.mark.forked
async def test_job_paused_by_a_nan_loss_stops_with_a_checkpoint(rig: Rig) -> None:
    plan = FaultPlan().nan_loss(rank=0, step=NAN_STEP)
    job = await rig.submit(body(on_nan_loss="pause"), faults=plan.to_list())
    await job.until(lambda: job.status == "paused")
    await job.request("stop")
    log = await job.end()

    assert job.status == "stopped", job.describe()
    assert_invariants(log)
    assert [e.step for e in found(log, CheckpointCommitted)][-1] == NAN_STEP - 1


@pytest.mark.forked
@pytest.mark.parametrize("reproducible", [False, True])
async def test_sample_with_an_infinite_loss_is_detected_on_every_retry(
    rig: Rig, reproducible: bool
) -> None:
    """The data cause the infinite loss, without fault injection; the weights do not change."""
    keys = {"on_nan_loss": "pause", "workers": {"min": 2, "max": 2}, "epochs": 1}
    data = {"train": poisoned_data, "eval": make_clean_data}
    job = await rig.submit(body(data=data, reproducible=reproducible, **keys))
    await job.until(lambda: job.status == "paused")
    step = job.step
    await job.request("resume")
    await job.until(lambda: len(job.found(LossNotFinite)) == 2 and job.status == "paused")
    await job.request("stop")
    log = await job.end()

    first, second = found(log, LossNotFinite)
    assert first.step == second.step == step + 1
    assert first.ranks == second.ranks
    assert len(first.ranks) == 1
    assert_invariants(log)


def make_clean_data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(64, 8, generator=generator)
    return x, (x.sum(dim=1) > 0).long()


def poisoned_data() -> tuple[torch.Tensor, torch.Tensor]:
    x, y = make_clean_data()
    x[40] = math.inf
    return x, y


@pytest.mark.forked
async def test_rank_that_dies_during_a_nan_loss_does_not_hide_it(rig: Rig) -> None:
    plan = FaultPlan().nan_loss(rank=1, step=NAN_STEP).kill(rank=3, step=NAN_STEP, at="all_reduce")
    keys = {"on_nan_loss": "pause", "workers": {"min": 1, "max": 4}}
    job = await rig.submit(body(**keys), faults=plan.to_list())
    await job.until(lambda: job.is_ended or job.status == "paused")
    if job.status == "paused":
        await job.request("resume")
    log = await job.end()

    assert job.status == "finished", job.describe()
    assert_invariants(log)


def bad_without_grad(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target) * (math.nan if not torch.is_grad_enabled() else 1.0)


def nan_metric(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.full((len(target),), math.nan)


@pytest.mark.forked
async def test_nan_in_an_evaluation_or_metric_does_not_fail_the_job(rig: Rig) -> None:
    job = await rig.submit(
        body(loss=bad_without_grad, metrics={"bad": nan_metric}, model=Net, epochs=1)
    )
    log = await job.end()

    assert job.status == "finished", job.describe()
    assert_invariants(log)
    warnings = [e.text for e in found(log, LogLine) if e.level == "warning"]
    assert warnings == ["step 29: the loss of the evaluation is nan; training continues"]


class Unreadable(nn.Module):
    """Fails with a file name that is not valid UTF-8, as ``os.listdir`` returns it."""

    def __init__(self) -> None:
        super().__init__()
        raise ValueError("bad file data/caf\udce9.png")


async def test_error_with_an_invalid_utf8_file_name_reaches_the_user(rig: Rig) -> None:
    """Regression: the report killed the trainer, and the user saw three dead trainers instead."""
    job = await rig.submit(body(model=Unreadable))
    log = await job.end()

    [error] = [event for event in log if isinstance(event, UserErrorRaised)]
    assert error.error == "ValueError: bad file data/caf\\udce9.png"
    assert "caf\\udce9.png" in error.traceback
    assert not [event for event in log if isinstance(event, WorkerLost)]
