"""Every fault by name, on real processes: who is lost, why, and what it costs the others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from etrain_jupyter.log.events import (
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
"""The step in which the first fault comes: the first epoch is not over, nothing is saved yet."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One fault of the table, at four ranks, and what it must come to."""

    name: str
    plan: FaultPlan
    lost: int = 1
    """How many workers count as lost."""
    causes: str = ""
    """What each of them says in ``WorkerLost``."""
    undoes: bool = True
    """Whether a step was in flight; each fault may cost one."""
    restored: bool = False
    """Whether nobody survived, so that the state is an older one."""
    stacks: str = ""
    """What the culprit's logged stacks must name, where there are any."""
    keys: dict[str, Any] = field(default_factory=dict)
    spawned: bool = False
    """Whether the suite plays it on spawned trainers: one row for each way to die or to hang. The
    others on forked ones, except with ``ETRAIN_SPAWN``."""
    quick: bool = False
    """Whether a newcomer must be there before the job's 87 steps are over: always forked."""

    @property
    def param(self) -> Any:
        """The row as a parameter of a test."""
        marks = () if self.spawned else pytest.mark.forked(always=self.quick)
        return pytest.param(self, id=self.name.replace(" ", "-"), marks=marks)


def plan(*, ranks: tuple[int, ...] = (1,), kind: str = "kill", at: str = "") -> FaultPlan:
    """Plan the same fault for several ranks; at once, where they are not in an exchange yet."""
    made = FaultPlan()
    at = at or ("all_reduce" if len(ranks) == 1 else "forward")
    for rank in ranks:
        made = made.add(kind, rank=rank, step=AT, at=at)
    return made


FIRST = FaultPlan().kill(rank=3, step=AT)
"""Makes the survivors form a generation, and brings a newcomer."""

TABLE = (
    Row(name="SIGKILL before the forward pass", plan=plan(at="forward"), causes="SIGKILL"),
    Row(
        name="SIGKILL while the averages are under way",
        plan=plan(),
        causes="SIGKILL",
        spawned=True,
    ),
    Row(name="SIGKILL before the update", plan=plan(at="commit"), causes="SIGKILL"),
    Row(name="SIGKILL in the evaluation", plan=plan(at="eval"), causes="SIGKILL", undoes=False),
    Row(name="segfault", plan=plan(kind="segfault"), causes="SIGSEGV", spawned=True),
    Row(name="os._exit", plan=plan(kind="exit"), causes="exited with code 7", spawned=True),
    Row(
        name="exception in the framework",
        plan=plan(kind="error"),
        causes="exited with code 1",
        stacks="DeliberateError",
        spawned=True,
    ),
    Row(name="SIGSTOP", plan=plan(kind="stop"), causes="SIGSTOP", spawned=True),
    Row(name="SIGSTOP of rank 0", plan=plan(kind="stop", ranks=(0,)), causes="SIGSTOP"),
    Row(
        name="GIL held for ever",
        plan=plan(kind="hold_gil"),
        causes="held the GIL",
        stacks="_hold_gil",
        spawned=True,
    ),
    Row(
        name="main thread hangs before the others' collective",
        plan=plan(kind="hang", at="forward"),
        causes="no progress",
        stacks="_hang",
        spawned=True,
    ),
    Row(
        name="main thread hangs before the exchange of a generation's second step",
        # DDP agrees on its buckets there, in a broadcast of its own.
        plan=FaultPlan().hang(rank=3, step=2),
        causes="no progress",
        stacks="_hang",
    ),
    Row(
        name="SIGKILL in the exchange of a generation's second step",
        plan=FaultPlan().kill(rank=3, step=2),
        causes="SIGKILL",
    ),
    Row(name="its connections break", plan=plan(kind="disconnect"), lost=0, spawned=True),
    Row(
        name="its whole worker is killed",
        plan=FaultPlan().kill_worker(rank=1, step=AT),
        spawned=True,
    ),
    Row(name="rank 0 is killed", plan=plan(ranks=(0,)), causes="SIGKILL"),
    Row(name="two at once", plan=plan(ranks=(1, 2)), lost=2, causes="SIGKILL"),
    Row(name="every rank but one", plan=plan(ranks=(0, 1, 2)), lost=3, causes="SIGKILL"),
    Row(
        # The first may die while the last is still at the end of the step before, which it undoes.
        name="all ranks",
        plan=plan(ranks=(0, 1, 2, 3)),
        lost=4,
        causes="SIGKILL",
        restored=True,
        spawned=True,
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
        # Trainers are counted from 0: the fifth is the one in the place of the first lost.
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
async def test_fault_costs_what_it_may_and_harms_nobody_else(rig: Rig, row: Row) -> None:
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
        # Of several that die at once, each may hold the step before alone: it is made again.
        assert sum(e.num_undone for e in went_back) <= (len(row.plan.faults) > 1), went_back
    assert_others_kept_their_process(log, {e.worker for e in lost})
    if row.stacks:
        told = "\n".join(e.text for e in found(log, LogLine) if e.worker == lost[0].worker)
        assert row.stacks in told, told


async def test_without_a_fault_nothing_is_wasted(rig: Rig) -> None:
    """The control arm."""
    job = await start(rig, FaultPlan())
    log = await job.end()

    assert job.status == "finished"
    assert_invariants(log)
    wasted = (StepUndone, WorkerLost, WorkerLeft, JobRestored, FaultInjected)
    assert [e for e in log if isinstance(e, wasted) and not is_end(e)] == []
    assert len(found(log, StepCompleted)) == NUM_STEPS
    whys = {why for e in found(log, GenerationFormed) for why in e.why.split("+")}
    assert whys <= {"start", "join"}


async def test_noticed_worker_leaves_without_a_loss_and_another_one_comes(rig: Rig) -> None:
    job = await start(rig, FaultPlan().notice(rank=1, step=AT))
    log = await job.end()

    assert job.status == "finished", job.describe()
    assert_invariants(log)
    assert found(log, StepUndone) == []
    assert found(log, WorkerLost) == []
    left = [e.worker for e in found(log, WorkerLeft) if not is_end(e)]
    assert left == [found(log, FaultInjected)[0].worker]
    assert len(found(log, StepCompleted)) == NUM_STEPS


async def test_notice_to_all_that_hold_the_state_saves_it_before_they_go(rig: Rig) -> None:
    # Their successors take longer to warm up than the notice leaves.
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
async def test_notice_during_a_form_is_kept_until_the_next_step_boundary(rig: Rig) -> None:
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
async def test_machine_that_is_taken_before_its_notice_is_over_costs_one_step(rig: Rig) -> None:
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


async def test_below_min_the_job_waits_says_why_and_goes_on_by_itself(rig: Rig) -> None:
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
        ("lose_sample", f"step {AT} trained 31 samples, due were 32"),
        ("repeat_sample", f"step {AT} trained sample"),
        # Every rank tells a fingerprint of its weights with the step after.
        ("diverge", f"step {AT + 1} the ranks"),
    ],
)
async def test_planted_bug_fails_the_audit_and_the_step_is_named(
    rig: Rig, kind: str, words: str
) -> None:
    # Shares of eight: BatchNorm would refuse one that is left with a single sample.
    keys = {"batch": {"global": 32}, "epochs": 4}
    job = await start(rig, FaultPlan().add(kind, rank=1, step=AT), **keys)
    log = await job.end()

    assert job.status == "finished", job.describe()
    with pytest.raises(AssertionError, match=words):
        assert_invariants(log)


async def start(rig: Rig, faults: FaultPlan, **keys: Any) -> RigJob:
    """Submit a job of four ranks that are there from the first step on."""
    job = await rig.submit(
        body(**{"epochs": 3, "workers": {"min": 1, "max": 4}, **keys}), faults=faults.to_list()
    )
    return job


def found(log: list[Event], kind: type[Event]) -> list[Any]:
    return [event for event in log if isinstance(event, kind)]


def is_end(event: Event) -> bool:
    return isinstance(event, WorkerLeft) and event.reason == "job ended"


def assert_others_kept_their_process(log: list[Event], lost: set[str]) -> None:
    """Only who was lost was started again."""
    pids: dict[str, set[int]] = {}
    for formed in found(log, GenerationFormed):
        for worker, pid in zip(formed.ranks, formed.trainer_pids, strict=True):
            pids.setdefault(worker, set()).add(pid)
    assert {worker for worker, known in pids.items() if len(known) > 1} <= lost
