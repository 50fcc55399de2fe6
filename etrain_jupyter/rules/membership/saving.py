"""Checkpoints that are waited for: before the newest state's last holder leaves, or at the end.

One holder of the newest state is asked at a time. If it cannot write it, another one is; if none
can, they try again after a while, because a full disk or an unreachable store may come back.
"""

from __future__ import annotations

import dataclasses

from etrain_jupyter.rules.membership import stimuli as s
from etrain_jupyter.rules.membership.commands import SaveCheckpoint
from etrain_jupyter.rules.membership.membership import JobState, Member, Saving
from etrain_jupyter.rules.membership.turn import Turn, end_job, enter_phase, newest_step

SAVE_WAITS_S = (5.0, 10.0, 20.0)
"""How long nobody tries after none of the holders could write it, for the first time and so on. At
the end of a job that is tried this often again, and then given up."""

FORGET_SAVES = 0.8
"""What is left of how long a checkpoint took with each that was faster."""

KEEP_SAVED = 8
"""Durable checkpoints that are remembered, in case the job goes back behind the newest ones."""


def newest_holders(state: JobState) -> list[Member]:
    """Return those that stand at a step boundary and hold the newest state, oldest first."""
    holders = state.in_phase("reported")
    newest = max((m.progress for m in holders), default=s.NO_PROGRESS)
    return [m for m in holders if m.progress == newest]


def is_newest_durable(state: JobState) -> bool:
    """Whether nothing is lost if all that hold the newest state go; so it is before any step."""
    return newest_step(state) <= max(0, state.saved_step)


def saver_of(state: JobState) -> Member | None:
    """Return who is writing the state at present, as far as is known."""
    return state.members.get(state.saving.trainer)


def save_newest(turn: Turn) -> None:
    """Ask one holder of the newest state to make it durable, unless one does or all must wait."""
    state = turn.state
    if saver_of(state) is not None or turn.now < state.saving.retry_at:
        return
    holders = [m for m in newest_holders(state) if not m.killed_at]
    able = [m for m in holders if m.trainer not in state.saving.failed]
    if able:
        saving = dataclasses.replace(state.saving, trainer=able[0].trainer, since=turn.now)
        turn.set(saving=saving)
        turn.do(SaveCheckpoint(trainer=able[0].trainer))
    elif holders:
        _wait_for_the_store(turn)


def _wait_for_the_store(turn: Turn) -> None:
    """None of the holders could write it: let all of them try again after a while."""
    saving = turn.state.saving
    wait_s = SAVE_WAITS_S[min(saving.num_rounds, len(SAVE_WAITS_S) - 1)]
    retry_at, num_rounds = turn.now + wait_s, saving.num_rounds + 1
    saving = dataclasses.replace(saving, failed=(), num_rounds=num_rounds, retry_at=retry_at)
    turn.set(saving=saving)
    if not _is_given_up(turn.state):
        what = f"step {turn.state.step} could not be saved ({saving.error})"
        turn.log(f"{what}; that is tried again in {wait_s:g} s")


def take_saved(turn: Turn, saved: s.CheckpointSaved) -> None:
    """Take in that a checkpoint is durable, or could not be written."""
    if saved.ok:
        known = {*turn.state.saved_steps, saved.step}
        turn.set(saved_steps=tuple(sorted(known)[-KEEP_SAVED:]))
        if saved.duration_s:
            # The slowest counts, and is forgotten by and by.
            turn.set(save_s=max(saved.duration_s, turn.state.save_s * FORGET_SAVES))
    saver = saver_of(turn.state)
    if saver is None or saved.trainer not in ("", saver.trainer):
        return
    if saved.step < saver.progress[0]:
        return  # an older one was under way when this one was asked for
    if saved.ok:
        turn.set(saving=Saving())
    else:
        failed = (*turn.state.saving.failed, saver.trainer)
        error = saved.error or "no reason was given"
        turn.set(
            saving=dataclasses.replace(turn.state.saving, trainer="", failed=failed, error=error)
        )


def _is_given_up(state: JobState) -> bool:
    """Whether the job ends without its last checkpoint."""
    return state.phase == "closing" and state.saving.num_rounds > len(SAVE_WAITS_S)


def close_job(turn: Turn) -> None:
    """Make the newest state durable, then end; go on if those that had finished died before.

    Called again with whatever happens while the job is closing.
    """
    state = turn.state
    if state.outcome == "finished" and max(newest_step(state), state.saved_step) < state.step:
        # What is lost is trained again. The coordinator shares the workers anew: others may have
        # got them, because this job was about to end.
        turn.set(outcome="", ending="", assigned=(), saving=Saving())
        enter_phase(turn, "gathering")
    elif is_newest_durable(state):
        is_unsaved = bool(state.saving.since) and state.saved_step < state.step
        end_job(turn, unsaved=_words_of_loss(state) if is_unsaved else "")
    else:
        if state.phase != "closing":
            enter_phase(turn, "closing")
            turn.set(saving=dataclasses.replace(state.saving, num_rounds=0, retry_at=0.0))
        save_newest(turn)
        if _is_given_up(turn.state):
            end_job(turn, unsaved=_words_of_loss(turn.state))


def _words_of_loss(state: JobState) -> str:
    durable = f"the newest durable one is of step {state.saved_step}"
    if state.saved_step < 0:
        durable = "there is no other"
    error = state.saving.error or "whoever held its state was lost"
    return (
        f"trained to step {state.step}, but the last checkpoint could not be written "
        f"({error}); {durable}"
    )
