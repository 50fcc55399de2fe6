"""Decides who trains with whom, and when: ``handle(state, stimulus, now) -> (state, commands)``.

No I/O, no clock, no randomness: the coordinator turns messages into stimuli and carries out the
commands, and the tests walk through thousands of schedules in seconds.

A job goes round this loop; each turn is a generation::

    gathering --enough are warm--> running --join, leave, pause, stop--> changing --all reported--+
        ^                             |                                                           |
        |                             +--a member is lost--> collecting --all survivors reported--+
        +---------------------------------- too few --------------------------------------------- +
        --> running
    running --all done, stopped, user error--> closing --checkpoint durable--> ended
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from etrain_jupyter.elastic import stimuli as s
from etrain_jupyter.elastic.commands import (
    AbortGeneration,
    AnnounceChange,
    Command,
    FormGeneration,
    KillTrainer,
    Publish,
    ReleaseTrainer,
    SaveCheckpoint,
    StartTrainer,
)
from etrain_jupyter.elastic.membership import JobState, Member, UserError
from etrain_jupyter.events import types as events

ADMISSION_GRACE_S = 1.0
"""How long warm newcomers wait for others that still warm up: one change admits them together."""

REPORT_TIMEOUT_S = 30.0
"""Least time that a rank has to report after an abort; ten times a step's length is added."""

FORM_TIMEOUT_S = 60.0
"""How long a generation may take until every rank steps."""

MAX_FAULTS = 3
"""Faults in a row at one place (before the first step, or in one step) that count as the user's."""


class Turn:
    """One call of ``handle``: the state as it changes, and the commands so far."""

    def __init__(self, state: JobState, now: float) -> None:
        self.state = state
        self.now = now
        self.commands: list[Command] = []

    def set(self, **changes: Any) -> None:
        """Change fields of the state."""
        self.state = self.state.replace(**changes)

    def set_member(self, member: Member, **changes: Any) -> None:
        """Change fields of one member; a new phase begins now."""
        if "phase" in changes and changes["phase"] != member.phase:
            changes.setdefault("since", self.now)
        self.state = self.state.with_member(dataclasses.replace(member, **changes))

    def do(self, command: Command) -> None:
        """Add a command."""
        self.commands.append(command)

    def publish(self, kind: Callable[..., events.Event], **values: Any) -> None:
        """Add a fact for the log."""
        state = self.state
        fact = kind(job_id=state.job_id, time=self.now, generation=state.generation, **values)
        self.do(Publish(event=fact))

    def set_status(self, status: str, reason: str = "") -> None:
        """Change the job's status and say so, if it is another one."""
        if (status, reason) != (self.state.status, self.state.reason):
            self.set(status=status, reason=reason)
            self.publish(events.JobStatusChanged, status=status, reason=reason)

    def add_why(self, why: str) -> None:
        """Add a reason for the next generation."""
        if why not in self.state.whys:
            self.set(whys=(*self.state.whys, why))


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
        _advance(turn)
    return turn.state, turn.commands


# --- what each stimulus changes
# ---------------------------------------------------------------------------------


def _take_assigned(turn: Turn, stimulus: s.WorkersAssigned) -> None:
    turn.set(assigned=stimulus.workers)
    if turn.state.phase == "closing" or turn.state.outcome:
        return
    for member in list(turn.state.members.values()):
        if member.worker not in stimulus.workers and not member.leaving:
            _ask_to_leave(turn, member, "scaled down")
    _start_missing(turn)


def _start_missing(turn: Turn) -> None:
    for worker in turn.state.assigned:
        if turn.state.of_worker(worker) is not None:
            continue
        number = turn.state.num_started + 1
        trainer = f"{turn.state.job_id}/{worker}/{number}"
        turn.set(num_started=number)
        fresh = Member(trainer=trainer, worker=worker, order=number, since=turn.now)
        turn.state = turn.state.with_member(fresh)
        turn.do(StartTrainer(trainer=trainer, worker=worker))


def _ask_to_leave(turn: Turn, member: Member, reason: str) -> None:
    """Mark a member; one that holds no state yet leaves at once."""
    if member.phase in ("starting", "warm"):
        _let_go(turn, member, reason)
    else:
        turn.set_member(member, leaving=reason)


def _let_go(turn: Turn, member: Member, reason: str) -> None:
    turn.do(ReleaseTrainer(trainer=member.trainer))
    turn.state = turn.state.without_member(member.trainer)
    turn.publish(events.WorkerLeft, worker=member.worker, reason=reason)


def _take_noticed(turn: Turn, stimulus: s.WorkerNoticed) -> None:
    member = turn.state.of_worker(stimulus.worker)
    if member is not None:
        _ask_to_leave(turn, member, "preempted")


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
            _enter(turn, "changing")
    elif stimulus.why == "failed":
        _begin_collecting(turn)
    elif turn.state.phase == "running":
        _enter(turn, "changing")


def _take_trainer_lost(turn: Turn, stimulus: s.TrainerLost) -> None:
    member = turn.state.members.get(stimulus.trainer)
    if member is None:
        return
    _count_fault(turn, member, stimulus)
    _lose(turn, member, stimulus.cause, stimulus.detected_s)
    if not turn.state.outcome:
        _start_missing(turn)


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
        _begin_collecting(turn)
    elif turn.state.phase == "closing":
        _close(turn)


def _begin_collecting(turn: Turn) -> None:
    """Free the ranks that wait for one that will never answer."""
    if turn.state.phase not in ("running", "changing"):
        return
    turn.add_why("lost")
    ranked = turn.state.in_phase("ranked")
    _enter(turn, "collecting")
    if ranked:
        names = tuple(m.trainer for m in ranked)
        turn.do(AbortGeneration(generation=turn.state.generation, trainers=names))


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
    _begin_collecting(turn)


def _take_steps(turn: Turn, stimulus: s.StepsCommitted) -> None:
    turn.set(step=max(turn.state.step, stimulus.step), step_s=stimulus.step_s)


def _take_saved(turn: Turn, stimulus: s.CheckpointSaved) -> None:
    if stimulus.ok:
        turn.set(saved_step=max(turn.state.saved_step, stimulus.step))
    if turn.state.phase == "closing":
        _end(turn)


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
        _end(turn)


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
            _begin_collecting(turn)


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


# --- what follows from the state
# --------------------------------------------------------------------------------


def _advance(turn: Turn) -> None:
    _check_budgets(turn)
    phase = turn.state.phase
    if phase == "running":
        _announce_if_due(turn)
    elif phase in ("changing", "collecting"):
        if not turn.state.in_phase("ranked"):
            _settle(turn)
    elif phase == "gathering":
        _settle(turn)


def _check_budgets(turn: Turn) -> None:
    """Give up where starting again would only fail again."""
    state = turn.state
    step, generations = state.same_step_faults
    if state.outcome or state.last_fault is None:
        return
    if state.warm_faults >= MAX_FAULTS:
        text = f"{state.warm_faults} trainers in a row ended before they were ready to train"
    elif step == state.step and len(generations) >= MAX_FAULTS:
        text = f"step {step + 1} ended a trainer in {len(generations)} generations in a row"
    else:
        return
    last = state.last_fault
    error = dataclasses.replace(last, error=f"{text}, {last.error}", step=state.step)
    turn.set(user_error=error, outcome="failed")
    _begin_collecting(turn)


def _announce_if_due(turn: Turn) -> None:
    """Begin a planned change if somebody shall come or go."""
    state = turn.state
    ranked = state.in_phase("ranked")
    stays = [m for m in ranked if not m.leaving]
    newcomers = _admissible(turn)
    # The last holders of the state do not leave before somebody has taken it over.
    leaves = [m for m in ranked if m.leaving] if stays or newcomers else []
    if not (newcomers or leaves or state.paused or state.outcome):
        return
    if any(not m.formed for m in ranked):
        return  # one change at a time: the generation is still forming
    for why, due in (("join", newcomers), ("leave", leaves)):
        if due:
            turn.add_why(why)
    names = tuple(m.trainer for m in ranked)
    turn.do(AnnounceChange(generation=state.generation, trainers=names))
    _enter(turn, "changing")


def _admissible(turn: Turn) -> list[Member]:
    """Return the warm newcomers, or nobody while it pays to wait for more of them."""
    warm = [m for m in turn.state.in_phase("warm") if not m.leaving]
    if not warm or not turn.state.in_phase("starting"):
        return warm
    waited = turn.now - min(m.since for m in warm)
    return warm if waited >= ADMISSION_GRACE_S else []


def _settle(turn: Turn) -> None:
    """Nobody steps: form the next generation, wait, or end."""
    _publish_undone(turn)
    state = turn.state
    if state.outcome:
        _close(turn)
        return
    holders = _let_leavers_go(turn)
    newcomers = [m for m in state.in_phase("warm") if not m.leaving]
    if state.paused:
        _enter(turn, "gathering")
        turn.set_status("paused")
        return
    members = holders + newcomers
    if len(members) >= state.min_workers:
        if state.phase != "gathering" or _is_worth_forming(turn):
            _form(turn, members)
        return
    _enter(turn, "gathering")
    if state.generation or not state.in_phase("starting"):
        text = f"{len(members)} of min {state.min_workers} workers are here"
        turn.set_status("waiting", text)


def _publish_undone(turn: Turn) -> None:
    """Tell of the step in flight once, with all survivors that had begun it.

    A step that one survivor has committed is not lost, though another one had to undo its part.
    """
    newest = max((m.progress[0] for m in turn.state.in_phase("reported")), default=-1)
    for step in sorted({step for step, _ in turn.state.undone if step > newest}):
        workers = sorted(worker for begun, worker in turn.state.undone if begun == step)
        turn.publish(events.StepUndone, step=step, workers=workers)
    turn.set(undone=())


def _let_leavers_go(turn: Turn) -> list[Member]:
    """Release those that shall leave, if the newest state stays here; return who is left."""
    holders = turn.state.in_phase("reported")
    stays = [m for m in holders if not m.leaving]
    newest = max((m.progress for m in holders), default=s.NO_PROGRESS)
    if not any(m.progress == newest for m in stays):
        return holders  # they hand their state over in the next generation, and leave then
    for member in holders:
        if member.leaving:
            _let_go(turn, member, member.leaving)
    return stays


def _is_worth_forming(turn: Turn) -> bool:
    """At the start, give workers that warm up at the same time a moment to be ready together."""
    return bool(turn.state.in_phase("reported")) or bool(_admissible(turn))


def _form(turn: Turn, members: list[Member]) -> None:
    """Publish the next generation: newest first, so that rank 0 holds the newest state."""
    ranks = sorted(members, key=lambda m: (-m.progress[0], -m.progress[1], m.order))
    newest = ranks[0].progress
    generation = turn.state.generation + 1
    restore = newest == s.NO_PROGRESS and turn.state.generation > 0
    behind = tuple(rank for rank, m in enumerate(ranks) if rank and m.progress != newest)
    if newest == s.NO_PROGRESS:
        behind = tuple(range(1, len(ranks)))
    step = max(0, turn.state.saved_step if restore else newest[0])
    whys = turn.state.whys or ("start",)
    turn.set(generation=generation, whys=(), step=step)
    for member in ranks:
        turn.set_member(member, phase="ranked", formed=False)
    turn.do(
        FormGeneration(
            generation=generation,
            trainers=tuple(m.trainer for m in ranks),
            behind=behind,
            step=step,
            restore=restore,
        )
    )
    turn.publish(
        events.GenerationFormed,
        why="+".join(whys),
        world_size=len(ranks),
        ranks=[m.worker for m in ranks],
        step=step,
        stall_s=turn.now - turn.state.last_step_at if turn.state.last_step_at else 0.0,
    )
    _enter(turn, "running")
    turn.set_status("running")


def _close(turn: Turn) -> None:
    """Make the newest state durable, then end."""
    state = turn.state
    holders = sorted(state.in_phase("reported"), key=lambda m: m.progress, reverse=True)
    if not holders or holders[0].progress[0] <= max(0, state.saved_step):
        _end(turn)
        return
    if state.phase != "closing":
        _enter(turn, "closing")
    turn.do(SaveCheckpoint(trainer=holders[0].trainer))


def _end(turn: Turn) -> None:
    for member in list(turn.state.members.values()):
        turn.do(ReleaseTrainer(trainer=member.trainer))
    outcome = turn.state.outcome or "stopped"
    error = turn.state.user_error
    if error is not None:
        turn.publish(
            events.UserErrorRaised,
            error=error.error,
            traceback=error.traceback,
            workers=sorted(set(error.workers)),
            step=error.step,
        )
    turn.set(members={})
    _enter(turn, "ended")
    turn.set_status(outcome, error.error if error is not None else "")


def _enter(turn: Turn, phase: str) -> None:
    if turn.state.phase == "running" and phase != "running":
        turn.set(last_step_at=turn.now)
    if phase != turn.state.phase:
        turn.set(phase=phase, since=turn.now)
    elif phase == "running":
        turn.set(since=turn.now)
