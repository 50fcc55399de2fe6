"""What a lost trainer or worker means: for its generation, for its worker, and for the job."""

from __future__ import annotations

from etrain_jupyter.log import events
from etrain_jupyter.rules.membership import stimuli as s
from etrain_jupyter.rules.membership.commands import ReleaseTrainer
from etrain_jupyter.rules.membership.health import after_fault
from etrain_jupyter.rules.membership.membership import Member, UserError
from etrain_jupyter.rules.membership.turn import Turn, begin_collecting, start_missing

KEEP_LOST = 8
"""Lost workers that a waiting job names at most."""


def take_worker_gone(turn: Turn, stimulus: s.WorkerGone) -> None:
    """Take in that a worker is gone, and its trainer with it. No budget counts that."""
    turn.set(assigned=tuple(w for w in turn.state.assigned if w != stimulus.worker))
    member = turn.state.of_worker(stimulus.worker)
    if member is not None:
        _lose(turn, member, stimulus.cause, stimulus.detected_s)


def take_trainer_lost(turn: Turn, stimulus: s.TrainerLost) -> None:
    """Take in that a trainer ended while its worker lives, and start another one there."""
    member = turn.state.members.get(stimulus.trainer)
    if member is None:
        return
    if not stimulus.injected:
        _count_fault(turn, member, stimulus)
    _lose(turn, member, stimulus.cause, stimulus.detected_s)
    if not turn.state.outcome:
        start_missing(turn)


def do_without(turn: Turn, member: Member, stimulus: s.UserErrorSeen) -> None:
    """Go on without a newcomer on which the notebook's code fails: it works on the others.

    Its worker may lack a file or a package. It is tried again there, less and less often.
    """
    told = "\n".join(text for text in (stimulus.error, stimulus.traceback) if text)
    turn.log(f"{member.worker} cannot train, the others go on: {told}", worker=member.worker)
    turn.do(ReleaseTrainer(trainer=member.trainer))
    _slow_down(turn, member)
    _lose(turn, member, f"the notebook's code fails there: {stimulus.error}", 0.0)


def _count_fault(turn: Turn, member: Member, stimulus: s.TrainerLost) -> None:
    """Tell a machine's fault from one of the notebook's code, which would come back for ever.

    The workers do not matter: a step's samples go to the same rank each time, and wherever the
    others can go on without a broken machine they commit steps meanwhile.
    """
    state = turn.state
    _slow_down(turn, member)
    error = f"the last on {member.worker}: {stimulus.cause}"
    if member.phase == "ranked":
        count_step_fault(turn, error, words=stimulus.last_words, workers=(member.worker,))
    elif member.phase == "starting" and not state.in_phase("warm", "ranked", "reported"):
        # Where others are ready, the notebook's code is not what is wrong.
        turn.set(
            warm_faults=state.warm_faults + 1,
            last_fault=UserError(
                error=error,
                traceback=stimulus.last_words,
                workers=(member.worker,),
                step=state.step,
            ),
        )


def count_step_fault(
    turn: Turn, error: str, *, words: str = "", workers: tuple[str, ...] = ()
) -> None:
    """Count a generation that broke in the present step; without ``workers`` nobody broke it."""
    state = turn.state
    fault = UserError(error=error, traceback=words, workers=workers, step=state.step)
    step, generations = state.same_step_faults
    known = generations if step == state.step else ()
    if state.generation not in known:
        known = (*known, state.generation)
    turn.set(same_step_faults=(state.step, known), last_fault=fault)


def _slow_down(turn: Turn, member: Member) -> None:
    """Let the worker's next trainer wait, if they keep ending there; say so."""
    stepped_s = turn.now - member.steps_since if member.steps_since else 0.0
    health = after_fault(
        turn.state.health.get(member.worker),
        now=turn.now,
        stepped_s=stepped_s,
        was_ready=member.phase != "starting",
    )
    known = {w: h for w, h in turn.state.health.items() if w in turn.state.assigned}
    turn.set(health={**known, member.worker: health})
    wait_s = health.retry_at - turn.now
    if wait_s > 0:
        times = "once" if health.num_faults == 1 else f"{health.num_faults} times in a row"
        turn.log(f"{member.worker}: its trainer ended {times}; the next starts in {wait_s:.0f} s")


def _lose(turn: Turn, member: Member, cause: str, detected_s: float) -> None:
    lost = tuple(pair for pair in turn.state.lost if pair[0] != member.worker)
    turn.set(lost=(*lost, (member.worker, cause))[-KEEP_LOST:])
    turn.state = turn.state.without_member(member.trainer)
    turn.publish(events.WorkerLost, worker=member.worker, cause=cause, detected_s=detected_s)
    if member.phase == "ranked":
        turn.set(has_lost=True)
        turn.add_why("lost")
        begin_collecting(turn)
