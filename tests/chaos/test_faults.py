"""Every kind of fault on real processes: lost workers, causes and the cost for the others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from etrain_jupyter.log.events import (
    CheckpointCommitted,
    Event,
    FaultInjected,
    GenerationFormed,
    GenerationReady,
    JobRestored,
    JobStatusChanged,
    LogLine,
    StepCompleted,
    StepUndone,
    WorkerLeft,
    WorkerLost,
)
from etrain_jupyter.testing import FaultPlan
from etrain_jupyter.testing.invariants import assert_invariants
from tests.chaos.rig import Rig, RigJob
from tests.chaos.workload import STEPS_PER_EPOCH, body

NUM_STEPS = 3 * STEPS_PER_EPOCH
AT = 12
"""Step of the first fault, in the first epoch, before the first checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One fault of the table, for a job of four ranks, and its expected outcome."""

    name: str
    plan: FaultPlan
    lost: int = 1
    """Expected number of lost workers."""
    causes: str = ""
    """Text in the cause of each ``WorkerLost``."""
    undoes: bool = True
    """True if a step was in flight; each fault may undo one step."""
    restored: bool = False
    """True if no rank survives, so that the job restores an older state."""
    stacks: str = ""
    """Text that the logged stack dump of the lost rank must contain; empty if there is none."""
    keys: dict[str, Any] = field(default_factory=dict)
    served: bool = False
    """True to use the product's fork server, one row for each way to die or to hang. Other rows use
    forked trainers, except with ``ETRAIN_SPAWN``."""
    quick: bool = False
    """True if a new worker must join before the job's 87 steps are over: always forked."""

    @property
    def param(self) -> Any:
        """This row as a test parameter."""
        marks = () if self.served else pytest.mark.forked(always=self.quick)
        return pytest.param(self, id=self.name.replace(" ", "-"), marks=marks)


def plan(*, ranks: tuple[int, ...] = (1,), kind: str = "kill", at: str = "") -> FaultPlan:
    """Plan the same fault for each rank; for several ranks, before they exchange gradients."""
    made = FaultPlan()
    at = at or ("all_reduce" if len(ranks) == 1 else "forward")
    for rank in ranks:
        made = made.add(kind, rank=rank, step=AT, at=at)
    return made


FIRST = FaultPlan().kill(rank=3, step=AT)
"""Makes the survivors form a new generation and a new worker join."""

TABLE = (
    Row(name="SIGKILL before the forward pass", plan=plan(at="forward"), causes="SIGKILL"),
    Row(
        name="SIGKILL while the averages are under way",
        plan=plan(),
        causes="SIGKILL",
        served=True,
    ),
    Row(name="SIGKILL before the update", plan=plan(at="commit"), causes="SIGKILL"),
    Row(name="SIGKILL in the evaluation", plan=plan(at="eval"), causes="SIGKILL", undoes=False),
    Row(name="segfault", plan=plan(kind="segfault"), causes="SIGSEGV", served=True),
    Row(name="os._exit", plan=plan(kind="exit"), causes="exited with code 7", served=True),
    Row(
        name="exception in the framework",
        plan=plan(kind="error"),
        causes="exited with code 1",
        stacks="InjectedError",
        served=True,
    ),
    Row(name="SIGSTOP", plan=plan(kind="stop"), causes="SIGSTOP", served=True),
    Row(name="SIGSTOP of rank 0", plan=plan(kind="stop", ranks=(0,)), causes="SIGSTOP"),
    Row(
        name="GIL held forever",
        plan=plan(kind="hold_gil"),
        causes="held the GIL",
        stacks="_hold_gil",
        served=True,
    ),
    Row(
        name="main thread hangs before the others' collective",
        plan=plan(kind="hang", at="forward"),
        causes="no progress",
        stacks="_hang",
        served=True,
    ),
    Row(
        name="main thread hangs before the exchange of a generation's second step",
        # In that step DDP synchronizes its buckets with a broadcast.
        plan=FaultPlan().hang(rank=3, step=2),
        causes="no progress",
        stacks="_hang",
    ),
    Row(
        name="SIGKILL in the exchange of a generation's second step",
        plan=FaultPlan().kill(rank=3, step=2),
        causes="SIGKILL",
    ),
    Row(name="its connections break", plan=plan(kind="disconnect"), lost=0, served=True),
    Row(
        name="its whole worker is killed",
        plan=FaultPlan().kill_worker(rank=1, step=AT),
        served=True,
    ),
    Row(name="rank 0 is killed", plan=plan(ranks=(0,)), causes="SIGKILL"),
    Row(name="two at once", plan=plan(ranks=(1, 2)), lost=2, causes="SIGKILL"),
    Row(name="every rank but one", plan=plan(ranks=(0, 1, 2)), lost=3, causes="SIGKILL"),
    Row(
        # The first rank may die while the last one is still finishing the previous step, which is
        # then undone as well.
        name="all ranks",
        plan=plan(ranks=(0, 1, 2, 3)),
        lost=4,
        causes="SIGKILL",
        restored=True,
        served=True,
    ),
    Row(
        name="two that hang in different ways",
        plan=plan(kind="stop", at="forward").hold_gil(rank=2, step=AT),
        lost=2,
    ),
    Row(
        name="death of a survivor while a generation forms",
        plan=FIRST.kill(rank=1, step=AT - 1, at="form"),
        lost=2,
        causes="SIGKILL",
    ),
    Row(
        name="a survivor hangs while a generation forms",
        plan=FIRST.hang(rank=1, step=AT - 1, at="form"),
        lost=2,
    ),
    Row(
        name="death of a newcomer during its admission",
        quick=True,
        plan=FIRST.kill(rank=3, step=AT - 1, at="sync"),
        lost=2,
        causes="SIGKILL",
    ),
    Row(
        name="death of rank 0 while it hands its state to a newcomer",
        quick=True,
        plan=FIRST.kill(rank=0, step=AT - 1, at="sync"),
        lost=2,
        causes="SIGKILL",
    ),
    Row(
        name="death of rank 0 while it hands out the first weights, and nothing is saved",
        plan=FaultPlan().kill(rank=0, step=0, at="sync"),
        causes="SIGKILL",
        undoes=False,
        restored=True,
    ),
    Row(
        name="death of a newcomer before it is warm",
        quick=True,
        # Trainers are numbered from 0: the fifth one replaces the first lost trainer.
        plan=FIRST.kill(rank=4, step=0, at="warm"),
        lost=2,
        causes="SIGKILL",
    ),
    Row(
        name="flapping worker",
        quick=True,
        plan=FIRST.kill(rank=3, step=AT + 1).kill(rank=3, step=AT + 2).kill(rank=3, step=AT + 3),
        lost=4,
        causes="SIGKILL",
        keys={"epochs": 8},
    ),
)


@pytest.mark.parametrize("row", [row.param for row in TABLE])
async def test_fault_costs_at_most_one_step_and_no_other_worker(rig: Rig, row: Row) -> None:
    job = await start(rig, row.plan, **row.keys)
    log = await job.end()

    assert job.status == "finished", job.describe()
    assert_invariants(log)
    lost = found(log, WorkerLost)
    assert len(lost) == row.lost, job.describe()
    assert all(row.causes in e.cause for e in lost), [e.cause for e in lost]
    injected = found(log, FaultInjected)
    assert len(injected) == len(row.plan.faults), job.describe()
    assert {e.worker for e in lost} <= {e.worker for e in injected}
    most = len(row.plan.faults) if row.undoes else 0
    assert len({e.step for e in found(log, StepUndone)}) <= most
    went_back = found(log, JobRestored)
    if row.restored:
        assert went_back
    else:
        # If several ranks die at once, the previous step may be lost with them and is repeated.
        assert sum(e.num_undone for e in went_back) <= (len(row.plan.faults) > 1), went_back
    assert_others_kept_their_process(log, {e.worker for e in lost})
    if row.stacks:
        log_text = "\n".join(e.text for e in found(log, LogLine) if e.worker == lost[0].worker)
        assert row.stacks in log_text, log_text


async def test_control_without_faults_no_step_is_wasted(rig: Rig) -> None:
    """Control run."""
    job = await start(rig, FaultPlan())
    log = await job.end()

    assert job.status == "finished"
    assert_invariants(log)
    wasted = (StepUndone, WorkerLost, WorkerLeft, JobRestored, FaultInjected)
    assert [e for e in log if isinstance(e, wasted) and not is_end(e)] == []
    assert len(found(log, StepCompleted)) == NUM_STEPS
    whys = {why for e in found(log, GenerationFormed) for why in e.why.split("+")}
    assert whys <= {"start", "join"}


async def test_preempted_worker_leaves_without_loss_and_is_replaced(rig: Rig) -> None:
    job = await start(rig, FaultPlan().notice(rank=1, step=AT))
    log = await job.end()

    assert job.status == "finished", job.describe()
    assert_invariants(log)
    assert found(log, StepUndone) == []
    assert found(log, WorkerLost) == []
    left = [e.worker for e in found(log, WorkerLeft) if not is_end(e)]
    assert left == [found(log, FaultInjected)[0].worker]
    assert len(found(log, StepCompleted)) == NUM_STEPS


async def test_preemption_of_all_workers_saves_the_state_first(rig: Rig) -> None:
    # Their replacements take longer to warm up than the notice period.
    faults = FaultPlan()
    for rank in range(4):
        faults = faults.notice(rank=rank, step=AT, notice_s=1.0)
    job = await start(rig, faults)
    log = await job.end()

    assert job.status == "finished", job.describe()
    assert_invariants(log)
    assert found(log, StepUndone) == []
    assert found(log, WorkerLost) == []
    assert [e.num_undone for e in found(log, JobRestored)] in ([], [0])
    assert len(found(log, StepCompleted)) == NUM_STEPS


@pytest.mark.forked
async def test_notice_while_a_generation_forms_takes_effect_at_the_next_step_boundary(
    rig: Rig,
) -> None:
    job = await start(rig, FIRST)
    formed = await job.until(lambda: [e for e in job.found(GenerationFormed) if e.step >= AT - 1])
    noticed = formed[0].ranks[1]
    assert [e for e in job.found(GenerationReady) if e.generation == formed[0].generation] == []
    await job.request("preempt", worker=noticed)
    log = await job.end()

    assert job.status == "finished", job.describe()
    assert_invariants(log)
    assert [e.worker for e in found(log, WorkerLost)] == [found(log, FaultInjected)[0].worker]
    assert noticed in {e.worker for e in found(log, WorkerLeft)}


@pytest.mark.forked
async def test_worker_killed_during_its_notice_period_costs_at_most_one_step(rig: Rig) -> None:
    job = await start(rig, FaultPlan())
    await job.until(lambda: job.step >= AT)
    ranks = job.found(GenerationFormed)[-1].ranks
    await job.request("preempt", worker=ranks[1])
    await job.request("kill", worker=ranks[1])
    log = await job.end()

    assert job.status == "finished", job.describe()
    assert_invariants(log)
    assert [e.worker for e in found(log, WorkerLost)] == [ranks[1]]
    assert len(found(log, StepUndone)) <= 1


async def test_job_below_min_workers_waits_reports_why_and_continues(rig: Rig) -> None:
    job = await start(rig, plan(), workers={"min": 4, "max": 4})
    log = await job.end()

    assert job.status == "finished", job.describe()
    assert_invariants(log)
    waited = [e for e in found(log, JobStatusChanged) if e.status == "waiting" and e.generation]
    assert len(waited) == 1
    assert "3 of min 4" in waited[0].reason
    assert found(log, JobRestored) == []
    assert {e.world_size for e in found(log, GenerationFormed)} == {4}
    assert_others_kept_their_process(log, {e.worker for e in found(log, WorkerLost)})


@pytest.mark.forked
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("lose_sample", f"step {AT} trained 31 samples, expected 32"),
        ("repeat_sample", f"step {AT} trained sample"),
    ],
)
async def test_audit_detects_a_planted_bug_and_names_the_step(
    rig: Rig, kind: str, words: str
) -> None:
    # Shares of eight samples: BatchNorm rejects a batch of one.
    keys = {"batch": {"global": 32}, "epochs": 4}
    job = await start(rig, FaultPlan().add(kind, rank=1, step=AT), **keys)
    log = await job.end()

    assert job.status == "finished", job.describe()
    with pytest.raises(AssertionError, match=words):
        assert_invariants(log)


@pytest.mark.forked
async def test_job_whose_ranks_diverge_fails_in_the_next_step(rig: Rig) -> None:
    # Shares of eight samples: BatchNorm rejects a batch of one.
    keys = {"batch": {"global": 32}, "epochs": 4}
    job = await start(rig, FaultPlan().diverge(rank=1, step=AT), **keys)
    log = await job.end()

    assert job.status == "failed", job.describe()
    assert_invariants(log)
    reasons = [e.reason for e in found(log, JobStatusChanged) if e.status == "failed"]
    assert "the weights of the 4 workers differ in 1 of " in reasons[-1]
    assert f" after step {AT}, so" in reasons[-1]
    assert max(e.step for e in found(log, StepCompleted)) == AT
    assert found(log, CheckpointCommitted) == []


async def start(rig: Rig, faults: FaultPlan, **keys: Any) -> RigJob:
    """Submit a job that starts with four ranks."""
    job = await rig.submit(
        body(**{"epochs": 3, "workers": {"min": 1, "max": 4}, **keys}), faults=faults.to_list()
    )
    return job


def found(log: list[Event], kind: type[Event]) -> list[Any]:
    return [event for event in log if isinstance(event, kind)]


def is_end(event: Event) -> bool:
    return isinstance(event, WorkerLeft) and event.reason == "job ended"


def assert_others_kept_their_process(log: list[Event], lost: set[str]) -> None:
    """Assert that only lost workers were restarted."""
    pids: dict[str, set[int]] = {}
    for formed in found(log, GenerationFormed):
        for worker, pid in zip(formed.ranks, formed.trainer_pids, strict=True):
            pids.setdefault(worker, set()).add(pid)
    assert {worker for worker, known in pids.items() if len(known) > 1} <= lost
