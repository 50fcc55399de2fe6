"""Handle lost trainers and workers: the effect on the generation, the worker and the job."""

from __future__ import annotations

from etrain_jupyter.log import events
from etrain_jupyter.rules.membership import stimuli as s
from etrain_jupyter.rules.membership.commands import ReleaseTrainer
from etrain_jupyter.rules.membership.faults import after_fault
from etrain_jupyter.rules.membership.members import Member, replace
from etrain_jupyter.rules.membership.membership import UserError
from etrain_jupyter.rules.membership.turn import Turn, begin_collecting, start_missing


def take_worker_gone(turn: Turn, stimulus: s.WorkerGone) -> None:
    """Remove a worker that is gone, with its trainer. This does not count against any budget."""
    turn.unassign(stimulus.worker)  # until the coordinator assigns it again
    member = turn.state.of_worker(stimulus.worker)
    if member is not None:
        _lose(turn, member, stimulus.cause, stimulus.detected_s)


def take_trainer_lost(turn: Turn, stimulus: s.TrainerLost) -> None:
    """Replace a trainer that exited while its worker is alive."""
    member = turn.state.members.get(stimulus.trainer)
    if member is None:
        return
    # Count the fault first, because the rule depends on the member's phase, and on the other
    # members.
    if not stimulus.injected:
        _count_fault(turn, member, stimulus)
    _lose(turn, member, stimulus.cause, stimulus.detected_s)
    if not turn.state.ending:
        start_missing(turn)  # if its back-off is over; otherwise a later tick starts it


def exclude_newcomer(turn: Turn, member: Member, stimulus: s.UserErrorSeen) -> None:
    """Continue without a newcomer on which the notebook's code fails, although it works on others.

    Its worker may lack a file or a package. The worker gets its next trainer after a back-off.
    """
    error = "\n".join(text for text in (stimulus.error, stimulus.traceback) if text)
    turn.log(
        f"{member.worker} cannot train; the job continues without it: {error}", worker=member.worker
    )
    turn.do(ReleaseTrainer(trainer=member.trainer))
    _back_off(turn, member)
    _lose(turn, member, f"the notebook's code fails on it: {stimulus.error}", 0.0)


def _count_fault(turn: Turn, member: Member, stimulus: s.TrainerLost) -> None:
    """Distinguish machine faults from faults in the notebook's code, which would recur forever.

    Faults count regardless of the worker, because a repeated step gives the same samples to each
    rank. If a machine is broken and the others can train without it, they commit steps in the
    meantime, so the count starts again.
    """
    state = turn.state
    _back_off(turn, member)  # counts against its worker in any phase
    error = f"the last on {member.worker}: {stimulus.cause}"
    if member.phase == "ranked":
        count_step_fault(turn, error, output=stimulus.last_words, workers=(member.worker,))
    # If the job has trained, or another trainer is warm, the notebook's code can warm up and is not
    # the cause.
    elif (
        member.phase == "starting"
        and not state.has_trained
        and not state.in_phase("warm", "ranked", "reported")
    ):
        fault = UserError(
            error=error,
            traceback=stimulus.last_words,
            workers=(member.worker,),
            step=state.step,
        )
        faults = turn.state.faults
        turn.update_faults(faults.with_warm_up_fault(fault, since=member.since, now=turn.now))


def count_step_fault(
    turn: Turn, error: str, *, output: str = "", workers: tuple[str, ...] = ()
) -> None:
    """Count a generation that broke in the current step; ``workers`` is empty if unknown."""
    state = turn.state
    fault = UserError(error=error, traceback=output, workers=workers, step=state.step)
    turn.update_faults(state.faults.with_step_fault(fault, generation=state.generation))


def _back_off(turn: Turn, member: Member) -> None:
    stepped_s = turn.now - member.steps_since if member.steps_since else 0.0
    faults = turn.state.faults
    health = after_fault(
        faults.health.get(member.worker),
        now=turn.now,
        stepped_s=stepped_s,
        was_ready=member.phase != "starting",
    )
    # Forget workers that the job may no longer use, or the mapping would grow without bound.
    known = {w: h for w, h in faults.health.items() if w in turn.state.assigned}
    turn.update_faults(replace(faults, health={**known, member.worker: health}))
    wait_s = health.retry_at - turn.now
    if wait_s > 0:
        times = "" if health.num_faults == 1 else f" {health.num_faults} times in a row"
        what = f"its trainer exited{times}; the next one starts in {wait_s:.0f} s"
        turn.log(f"{member.worker}: {what}")


def _lose(turn: Turn, member: Member, cause: str, detected_s: float) -> None:
    turn.update_faults(turn.state.faults.with_lost(member.worker, cause))
    turn.remove(member)
    turn.publish(events.WorkerLost, worker=member.worker, cause=cause, detected_s=detected_s)
    # No rank waits for a newcomer, or for a trainer that has reported.
    if member.phase == "ranked":
        turn.update_generation(replace(turn.state.current, has_lost=True))
        turn.add_why("lost")
        begin_collecting(turn)
