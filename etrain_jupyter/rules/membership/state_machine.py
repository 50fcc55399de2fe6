"""Decides who trains with whom, and when: ``handle(state, stimulus, now) -> (state, commands)``.

No I/O, no clock, no randomness: the coordinator turns messages into stimuli and carries out the
commands, and the tests walk through thousands of schedules in seconds.

A job goes round this loop; each turn is a generation::

    gathering --enough are warm--> running --join, leave, pause, stop--> changing ----+
        ^                             |                                               |
        |                             +--a member is lost--> collecting --all report--+
        +---------------------- too few ----------------------------------------------+--> running
    changing, collecting --done, stopped, user error--> closing --checkpoint durable--> ended
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from etrain_jupyter.log import events
from etrain_jupyter.rules.membership import stimuli as s
from etrain_jupyter.rules.membership.adoption import take_found
from etrain_jupyter.rules.membership.commands import Command
from etrain_jupyter.rules.membership.connecting import why_not_with_nccl
from etrain_jupyter.rules.membership.failed_forms import Break
from etrain_jupyter.rules.membership.formation import advance
from etrain_jupyter.rules.membership.losses import do_without, take_trainer_lost, take_worker_gone
from etrain_jupyter.rules.membership.membership import JobState, Member, UserError
from etrain_jupyter.rules.membership.nan_loss import NanLoss
from etrain_jupyter.rules.membership.saving import take_saved
from etrain_jupyter.rules.membership.stalls import check_stalls, excuse_sleep, take_progress
from etrain_jupyter.rules.membership.turn import (
    Turn,
    ask_to_leave,
    begin_collecting,
    end_job,
    enter_phase,
    start_missing,
)

SCALED_DOWN = "scaled down"
"""Why a worker leaves that the job may not have any more."""

LAST_SAVE_S = 30.0
"""How long before its machine is taken the last holder of the state stops to step, and saves it; at
most half of the time that the notice gave, if it is not known that a checkpoint takes longer."""

SAVES_PER_LEAD = 1.5
"""Time is kept for the last one as if it took so many times as long as the newest ones."""


def handle(
    state: JobState, stimulus: s.Stimulus, now: float, *, wall: float | None = None
) -> tuple[JobState, list[Command]]:
    """Take one thing that happened and say what is to be done.

    Args:
        state: The job as it was.
        stimulus: What happened.
        now: Seconds by a clock that nobody sets. All instants in the state and in stimuli are its.
        wall: Seconds since the epoch, for the events; None stands for ``now``.

    Returns:
        The job as it is now, and the commands to carry out in this order.
    """
    if state.is_ended:
        return state, []
    turn = Turn(state, now, now if wall is None else wall)
    _TAKE[type(stimulus)](turn, stimulus)
    if not turn.state.is_ended:
        advance(turn)
    return turn.state, turn.commands


def _take_assigned(turn: Turn, stimulus: s.WorkersAssigned) -> None:
    turn.set(assigned=stimulus.workers)
    if turn.state.phase == "closing" or turn.state.outcome:
        return
    for member in list(turn.state.members.values()):
        is_assigned = member.worker in stimulus.workers
        if not is_assigned and not member.leaving:
            ask_to_leave(turn, member, SCALED_DOWN)
        elif is_assigned and member.leaving == SCALED_DOWN:
            turn.set_member(member, leaving="")  # scaled up again before it had left
    start_missing(turn)


def _take_noticed(turn: Turn, stimulus: s.WorkerNoticed) -> None:
    turn.set(assigned=tuple(w for w in turn.state.assigned if w != stimulus.worker))
    member = turn.state.of_worker(stimulus.worker)
    if member is not None:
        left_s = max(0.0, stimulus.deadline - turn.now)
        lead_s = min(LAST_SAVE_S, left_s / 2)
        lead_s = max(lead_s, min(left_s, SAVES_PER_LEAD * turn.state.save_s))
        save_at = stimulus.deadline - lead_s
        turn.set_member(member, save_at=save_at)
        ask_to_leave(turn, turn.state.members[member.trainer], "preempted")


def _take_warm(turn: Turn, stimulus: s.TrainerWarm) -> None:
    member = turn.state.members.get(stimulus.trainer)
    if member is None or member.phase != "starting":
        return
    turn.set_member(member, phase="warm", device=stimulus.device, gpu=stimulus.gpu)
    turn.set(warm_faults=0, warm_s=max(turn.state.warm_s, stimulus.warm_s))
    why = why_not_with_nccl(turn.state)
    if why:
        seen = s.UserErrorSeen(
            trainer=stimulus.trainer,
            generation=0,
            progress=s.NO_PROGRESS,
            error=why,
            traceback="",
        )
        _take_user_error(turn, seen)


def _take_formed(turn: Turn, stimulus: s.TrainerFormed) -> None:
    member = turn.state.members.get(stimulus.trainer)
    if member is None or stimulus.generation != turn.state.generation or member.formed:
        return
    if turn.state.is_restoring and not any(m.formed for m in turn.state.in_phase("ranked")):
        known = tuple(saved for saved in turn.state.saved_steps if saved <= stimulus.step)
        turn.set(step=stimulus.step, first_step=stimulus.step, saved_steps=known)
    times = (stimulus.connect_s, stimulus.sync_s, stimulus.wrap_s)
    since = member.steps_since or turn.now
    turn.set_member(member, formed=True, steps_since=since, form_times=times)
    ranks = [m for m in turn.state.in_phase("ranked", "reported") if m.formed]
    if len(ranks) == turn.state.world_size:
        slowest = [max(m.form_times[part] for m in ranks) for part in range(3)]
        turn.set(is_ready=True, ready_at=turn.now, has_trained=True)
        turn.publish(
            events.GenerationReady,
            world_size=len(ranks),
            **dict(zip(("connect_s", "sync_s", "wrap_s"), slowest, strict=True)),
        )


def _take_reported(turn: Turn, stimulus: s.TrainerReported) -> None:
    member = turn.state.members.get(stimulus.trainer)
    if member is None or member.phase != "ranked" or stimulus.generation != turn.state.generation:
        return
    turn.set_member(member, phase="reported", progress=stimulus.progress)
    turn.set(step=max(turn.state.step, stimulus.progress[0]))
    if stimulus.undone:
        turn.set(undone=(*turn.state.undone, (stimulus.progress[0] + 1, member.worker)))
    if stimulus.why == "done":
        turn.set(outcome=turn.state.outcome or "finished", ending=stimulus.ending)
        if turn.state.phase == "running":
            enter_phase(turn, "changing")
    elif stimulus.why == "failed":
        told = Break(
            worker=member.worker,
            error=stimulus.error,
            backend=stimulus.backend,
            is_excused=stimulus.is_excused,
        )
        turn.set(breaks=(*turn.state.breaks, told))
        begin_collecting(turn)
    elif turn.state.phase == "running":
        enter_phase(turn, "changing")


def _take_nan_loss(turn: Turn, stimulus: s.NonFiniteLoss) -> None:
    member = turn.state.members.get(stimulus.trainer)
    if member is None or member.phase != "ranked" or stimulus.generation != turn.state.generation:
        return
    step = stimulus.progress[0] + 1
    turn.set_member(member, phase="reported", progress=stimulus.progress)
    turn.set(step=max(turn.state.step, stimulus.progress[0]))
    known = turn.state.nan_loss or NanLoss(step=step, loss=stimulus.loss)
    if stimulus.is_source:
        sources = sorted({*known.sources, (stimulus.rank, member.worker)})
        known = dataclasses.replace(known, sources=tuple(sources))
    turn.set(nan_loss=known)
    if turn.state.phase == "running":
        enter_phase(turn, "changing")


def _take_user_error(turn: Turn, stimulus: s.UserErrorSeen) -> None:
    member = turn.state.members.get(stimulus.trainer)
    if member is None:
        return
    if _is_dispensable(turn.state, member):
        do_without(turn, member, stimulus)
        return
    known = turn.state.user_error
    # An update that broke off leaves no state behind; the log knows how far it was.
    holds_none = stimulus.progress == s.NO_PROGRESS
    step = turn.state.step if holds_none else stimulus.progress[0]
    if known is None:
        found = UserError(
            error=stimulus.error,
            traceback=stimulus.traceback,
            workers=(member.worker,),
            step=step,
        )
    else:
        found = dataclasses.replace(known, workers=(*known.workers, member.worker))
    turn.set(user_error=found, outcome="failed")
    holds_state = member.phase == "ranked" and stimulus.generation == turn.state.generation
    if holds_state:
        turn.set_member(member, phase="reported", progress=stimulus.progress)
    begin_collecting(turn)


def _is_dispensable(state: JobState, member: Member) -> bool:
    """Whether the job trains well without it: others hold a state that the same code has made."""
    is_newcomer = member.phase in ("starting", "warm")
    return is_newcomer and state.has_trained and bool(state.in_phase("ranked", "reported"))


def _take_steps(turn: Turn, stimulus: s.StepsCommitted) -> None:
    turn.set(step=max(turn.state.step, stimulus.step), step_s=stimulus.step_s)
    turn.set(last_step_at=stimulus.committed_at or turn.now)


def _take_bounds(turn: Turn, stimulus: s.BoundsChanged) -> None:
    turn.set(min_workers=stimulus.min_workers, max_workers=stimulus.max_workers)
    turn.publish(
        events.WorkersScaled, min_workers=stimulus.min_workers, max_workers=stimulus.max_workers
    )


def _take_pause(turn: Turn, _: s.PauseAsked) -> None:
    turn.set(paused=True)


def _take_resume(turn: Turn, _: s.ResumeAsked) -> None:
    turn.set(paused=False, pause_reason="")
    if turn.state.phase == "gathering":
        turn.add_why("resume")


def _take_stop(turn: Turn, stimulus: s.StopAsked) -> None:
    if not turn.state.outcome or (stimulus.now and turn.state.outcome == "finished"):
        turn.set(outcome="stopped")  # at once: the last state is not durable yet
    if stimulus.now:
        end_job(turn)


def _take_tick(turn: Turn, stimulus: s.Tick) -> None:
    if stimulus.asleep_s:
        excuse_sleep(turn, stimulus.asleep_s)
    check_stalls(turn)
    if not turn.state.outcome:
        start_missing(turn)


_TAKE: dict[type, Callable[[Turn, Any], None]] = {
    s.WorkersAssigned: _take_assigned,
    s.WorkerNoticed: _take_noticed,
    s.WorkerGone: take_worker_gone,
    s.TrainerWarm: _take_warm,
    s.TrainerFormed: _take_formed,
    s.TrainerReported: _take_reported,
    s.NonFiniteLoss: _take_nan_loss,
    s.TrainerLost: take_trainer_lost,
    s.ProgressSeen: take_progress,
    s.UserErrorSeen: _take_user_error,
    s.StepsCommitted: _take_steps,
    s.CheckpointSaved: take_saved,
    s.BoundsChanged: _take_bounds,
    s.PauseAsked: _take_pause,
    s.ResumeAsked: _take_resume,
    s.StopAsked: _take_stop,
    s.TrainersFound: take_found,
    s.Tick: _take_tick,
}
