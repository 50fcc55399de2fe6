"""Form generations: announce changes, choose the ranks, wait, or end the job."""

from __future__ import annotations

import math
from collections.abc import Sequence

from etrain_jupyter.log import events
from etrain_jupyter.rules.membership import stimuli as s
from etrain_jupyter.rules.membership.commands import AnnounceChange, RequestBackgroundCheckpoint
from etrain_jupyter.rules.membership.connecting import count_failed_form, why_retrying
from etrain_jupyter.rules.membership.forming import form_generation
from etrain_jupyter.rules.membership.members import Member, replace
from etrain_jupyter.rules.membership.membership import JobState, UserError
from etrain_jupyter.rules.membership.saving import (
    close_job,
    is_newest_durable,
    newest_holders,
    save_newest,
    saver_of,
)
from etrain_jupyter.rules.membership.turn import Turn, begin_collecting, publish_undone, release
from etrain_jupyter.rules.optimizer_shards import choose_leavers

MAX_NAMED = 8
"""Maximum number of workers that are named as still warming up."""

MAX_FAULTS = 3
"""Consecutive faults in the same place (before the first step, or in one step) after which the job
fails: the notebook's code is then at fault, not a machine."""

ADMISSION_GRACE_S = 1.0
"""Warm newcomers are admitted once no other one has become warm for this many seconds. Applies
before the first generation, and while the duration of a change is unknown."""

MAX_ADMISSION_WAIT_S = 5.0
"""Warm newcomers are admitted after this many seconds even if others keep becoming warm."""

MAX_WINDOW_S = 30.0
"""Maximum wait in seconds once the duration of a change is known."""


def advance(turn: Turn) -> None:
    """Take the actions that are due after the stimulus was applied."""
    # A planned change and an abort. Both lead to ``_settle`` once no rank is stepping:
    #
    #   running --AnnounceChange--> changing      each rank reports at the agreed step boundary
    #   running --AbortGeneration-> collecting    each rank undoes the step in flight and reports
    #
    # A change becomes an abort if a rank is lost before it has reported.
    _check_budgets(turn)
    phase = turn.state.phase
    if phase == "running":
        _announce_if_due(turn)
    elif phase in ("changing", "collecting"):
        if not turn.state.members.num_in("ranked") and not _awaits_exit(turn.state):
            _settle(turn)
    elif phase == "gathering" and not _awaits_exit(turn.state):
        _settle(turn)
    elif phase == "closing" and not _awaits_exit(turn.state):
        close_job(turn)
        if turn.state.phase == "gathering":  # the end was cancelled: the last state was lost
            _settle(turn)


def _awaits_exit(state: JobState) -> bool:
    # A holder of the state was killed but has not exited: a generation formed now would include
    # it, and break.
    if not state.members.num_killed:
        return False
    return any(m.killed_at for m in state.in_phase("reported"))


def _check_budgets(turn: Turn) -> None:
    """Fail the job if another attempt would fail in the same way."""
    state, faults = turn.state, turn.state.faults
    step, generations = faults.at_step
    if state.ending or faults.last is None:
        return
    if faults.num_warm_ups >= MAX_FAULTS:
        text = f"{faults.num_warm_ups} trainers in a row exited before they were ready to train"
    # If the step has been committed in the meantime, the code can complete it, so the budget no
    # longer applies.
    elif step == state.step and len(generations) >= MAX_FAULTS:
        did = "lost a trainer" if faults.last.workers else "did not complete"
        text = f"step {step + 1} {did} in {len(generations)} generations in a row"
    else:
        return
    turn.fail(replace(faults.last, error=f"{text}, {faults.last.error}", step=state.step))
    begin_collecting(turn)


def _announce_if_due(turn: Turn) -> None:
    """Begin a planned change if members join or leave, or too few remain to continue."""
    state = turn.state
    if _is_settled(state):
        return
    ranked = state.in_phase("ranked")
    stays = [m for m in ranked if not m.leaving]
    newcomers = _admissible(turn)
    leaves = [m for m in ranked if m.leaving]
    # The members that would remain decide which leaving ranks go now. With one worker:
    #
    #   notice -> background checkpoint -> ... trains on ... -> save_at -> change -> report
    #          -> last checkpoint (``_save_before_it_is_gone``) -> release -> interruption
    if not (stays or newcomers):
        # If no member would remain, all of them continue training as long as possible, and a
        # checkpoint is saved in the background.
        _back_up(turn, ranked)
        leaves = [m for m in leaves if m.save_at <= turn.now]
    elif len(stays) + len(newcomers) < state.min_workers:
        # If too few members would remain, the job would have to wait, so ranks that still have time
        # continue training.
        leaves = [m for m in leaves if not _has_time(m, turn.now)]
    else:
        leaves = _going(turn, leaves, num_others=len(stays) + len(newcomers))
    # Newcomers that are waiting for others count too, because they will join soon.
    is_short = len(ranked) + len(_newcomers(turn.state)) < state.min_workers
    if not (newcomers or leaves or is_short or state.pause or state.ending):
        return
    if any(not m.formed for m in ranked):
        return  # one change at a time
    if newcomers:
        turn.add_why("join")
    if leaves:
        turn.add_why("leave")
    if is_short:
        turn.add_why("resume")
    names = tuple(m.trainer for m in ranked)
    turn.do(AnnounceChange(generation=state.generation, trainers=names))
    turn.enter_phase("changing")


def _is_settled(state: JobState) -> bool:
    # True for nearly every stimulus of a running generation. The decision uses counts, because
    # collecting the members at every rank's report would take quadratic time.
    members = state.members
    num_ranks, num_warm = members.num_in("ranked"), members.num_in("warm")
    is_changing = bool(num_warm or members.num_leaving or state.pause or state.ending)
    return bool(num_ranks) and num_ranks >= state.min_workers and not is_changing


def _back_up(turn: Turn, ranked: Sequence[Member]) -> None:
    # Once per generation, while training continues, as the interruption may come before
    # ``save_at``.
    current = turn.state.current
    is_noticed = any(m.save_at < math.inf for m in ranked)  # False if the job is only scaled down
    if is_noticed and not current.has_backup:
        turn.update_generation(replace(current, has_backup=True))
        turn.do(RequestBackgroundCheckpoint(trainers=tuple(m.trainer for m in ranked)))


def _admissible(turn: Turn) -> list[Member]:
    # Workers that arrive together join in one change, because each change costs a new generation:
    #
    #   w2 warm ------- w3 warm: both join          w3 not warm after the window: w2 joins
    warm = _newcomers(turn.state)
    if not warm or not turn.state.members.num_in("starting"):
        return warm
    # The first ones wait for a pause, because 1,000 workers take longer than one window.
    waited, idle = (turn.now - pick(m.since for m in warm) for pick in (min, max))
    is_due = is_admission_due(
        waited_s=waited,
        idle_s=idle,
        change_s=turn.state.timings.change_s,
        num_training=turn.state.members.num_in("ranked"),
        num_waiting=len(warm),
    )
    return warm if is_due else []


def _newcomers(state: JobState) -> list[Member]:
    return [m for m in state.in_phase("warm") if not m.leaving and not m.killed_at]


def _settle(turn: Turn) -> None:
    """Form the next generation, wait, or end the job. Called while no rank is stepping."""
    # The order of these calls matters. A non-finite loss removes its step from the undone steps,
    # and may fail or pause the job. Undone steps must be logged while the survivors are still
    # members. A failed attempt may fail the job.
    _settle_nan_loss(turn)
    publish_undone(turn)
    count_failed_form(turn)
    if turn.state.ending:
        close_job(turn)
        if turn.state.ending:  # otherwise cancelled: the last state was lost
            return
    newcomers = _newcomers(turn.state)
    holders = _release_leavers(turn)
    state = turn.state
    members = holders + newcomers
    has_enough = not state.pause and len(members) >= state.min_workers
    is_saving = _save_before_it_is_gone(turn, has_enough=has_enough)
    if turn.state.phase == "running":
        return  # its ranks save the state together
    if state.pause:
        turn.enter_phase("gathering")
        turn.set_status("paused", state.pause.reason)
    elif not has_enough:
        turn.enter_phase("gathering")
        # A new job stays ``submitted`` while its first trainers warm up.
        if state.generation or not state.members.num_in("starting"):
            turn.set_status("waiting", _why_too_few(state, len(members)))
    elif is_saving:
        turn.enter_phase("gathering")
        turn.set_status("waiting", _why_it_saves(turn.state))
    elif turn.now < state.faults.form_at:
        turn.enter_phase("gathering")
        turn.set_status("waiting", why_retrying(state))
    # After a change or an abort the ranks are idle, so form the next generation immediately. Other
    # idle ranks need not wait for newcomers; the first generation waits briefly.
    elif state.phase != "gathering" or state.in_phase("reported") or _admissible(turn):
        form_generation(turn, members)


def _settle_nan_loss(turn: Turn) -> None:
    # Fail or pause the job, even if the generation has since been aborted, because the step would
    # have the same loss again.
    state, current = turn.state, turn.state.current
    found = current.nan_loss
    if found is None:
        return
    # A rank may see the others leave before it gets the loss; it then undoes the same step.
    undone = tuple(pair for pair in current.undone if pair[0] != found.step)
    turn.update_generation(replace(current, nan_loss=None, undone=undone))
    text = found.to_text(state.saved_step)
    turn.publish(
        events.LossNotFinite,
        step=found.step,
        loss=found.loss,
        ranks=[rank for rank, _ in found.sources],
        workers=[worker for _, worker in found.sources],
        saved_step=max(0, state.saved_step),
    )
    if state.ending:
        return  # the user has stopped it, or it has already failed
    if state.pauses_on_nan:
        remedy = "%etrain resume retries the step, %etrain stop ends the job"
        turn.pause(f"{text}. {remedy}")
        return
    error = UserError(
        error=text,
        traceback="",
        workers=tuple(worker for _, worker in found.sources),
        step=found.step - 1,
        nan_loss=found,
    )
    turn.fail(error)


def _save_before_it_is_gone(turn: Turn, *, has_enough: bool) -> bool:
    """Save the newest state if all its holders leave and no other trainer can take it over.

    Returns:
        True if the next generation has to wait for the checkpoint.
    """
    if saver_of(turn.state) is not None:
        return True  # the trainer would form the next generation only after the checkpoint
    holders = newest_holders(turn.state)
    if not holders or not all(m.leaving for m in holders):
        return False  # one holder stays, or there is no state
    if _has_successor(turn.state) or is_newest_durable(turn.state):
        return False  # a member that stays will receive the state, or a checkpoint contains it
    is_due = all(m.save_at <= turn.now for m in holders)
    is_known = any(m.save_at < math.inf for m in holders)
    # Before the deadline, continue training if there are enough ranks; otherwise use the time to
    # save. If the deadline is unknown, do not save yet.
    if not is_due and (has_enough or not is_known):
        return False
    save_newest(turn)
    return True


def _why_it_saves(state: JobState) -> str:
    going = ", ".join(m.worker for m in newest_holders(state))
    failure = f"; the last attempt failed ({state.saving.error})" if state.saving.error else ""
    return f"saving step {state.step} before {going} is interrupted{failure}"


def _why_too_few(state: JobState, num_here: int) -> str:
    starting = state.in_phase("starting")
    known = [f"{m.worker} is warming up" for m in starting[:MAX_NAMED]]
    if len(starting) > MAX_NAMED:  # otherwise, N changes of N names would be logged
        known.append("others are warming up")
    known += [f"{w} was lost: {cause}" for w, cause in state.faults.lost if not state.of_worker(w)]
    # If the workers that held the state are gone, report that a checkpoint still contains it.
    has_no_holder = all(m.progress == s.NO_PROGRESS for m in state.in_phase("reported"))
    if state.step > 0 and has_no_holder and state.saved_step >= state.step:
        known.append(f"the state is in the checkpoint of step {state.saved_step}")
    missing = f" ({'; '.join(known)})" if known else ""
    return f"{num_here} of min {state.min_workers} workers available{missing}"


def _release_leavers(turn: Turn) -> list[Member]:
    """Release leaving members if the newest state is kept; return the members that remain."""
    holders = turn.state.in_phase("reported")
    newest = newest_holders(turn.state)
    if any(not m.leaving for m in newest):
        # A member that stays holds the newest state, so all leaving members can go. But if too few
        # ranks would remain to train, the ones that still have time until their deadline stay.
        leavers, num_newcomers = [m for m in holders if m.leaving], len(_newcomers(turn.state))
        num_others = len(holders) - len(leavers) + num_newcomers
        going = _going(turn, leavers, num_others=num_others)
        num_left = len(holders) - len(going) + num_newcomers
        if num_left < turn.state.min_workers:
            going = [m for m in going if not _has_time(m, turn.now)]
    elif any(m.save_at > turn.now for m in newest) or not _has_successor(turn.state):
        # Only leaving members hold the newest state. Those past ``save_at`` go; the others keep the
        # state until it is durable or handed over.
        going = [m for m in holders if m.leaving and m.save_at <= turn.now]
    else:
        # All holders are past ``save_at``: they hand the state over in the next generation, and
        # then leave.
        return holders
    if turn.state.is_sharded:
        # Each shard is on two ranks. If both leave, they leave one after the other, so that the
        # state is divided among the other ranks in between.
        present = [m.trainer for m in holders]
        chosen = choose_leavers(turn.state.ring, present, [m.trainer for m in going])
        going = [m for m in going if m.trainer in chosen]
    stays = [m for m in holders if m not in going]
    # In any case, never release the last holder of a state that is not durable, or a member that
    # is writing it.
    is_kept = any(m in stays for m in newest) or is_newest_durable(turn.state)
    if not is_kept or saver_of(turn.state) in going:
        return holders
    for member in going:
        assert member.leaving
        release(turn, member, member.leaving)
    if not any(m in stays for m in newest):
        # Now only the checkpoint has the newest state. The remaining members drop their older
        # state, and the next generation restores the checkpoint.
        for member in stays:
            turn.put(replace(member, progress=s.NO_PROGRESS))
    return [turn.state.members[m.trainer] for m in stays]


def _going(turn: Turn, leavers: Sequence[Member], *, num_others: int) -> list[Member]:
    """Return the members that leave now, if ``num_others`` members stay or join."""
    # max 4    w1 w2 w3 w4    w4 has a notice, and trains on: there is room for it
    #          w1 w2 w3 w5    w5 is admitted: w4 leaves in the same change
    staying = [m for m in leavers if m.leave_at > turn.now]
    room = max(0, turn.state.max_workers - num_others)
    kept = sorted(staying, key=lambda m: (-m.leave_at, m.order))[:room]
    return [m for m in leavers if m not in kept]


def _has_time(member: Member, now: float) -> bool:
    return now < member.save_at < math.inf  # a deadline is known and has not passed


def _has_successor(state: JobState) -> bool:
    """Return whether a generation formed now would include a member that stays."""
    members = [*state.in_phase("reported"), *_newcomers(state)]
    has_enough = not state.pause and len(members) >= state.min_workers
    return has_enough and any(not m.leaving for m in members)


def is_admission_due(
    *, waited_s: float, idle_s: float, change_s: float, num_training: int, num_waiting: int
) -> bool:
    """Return True if warm newcomers are admitted now, although others are still warming up.

    Args:
        waited_s: Seconds since the first of them became warm.
        idle_s: Seconds since the newest of them became warm.
        change_s: Duration of a recent change, in seconds; 0 if it is unknown.
        num_training: Ranks that a change stops.
        num_waiting: Newcomers that are warm.
    """
    if not num_training or not change_s:
        return idle_s >= ADMISSION_GRACE_S or waited_s >= MAX_ADMISSION_WAIT_S
    return waited_s >= admission_window_s(
        change_s=change_s, num_training=num_training, num_waiting=num_waiting
    )


def admission_window_s(*, change_s: float, num_training: int, num_waiting: int) -> float:
    """Return for how long the first newcomer waits for others that are still warming up.

    Waiting costs the newcomers' time, and a separate change for each newcomer would stop all ranks.
    They wait until both costs are equal. The cost is then at most twice what it would be if it were
    known when the others will be warm.

    Args:
        change_s: Duration of a recent change, in seconds.
        num_training: Ranks that a change stops.
        num_waiting: Newcomers that are warm; at least 1.

    >>> admission_window_s(change_s=0.2, num_training=3, num_waiting=1)
    0.8
    """
    return min(MAX_WINDOW_S, change_s * (num_training + num_waiting) / num_waiting)
