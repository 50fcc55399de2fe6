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

from etrain_jupyter.elastic import stimuli as s
from etrain_jupyter.elastic.commands import (
    Command,
    KillTrainer,
)
from etrain_jupyter.elastic.formation import advance
from etrain_jupyter.elastic.membership import JobState, Member, UserError
from etrain_jupyter.elastic.turn import (
    Turn,
    ask_to_leave,
    begin_collecting,
    close_job,
    end_job,
    enter_phase,
    start_missing,
)
from etrain_jupyter.events import types as events

REPORT_TIMEOUT_S = 30.0
"""Least time that a rank has to report after an abort; ten times a step's length is added."""

FORM_TIMEOUT_S = 60.0
"""How long a generation may take until every rank steps."""


def handle(state: JobState, stimulus: s.Stimulus, now: float) -> tuple[JobState, list[Command]]:
    """Take one thing that happened and say what is to be done.

    Args:
        state: The job as it was.
        stimulus: What happened.
        now: Seconds since the epoch.

    Returns:
        The job as it is now, and the commands to carry out in this order.
    """
    if state.is_ended:
        return state, []
    turn = Turn(state, now)
    _TAKE[type(stimulus)](turn, stimulus)
    if not turn.state.is_ended:
        advance(turn)
    return turn.state, turn.commands


def _take_assigned(turn: Turn, stimulus: s.WorkersAssigned) -> None:
    turn.set(assigned=stimulus.workers)
    if turn.state.phase == "closing" or turn.state.outcome:
        return
    for member in list(turn.state.members.values()):
        if member.worker not in stimulus.workers and not member.leaving:
            ask_to_leave(turn, member, "scaled down")
    start_missing(turn)


def _take_noticed(turn: Turn, stimulus: s.WorkerNoticed) -> None:
    member = turn.state.of_worker(stimulus.worker)
    if member is not None:
        ask_to_leave(turn, member, "preempted")


def _take_worker_gone(turn: Turn, stimulus: s.WorkerGone) -> None:
    turn.set(assigned=tuple(w for w in turn.state.assigned if w != stimulus.worker))
    member = turn.state.of_worker(stimulus.worker)
    if member is not None:
        _lose(turn, member, stimulus.cause, stimulus.detected_s)


def _take_warm(turn: Turn, stimulus: s.TrainerWarm) -> None:
    member = turn.state.members.get(stimulus.trainer)
    if member is not None and member.phase == "starting":
        turn.set_member(member, phase="warm")
        turn.set(warm_faults=0)


def _take_formed(turn: Turn, stimulus: s.TrainerFormed) -> None:
    member = turn.state.members.get(stimulus.trainer)
    if member is not None and stimulus.generation == turn.state.generation:
        turn.set_member(member, formed=True)


def _take_reported(turn: Turn, stimulus: s.TrainerReported) -> None:
    member = turn.state.members.get(stimulus.trainer)
    if member is None or member.phase != "ranked" or stimulus.generation != turn.state.generation:
        return
    turn.set_member(member, phase="reported", progress=stimulus.progress)
    turn.set(step=max(turn.state.step, stimulus.progress[0]))
    if stimulus.undone:
        turn.set(undone=(*turn.state.undone, (stimulus.progress[0] + 1, member.worker)))
    if stimulus.why == "done":
        turn.set(outcome=turn.state.outcome or "finished")
        if turn.state.phase == "running":
            enter_phase(turn, "changing")
    elif stimulus.why == "failed":
        begin_collecting(turn)
    elif turn.state.phase == "running":
        enter_phase(turn, "changing")


def _take_trainer_lost(turn: Turn, stimulus: s.TrainerLost) -> None:
    member = turn.state.members.get(stimulus.trainer)
    if member is None:
        return
    _count_fault(turn, member, stimulus)
    _lose(turn, member, stimulus.cause, stimulus.detected_s)
    if not turn.state.outcome:
        start_missing(turn)


def _count_fault(turn: Turn, member: Member, stimulus: s.TrainerLost) -> None:
    """Tell a machine's fault from one of the notebook's code, which would come back for ever.

    The workers do not matter: a step's samples go to the same rank each time, and wherever the
    others can go on without a broken machine they commit steps meanwhile.
    """
    state = turn.state
    text = f"the last on {member.worker}: {stimulus.cause}"
    fault = UserError(
        error=text, traceback=stimulus.last_words, workers=(member.worker,), step=state.step
    )
    turn.set(last_fault=fault)
    if member.phase == "starting":
        turn.set(warm_faults=state.warm_faults + 1)
        return
    step, generations = state.same_step_faults
    known = generations if step == state.step else ()
    if state.generation not in known:
        known = (*known, state.generation)
    turn.set(same_step_faults=(state.step, known))


def _lose(turn: Turn, member: Member, cause: str, detected_s: float) -> None:
    turn.state = turn.state.without_member(member.trainer)
    turn.publish(events.WorkerLost, worker=member.worker, cause=cause, detected_s=detected_s)
    if member.phase == "ranked":
        turn.add_why("lost")
        begin_collecting(turn)
    elif turn.state.phase == "closing":
        close_job(turn)


def _take_user_error(turn: Turn, stimulus: s.UserErrorSeen) -> None:
    member = turn.state.members.get(stimulus.trainer)
    if member is None:
        return
    known = turn.state.user_error
    step = max(0, stimulus.progress[0])
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


def _take_steps(turn: Turn, stimulus: s.StepsCommitted) -> None:
    turn.set(step=max(turn.state.step, stimulus.step), step_s=stimulus.step_s)


def _take_saved(turn: Turn, stimulus: s.CheckpointSaved) -> None:
    if stimulus.ok:
        turn.set(saved_step=max(turn.state.saved_step, stimulus.step))
    if turn.state.phase == "closing":
        newest = max((m.progress[0] for m in turn.state.in_phase("reported")), default=0)
        if stimulus.step >= newest:  # an older one may have been under way when the job was ended
            end_job(turn)


def _take_bounds(turn: Turn, stimulus: s.BoundsChanged) -> None:
    turn.set(min_workers=stimulus.min_workers, max_workers=stimulus.max_workers)
    turn.publish(
        events.WorkersScaled, min_workers=stimulus.min_workers, max_workers=stimulus.max_workers
    )


def _take_pause(turn: Turn, _: s.PauseAsked) -> None:
    turn.set(paused=True)


def _take_resume(turn: Turn, _: s.ResumeAsked) -> None:
    turn.set(paused=False)
    if turn.state.phase == "gathering":
        turn.add_why("resume")


def _take_stop(turn: Turn, stimulus: s.StopAsked) -> None:
    turn.set(outcome=turn.state.outcome or "stopped")
    if stimulus.now:
        end_job(turn)


def _take_tick(turn: Turn, _: s.Tick) -> None:
    state = turn.state
    if state.phase == "collecting":
        limit = REPORT_TIMEOUT_S + 10 * state.step_s
        for member in state.in_phase("ranked"):
            if turn.now - state.since > limit:
                why = f"no report {limit:.0f} s after its generation was aborted"
                turn.do(KillTrainer(trainer=member.trainer, why=why))
    elif state.phase == "running":
        is_late = turn.now - state.since > FORM_TIMEOUT_S
        if is_late and any(not m.formed for m in state.in_phase("ranked")):
            begin_collecting(turn)


_TAKE: dict[type, Callable[[Turn, Any], None]] = {
    s.WorkersAssigned: _take_assigned,
    s.WorkerNoticed: _take_noticed,
    s.WorkerGone: _take_worker_gone,
    s.TrainerWarm: _take_warm,
    s.TrainerFormed: _take_formed,
    s.TrainerReported: _take_reported,
    s.TrainerLost: _take_trainer_lost,
    s.UserErrorSeen: _take_user_error,
    s.StepsCommitted: _take_steps,
    s.CheckpointSaved: _take_saved,
    s.BoundsChanged: _take_bounds,
    s.PauseAsked: _take_pause,
    s.ResumeAsked: _take_resume,
    s.StopAsked: _take_stop,
    s.Tick: _take_tick,
}
