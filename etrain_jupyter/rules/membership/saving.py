"""Wait for checkpoints: before the last holder of the newest state leaves, or as the job ends.

The holders of the newest state try to write it, one after another. If all fail, they retry after a
delay, because a full disk or an unreachable store may recover.
"""

from __future__ import annotations

from etrain_jupyter.log.job_record import KEEP_SAVED
from etrain_jupyter.rules.membership import stimuli as s
from etrain_jupyter.rules.membership.commands import SaveCheckpoint
from etrain_jupyter.rules.membership.forming import form_generation
from etrain_jupyter.rules.membership.members import Member, replace
from etrain_jupyter.rules.membership.membership import Finishing, JobState, Saving
from etrain_jupyter.rules.membership.turn import Turn, end_job, newest_step

SAVE_WAITS_S = (5.0, 10.0, 20.0)
"""Seconds to wait after the first, second and each later round in which no holder could write the
checkpoint. A job that is ending retries once per entry, then ends without the checkpoint."""

SAVE_TIME_DECAY = 0.8
"""A faster checkpoint lowers the estimated duration to at least this fraction of its value."""


def newest_holders(state: JobState) -> list[Member]:
    """Return the members at a step boundary that hold the newest state, oldest first."""
    holders = state.in_phase("reported")
    newest = max((m.progress for m in holders), default=s.NO_PROGRESS)
    return [m for m in holders if m.progress == newest]


def is_newest_durable(state: JobState) -> bool:
    """Return whether the newest state is durable, so that no steps are lost with its holders.

    Returns True before the first step.
    """
    return newest_step(state) <= max(0, state.saved_step)


def saver_of(state: JobState) -> Member | None:
    """Return the member that is writing the state, or None."""
    return state.members.get(state.saving.trainer)


def save_newest(turn: Turn) -> None:
    """Instruct a holder of the newest state to save it, unless one is saving or has to wait."""
    # One round over three holders of the newest state, and the next one:
    #
    #   w1 fails -> w2 fails -> w3 fails | wait 5 s | w1 ... succeeds: ``Saving()``
    #   failed=(w1,)  (w1, w2)  (w1, w2, w3) -> () num_rounds=1
    state = turn.state
    if saver_of(state) is not None or turn.now < state.saving.retry_at:
        return
    if state.is_sharded:
        _save_together(turn)
        return
    holders = [m for m in newest_holders(state) if not m.killed_at]
    able = [m for m in holders if m.trainer not in state.saving.failed]
    if able:
        turn.update_saving(replace(state.saving, trainer=able[0].trainer, since=turn.now))
        turn.do(SaveCheckpoint(trainer=able[0].trainer))
    elif holders:
        _delay_next_round(turn)


def _save_together(turn: Turn) -> None:
    """Form a generation in which all holders save their parts of the state, and then leave."""
    # closing -- form --> running -- all have saved, all report --> changing -- durable --> ended
    #    ^                                                             |
    #    +---------- not durable: wait, then form another one ---------+
    state, saving = turn.state, turn.state.saving
    if saving.since and not state.current.has_lost:
        _delay_next_round(turn)
        turn.update_saving(replace(turn.state.saving, since=0.0))
        return
    members = [m for m in state.in_phase("reported") if not m.killed_at]
    if members:
        form_generation(turn, members, saves=True)
        turn.update_saving(replace(saving, since=turn.now))


def _delay_next_round(turn: Turn) -> None:
    saving = turn.state.saving
    wait_s = SAVE_WAITS_S[min(saving.num_rounds, len(SAVE_WAITS_S) - 1)]
    retry_at, num_rounds = turn.now + wait_s, saving.num_rounds + 1
    turn.update_saving(replace(saving, failed=(), num_rounds=num_rounds, retry_at=retry_at))
    if not _is_abandoned(turn.state):
        what = f"step {turn.state.step} could not be saved ({saving.error})"
        turn.log(f"{what}; retrying in {wait_s:g} s")


def take_saved(turn: Turn, saved: s.CheckpointSaved) -> None:
    """Record that a checkpoint is durable, or that it could not be written."""
    if saved.ok:
        known = {*turn.state.saved_steps, saved.step}
        turn.saved(sorted(known)[-KEEP_SAVED:])
        if saved.duration_s:
            # A slow checkpoint raises the estimate immediately; faster ones lower it gradually,
            # because missing a deadline costs more than saving too early.
            timings = turn.state.timings
            save_s = max(saved.duration_s, timings.save_s * SAVE_TIME_DECAY)
            turn.update_timings(replace(timings, save_s=save_s))
    elif turn.state.current.is_saving:
        turn.update_saving(replace(turn.state.saving, error=saved.error))
    saver = saver_of(turn.state)
    if saver is None or saved.trainer not in ("", saver.trainer):
        return  # a background checkpoint: no rank waits for it
    if saved.step < saver.progress[0]:
        return  # an older checkpoint, still in progress when this one was ordered
    if saved.ok:
        turn.update_saving(Saving())
    else:
        failed = (*turn.state.saving.failed, saver.trainer)
        error = saved.error or "no reason was given"
        turn.update_saving(replace(turn.state.saving, trainer="", failed=failed, error=error))


def _is_abandoned(state: JobState) -> bool:
    # The job gives up only when it ends. Before an interruption, it retries as long as the machine
    # exists.
    return state.phase == "closing" and state.saving.num_rounds > len(SAVE_WAITS_S)


def close_job(turn: Turn) -> None:
    """Make the newest state durable, then end the job. Called again with each later stimulus."""
    # all ranks have reported -> closing: save
    #
    #   durable                                     end_job
    #   all retries fail                            end_job, without the last checkpoint
    #   a finished job loses its last holder        gathering: repeat the last steps
    state = turn.state
    has_finished = isinstance(state.ending, Finishing)
    if has_finished and max(newest_step(state), state.saved_step) < state.step:
        # All holders of the last steps died. Because this job was about to end, its workers may now
        # belong to other jobs, so have workers assigned again.
        turn.train_on()
        turn.enter_phase("gathering")
    elif is_newest_durable(state):
        # The remaining state is durable. If a checkpoint was ordered but the state of
        # ``state.step`` was lost anyway, report that.
        is_unsaved = bool(state.saving.since) and state.saved_step < state.step
        end_job(turn, unsaved=_describe_loss(state) if is_unsaved else "")
    else:
        if state.phase != "closing":
            # Earlier failed rounds were due to an interruption and do not count.
            turn.enter_phase("closing")
            # A generation that only saves is part of closing.
            if not state.current.is_saving:
                turn.update_saving(replace(state.saving, num_rounds=0, retry_at=0.0))
        save_newest(turn)
        if _is_abandoned(turn.state):
            end_job(turn, unsaved=_describe_loss(turn.state))


def _describe_loss(state: JobState) -> str:
    durable = f"the newest checkpoint is of step {state.saved_step}"
    if state.saved_step < 0:
        durable = "there is no earlier checkpoint"
    error = state.saving.error or "all workers that held its state were lost"
    return (
        f"trained to step {state.step}, but the last checkpoint could not be written "
        f"({error}); {durable}"
    )
