"""Invariants of the state machine, asserted at every moment of a simulation.

The checks compare the coordinator's decisions with the actual state of the simulated trainers,
which the coordinator cannot see.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from etrain_jupyter.rules.membership import commands as c
from etrain_jupyter.rules.membership import stimuli as s
from etrain_jupyter.rules.membership.lineage import is_of_job
from etrain_jupyter.rules.membership.membership import JobState

if TYPE_CHECKING:
    from tests.unit.rules.simulated.job import Job
    from tests.unit.rules.simulated.trainer import Trainer


MOST_SAVES = 4
"""Failed attempts at the last checkpoint after which a job ends without it."""


def check_state(job: Job) -> None:
    """Assert the invariants between any two stimuli."""
    state = job.state
    if state.is_ended:
        assert not state.members
        return
    warm = [m for m in state.in_phase("warm") if not m.leaving and not m.killed_at]
    here = state.in_phase("reported") + warm
    is_short = len(here) < state.min_workers
    is_patient = bool(state.in_phase("starting")) or job.cluster.now < state.faults.form_at
    is_patient = is_patient or bool(state.saving.trainer) or job.cluster.now < state.saving.retry_at
    ranked = state.in_phase("ranked")
    if state.phase == "running" and all(m.formed for m in ranked):
        assert len(ranked) + len(warm) >= state.min_workers, "too few step"
    if state.status == "waiting" and not state.outcome:
        assert state.phase == "gathering"
        assert is_short or is_patient
    if state.phase == "gathering" and state.generation and not state.outcome:
        assert is_short or is_patient or state.is_paused, (
            "enough workers are here, and nobody forms"
        )
        if not state.in_phase("starting"):
            assert state.status == ("paused" if state.is_paused else "waiting")


def check_start(job: Job, command: c.StartTrainer) -> None:
    """Assert that no second trainer is started next to a living one."""
    alive = [t.name for t in job.living() if t.worker == command.worker]
    assert not alive, f"{command.trainer} is started although {alive} lives"
    assert command.worker in job.cluster.workers


def check_form(job: Job, command: c.FormGeneration) -> None:
    """Assert that a generation is formed of the right ranks in the right order."""
    ranks = [job.trainers[name] for name in command.trainers]
    assert len(ranks) >= job.state.min_workers
    assert not job.state.is_paused
    assert not job.state.outcome
    assert job.group is None or command.generation == job.group.number + 1
    inside = [t.name for t in job.living() if t.place not in ("starting", "idle")]
    assert not inside, f"{inside} are still inside the previous generation"
    holders = [t for t in job.living() if t.progress != s.NO_PROGRESS]
    newest = max((t.progress for t in holders), default=s.NO_PROGRESS)
    if command.restore:
        assert not holders, f"{holders[0].name} holds the state, and yet a checkpoint is restored"
    elif ranks[0].is_alive:
        assert ranks[0].progress == newest, "rank 0 does not hold the newest state"
        assert command.step == max(0, newest[0])
        assert holders or command.generation == 1, "training starts over"
    for rank, trainer in enumerate(ranks):
        if trainer.is_alive and ranks[0].is_alive:
            is_older = trainer.progress != newest or newest == s.NO_PROGRESS
            assert (rank in command.behind) == (rank > 0 and is_older)


def check_release(job: Job, trainer: Trainer) -> None:
    """Assert that the only copy of a newest state that is not durable is not released."""
    if job.state.is_ended or not trainer.is_alive or trainer.progress == s.NO_PROGRESS:
        return
    # As far as the coordinator knows: the others may have just died.
    stays = [m.progress for m in job.state.in_phase("ranked", "reported")]
    newest = max(stays, default=s.NO_PROGRESS)
    is_durable = trainer.progress[0] <= _newest_kept(job)
    assert newest >= trainer.progress or is_durable, (
        f"{trainer.name} leaves with the only newest state"
    )


def check_kill(job: Job, trainer: Trainer) -> None:
    """Assert that no rank is killed that only waits for others."""
    if trainer.hung:
        return
    assert not job.cluster.is_fair, f"{trainer.name} is killed although it does not hang"
    if job.state.phase in ("running", "changing"):
        assert job.state.members[trainer.name].phase == "ranked"
        ranked = [job.trainers[m.trainer] for m in job.state.in_phase("ranked")]
        first = min(_place(job, other) for other in ranked)
        assert _place(job, trainer) == first, "a rank is killed that only waits"


def _place(job: Job, trainer: Trainer) -> int:
    """Return the number of collectives that it has entered, as its supervisor reported it."""
    (generation, collectives), _ = trainer.told
    return collectives if generation == job.state.generation else 0


def check_commit(trainer: Trainer) -> None:
    """Assert that no trainer commits a step outside of the current generation."""
    job, group = trainer.job, trainer.group
    assert group is not None
    if not job.knows(trainer):  # evicted behind a partition: its steps do not count
        return
    assert group.number == job.state.generation, "two generations alive"
    assert job.state.status == "running", f"a step while the job is {job.state.status}"
    step = trainer.progress[0] + 1
    mine = hash((trainer.weights, group.number, step))
    for other in job.living():
        if other.progress[0] == step:
            assert other.weights == mine, f"weights differ at step {step}"


def _newest_kept(job: Job) -> int:
    """Return the newest durable step of the states that the job has come through."""
    written = [(step, writer) for step, (*_, writer) in job.store.items()]
    starts = job.record.starts
    kept = [step for step, by in written if is_of_job(generation=by, step=step, starts=starts)]
    return max(kept, default=0)


def check_end(job: Job, before: JobState) -> None:
    """Assert that a job ends with its newest state durable, unless that could not be."""
    reported = [job.trainers[m.trainer] for m in before.in_phase("reported")]
    usable = {w.name for w in job.cluster.workers.values() if not w.is_given_up}
    here = [t for t in reported if t.is_alive and t.worker in usable]
    newest = max((t.progress[0] for t in here), default=0)
    if not job.stop_now_asked and job.num_failed_saves < MOST_SAVES:
        assert _newest_kept(job) >= newest, f"step {newest} is lost at the end"
