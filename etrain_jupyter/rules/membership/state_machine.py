"""Decide who trains with whom, and when: ``handle(state, stimulus, now) -> (state, commands)``.

This module uses no I/O, no clock and no randomness. The coordinator turns messages into stimuli and
carries out the commands, and the tests simulate thousands of schedules in seconds.

Each pass through this loop is one generation::

    gathering --enough are warm--> running --join, leave, pause, stop--> changing ----+
        ^                             |                                               |
        |                             +--a member is lost--> collecting --all report--+
        +---------------------- too few ----------------------------------------------+--> running
    changing, collecting --done, stopped, user error--> closing --checkpoint durable--> ended
"""

from __future__ import annotations

import math
from typing import assert_never

from etrain_jupyter.log import events
from etrain_jupyter.rules.membership import stimuli as s
from etrain_jupyter.rules.membership.adoption import take_found
from etrain_jupyter.rules.membership.commands import Command
from etrain_jupyter.rules.membership.connecting import why_not_with_nccl
from etrain_jupyter.rules.membership.faults import Break
from etrain_jupyter.rules.membership.formation import advance
from etrain_jupyter.rules.membership.losses import (
    exclude_newcomer,
    take_trainer_lost,
    take_worker_gone,
)
from etrain_jupyter.rules.membership.members import Member, replace
from etrain_jupyter.rules.membership.membership import Failing, JobState, NanLoss, UserError
from etrain_jupyter.rules.membership.saving import take_saved
from etrain_jupyter.rules.membership.stalls import check_stalls, excuse_sleep, take_progress
from etrain_jupyter.rules.membership.turn import (
    Turn,
    begin_collecting,
    end_job,
    request_leave,
    start_missing,
)

LAST_SAVE_S = 30.0
"""The last holder of the state stops training and saves it this many seconds before the
interruption. At most half of the notice period, unless checkpoints are known to take longer."""

SAVES_PER_LEAD = 1.5
"""Time reserved for the last checkpoint, as a multiple of the duration of recent checkpoints."""

LAST_STEP_S = 10.0
"""A worker leaves at the latest this many seconds before the interruption. At most a quarter of the
notice period, unless its last step may take longer."""

STEPS_PER_LEAD = 2.0
"""Time reserved for the last step, as a multiple of the duration of recent steps: one in progress,
and the one after which all ranks leave."""


def handle(
    state: JobState, stimulus: s.Stimulus, now: float, *, wall: float | None = None
) -> tuple[JobState, list[Command]]:
    """Apply one stimulus and return the next state with the commands to carry out.

    Args:
        state: The job's state before the stimulus.
        stimulus: The input.
        now: Monotonic time, in seconds. All times in the state and in stimuli are by this clock.
        wall: Seconds since the epoch, for the events; None to use ``now``.

    Returns:
        The job's new state, and the commands in the order in which to carry them out.
    """
    if state.is_ended:
        return state, []  # released trainers may still report
    turn = Turn(state, now, now if wall is None else wall)
    match stimulus:
        case s.WorkersAssigned():
            _take_assigned(turn, stimulus)
        case s.WorkerNoticed():
            _take_noticed(turn, stimulus)
        case s.WorkerGone():
            take_worker_gone(turn, stimulus)
        case s.TrainerWarm():
            _take_warm(turn, stimulus)
        case s.TrainerFormed():
            _take_formed(turn, stimulus)
        case s.TrainerReported():
            _take_reported(turn, stimulus)
        case s.NonFiniteLossSeen():
            _take_nan_loss(turn, stimulus)
        case s.TrainerLost():
            take_trainer_lost(turn, stimulus)
        case s.ProgressSeen():
            take_progress(turn, stimulus)
        case s.UserErrorSeen():
            _take_user_error(turn, stimulus)
        case s.StepsCommitted():
            _take_steps(turn, stimulus)
        case s.CheckpointSaved():
            take_saved(turn, stimulus)
        case s.BoundsChanged():
            _take_bounds(turn, stimulus)
        case s.PauseRequested():
            turn.pause()
        case s.ResumeRequested():
            _take_resume(turn)
        case s.StopRequested():
            _take_stop(turn, stimulus)
        case s.TrainersFound():
            take_found(turn, stimulus)
        case s.Tick():
            _take_tick(turn, stimulus)
        case _:
            assert_never(stimulus)
    # After each stimulus but the most frequent ones, do all that is due.
    if not (turn.state.is_ended or _waits_for_tick(turn.state, stimulus)):
        advance(turn)
    return turn.state, turn.commands


def _waits_for_tick(state: JobState, stimulus: s.Stimulus) -> bool:
    # Only ticks read the ranks' progress. And a new job waits for trainers that are still warming
    # up, except in ticks, which measure the grace period (``formation``).
    if isinstance(stimulus, s.TrainerWarm):
        is_new = state.phase == "gathering" and not state.generation
        return is_new and bool(state.members.num_in("starting")) and not state.ending
    return isinstance(stimulus, s.ProgressSeen)


def _take_assigned(turn: Turn, stimulus: s.WorkersAssigned) -> None:
    turn.assign(stimulus.workers)
    # A job that is about to end starts no trainers, and keeps those that hold its newest state,
    # because one of them must save the last checkpoint.
    if turn.state.phase == "closing" or turn.state.ending:
        return
    for member in list(turn.state.members.values()):
        is_assigned = member.worker in stimulus.workers
        if not is_assigned and not member.leaving:
            request_leave(turn, member, "scaled down")
        # The job was scaled up again before the member left. A preempted member leaves in any case.
        elif is_assigned and member.leaving == "scaled down":
            turn.put(replace(member, leaving=""))
    start_missing(turn)


def _take_noticed(turn: Turn, stimulus: s.WorkerNoticed) -> None:
    # notice                      save_at       leave_at   deadline
    #   |--- it may train on --------|------ lead_s ---------|
    #   |------------------- left_s -------------------------|
    #
    # The last holder of the state trains until ``save_at``. Every other member leaves at the next
    # step boundary. If its replacement runs elsewhere, the member leaves when the replacement is
    # admitted, and at ``leave_at`` at the latest.
    turn.unassign(stimulus.worker)  # otherwise, the next trainer would start there
    member = turn.state.of_worker(stimulus.worker)
    if member is not None:
        left_s = max(0.0, stimulus.deadline - turn.now)
        lead_s = min(LAST_SAVE_S, left_s / 2)
        # A slow store needs a longer lead, up to the whole notice period.
        lead_s = max(lead_s, min(left_s, SAVES_PER_LEAD * turn.state.timings.save_s))
        member = replace(member, save_at=stimulus.deadline - lead_s)
        if stimulus.trains_on and left_s < math.inf:
            lead_s = last_step_lead_s(left_s, step_s=turn.state.timings.step_s)
            member = replace(member, leave_at=stimulus.deadline - lead_s)
        turn.put(member)
        request_leave(turn, member, "preempted")


def _take_warm(turn: Turn, stimulus: s.TrainerWarm) -> None:
    member = turn.state.members.get(stimulus.trainer)
    # A restarted scheduler receives unacknowledged reports again: the hello already contained this
    # one.
    if member is None or member.phase != "starting":
        return
    turn.put(
        replace(member, phase="warm", since=turn.now, device=stimulus.device, gpu=stimulus.gpu)
    )
    # One warm trainer proves that the notebook's code can warm up, so reset the count.
    turn.update_faults(replace(turn.state.faults, num_warm_ups=0))
    timings = turn.state.timings
    turn.update_timings(replace(timings, warm_s=max(timings.warm_s, stimulus.warm_s)))
    # This could not be checked earlier, as a trainer reports its device and GPU once it is warm.
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
    # The first rank to report determines the checkpoint from which all of them start.
    if turn.state.current.is_restoring and not turn.state.members.num_formed:
        turn.restored_at(stimulus.step)
    times = (stimulus.connect_s, stimulus.sync_s, stimulus.wrap_s)
    since = member.steps_since or turn.now  # kept across generations
    turn.put(replace(member, formed=True, steps_since=since, form_times=times))
    # A fast rank may already have left the generation when the slowest one has formed.
    if turn.state.members.num_formed == turn.state.current.world_size:
        turn.ready()
        ranks = [m for m in turn.state.in_phase("ranked", "reported") if m.formed]
        connect_s, sync_s, wrap_s = (max(m.form_times[part] for m in ranks) for part in range(3))
        change_s = connect_s + sync_s + wrap_s
        turn.update_timings(replace(turn.state.timings, change_s=change_s))
        turn.publish(
            events.GenerationReady,
            world_size=len(ranks),
            connect_s=connect_s,
            sync_s=sync_s,
            wrap_s=wrap_s,
        )


def _take_reported(turn: Turn, stimulus: s.TrainerReported) -> None:
    member = turn.state.members.get(stimulus.trainer)
    # Reject reports from an older generation, and duplicates from the current one.
    if member is None or member.phase != "ranked" or stimulus.generation != turn.state.generation:
        return
    turn.put(replace(member, phase="reported", since=turn.now, progress=stimulus.progress))
    # Its step records may still be in transit, because only rank 0 sends them.
    turn.committed(stimulus.progress[0])
    current = turn.state.current
    if stimulus.undone:
        undone = (*current.undone, (stimulus.progress[0] + 1, member.worker))
        turn.update_generation(replace(current, undone=undone))
    match stimulus.why:
        case "failed":
            found = Break(
                worker=member.worker,
                error=stimulus.error,
                backend=stimulus.backend,
                is_excused=stimulus.is_excused,
            )
            current = turn.state.current  # ``undone`` may just have changed it
            turn.update_generation(replace(current, breaks=(*current.breaks, found)))
            # The others may be waiting in a collective that this rank has left.
            begin_collecting(turn)
        case "done":
            turn.finish(stimulus.ending)
            _expect_reports(turn)
        case "planned":
            _expect_reports(turn)
        case _:
            assert_never(stimulus.why)


def _expect_reports(turn: Turn) -> None:
    # No command is needed, because all ranks make the same decision (due to a change, the last
    # step, or a non-finite loss), and leave after the same step.
    if turn.state.phase == "running":
        turn.enter_phase("changing")


def _take_nan_loss(turn: Turn, stimulus: s.NonFiniteLossSeen) -> None:
    member = turn.state.members.get(stimulus.trainer)
    if member is None or member.phase != "ranked" or stimulus.generation != turn.state.generation:
        return
    step = stimulus.progress[0] + 1
    turn.put(replace(member, phase="reported", since=turn.now, progress=stimulus.progress))
    turn.committed(stimulus.progress[0])
    # Every rank reports the same mean, but only the sources computed a non-finite loss themselves.
    # Collect the sources until all ranks have reported (``_settle_nan_loss``).
    current = turn.state.current
    found = current.nan_loss or NanLoss(step=step, loss=stimulus.loss)
    if stimulus.is_source:
        sources = sorted({*found.sources, (stimulus.rank, member.worker)})
        found = replace(found, sources=tuple(sources))
    turn.update_generation(replace(current, nan_loss=found))
    _expect_reports(turn)


def _take_user_error(turn: Turn, stimulus: s.UserErrorSeen) -> None:
    member = turn.state.members.get(stimulus.trainer)
    if member is None:
        return
    if _is_dispensable(turn.state, member):
        exclude_newcomer(turn, member, stimulus)
        return
    # A failed update leaves no usable state; the log has the newest committed step.
    holds_none = stimulus.progress == s.NO_PROGRESS
    step = turn.state.step if holds_none else stimulus.progress[0]
    match turn.state.ending:
        case Failing(error=known):  # often the same error on each rank: the first text is enough
            error = replace(known, workers=(*known.workers, member.worker))
        case _:
            error = UserError(
                error=stimulus.error,
                traceback=stimulus.traceback,
                workers=(member.worker,),
                step=step,
            )
    turn.fail(error)
    # An error during the warm-up has generation 0, and the trainer holds no state.
    if member.phase == "ranked" and stimulus.generation == turn.state.generation:
        turn.put(replace(member, phase="reported", since=turn.now, progress=stimulus.progress))
    begin_collecting(turn)


def _is_dispensable(state: JobState, member: Member) -> bool:
    # If other members hold a state produced by the same code, the code works. The cause is then the
    # newcomer's worker, and the job can train without it.
    is_newcomer = member.phase in ("starting", "warm")
    return is_newcomer and state.has_trained and bool(state.members.num_in("ranked", "reported"))


def _take_steps(turn: Turn, stimulus: s.StepsCommitted) -> None:
    turn.committed(stimulus.step)
    last_step_at = stimulus.committed_at or turn.now
    timings = replace(turn.state.timings, step_s=stimulus.step_s, last_step_at=last_step_at)
    turn.update_timings(timings)


def _take_bounds(turn: Turn, stimulus: s.BoundsChanged) -> None:
    low, high = stimulus.min_workers, stimulus.max_workers
    turn.set_bounds(min_workers=low, max_workers=high)
    turn.publish(events.WorkersScaled, min_workers=low, max_workers=high)


def _take_resume(turn: Turn) -> None:
    turn.unpause()
    # The reason is logged only if training had actually stopped.
    if turn.state.phase == "gathering":
        turn.add_why("resume")


def _take_stop(turn: Turn, stimulus: s.StopRequested) -> None:
    outcome = turn.state.outcome
    # A job that has trained all its steps still finishes, unless it must stop ``now``.
    is_new = not outcome or (stimulus.now and outcome == "finished")
    if is_new or (stimulus.reason and outcome == "stopped"):
        turn.stop(stimulus.reason)
    if stimulus.now:
        end_job(turn)


def _take_tick(turn: Turn, stimulus: s.Tick) -> None:
    # Do this before the check; otherwise every rank would seem stalled after a suspension of the
    # head.
    if stimulus.asleep_s:
        excuse_sleep(turn, stimulus.asleep_s)
    check_stalls(turn)
    if not turn.state.ending:
        start_missing(turn)


def last_step_lead_s(left_s: float, *, step_s: float = 0.0) -> float:
    """Return how many seconds before the interruption a worker leaves without a replacement.

    Args:
        left_s: Notice period, in seconds.
        step_s: Duration of recent steps, in seconds.

    >>> last_step_lead_s(120.0), last_step_lead_s(8.0), last_step_lead_s(120.0, step_s=30.0)
    (10.0, 2.0, 60.0)
    """
    return max(min(LAST_STEP_S, left_s / 4), min(left_s, STEPS_PER_LEAD * step_s))
