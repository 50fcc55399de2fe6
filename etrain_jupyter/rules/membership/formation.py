"""What follows from a state: changes begin, generations form, the job waits or ends."""

from __future__ import annotations

import dataclasses
import math

from etrain_jupyter.log import events
from etrain_jupyter.rules.membership import stimuli as s
from etrain_jupyter.rules.membership.commands import (
    AnnounceChange,
    AskForCheckpoint,
    FormGeneration,
)
from etrain_jupyter.rules.membership.connecting import (
    backend_for,
    count_failed_form,
    why_gloo,
    why_retrying,
)
from etrain_jupyter.rules.membership.membership import JobState, Member, Saving, UserError
from etrain_jupyter.rules.membership.saving import (
    close_job,
    is_newest_durable,
    newest_holders,
    save_newest,
    saver_of,
)
from etrain_jupyter.rules.membership.turn import (
    Turn,
    begin_collecting,
    enter_phase,
    let_go,
    publish_undone,
)

ADMISSION_GRACE_S = 1.0
"""How long warm newcomers wait for others that still warm up: one change admits them together."""

MAX_FAULTS = 3
"""Faults in a row at one place (before the first step, or in one step) that count as the user's."""

GUARDED_S = 600.0
"""How long after a failed attempt to form the ranks admit only connections that they announce to
each other. It costs some ms a generation, and lets a job form while strangers connect to its ports.
"""


def advance(turn: Turn) -> None:
    """Do what is due in the state that the stimulus has led to."""
    _check_budgets(turn)
    phase = turn.state.phase
    if phase == "running":
        _announce_if_due(turn)
    elif phase in ("changing", "collecting"):
        if not turn.state.in_phase("ranked") and not _is_end_awaited(turn):
            _settle(turn)
    elif phase == "gathering" and not _is_end_awaited(turn):
        _settle(turn)
    elif phase == "closing" and not _is_end_awaited(turn):
        close_job(turn)
        if turn.state.phase == "gathering":
            _settle(turn)


def _is_end_awaited(turn: Turn) -> bool:
    """Whether a holder of the state was killed and has not ended: it would break what is formed."""
    return any(m.killed_at for m in turn.state.in_phase("reported"))


def _check_budgets(turn: Turn) -> None:
    """Give up where starting again would only fail again."""
    state = turn.state
    step, generations = state.same_step_faults
    if state.outcome or state.last_fault is None:
        return
    if state.warm_faults >= MAX_FAULTS:
        text = f"{state.warm_faults} trainers in a row ended before they were ready to train"
    elif step == state.step and len(generations) >= MAX_FAULTS:
        what = "ended a trainer" if state.last_fault.workers else "came to nothing"
        text = f"step {step + 1} {what} in {len(generations)} generations in a row"
    else:
        return
    last = state.last_fault
    error = dataclasses.replace(last, error=f"{text}, {last.error}", step=state.step)
    turn.set(user_error=error, outcome="failed")
    begin_collecting(turn)


def _announce_if_due(turn: Turn) -> None:
    """Begin a planned change if somebody shall come or go, or too few are here to go on."""
    state = turn.state
    ranked = state.in_phase("ranked")
    stays = [m for m in ranked if not m.leaving]
    newcomers = _admissible(turn)
    leaves = [m for m in ranked if m.leaving]
    if not (stays or newcomers):
        # The last holders of the state do not leave before somebody has taken it over, or before
        # there is just time enough left to save it.
        _back_up(turn, ranked)
        leaves = [m for m in leaves if m.save_at <= turn.now]
    elif len(stays) + len(newcomers) < state.min_workers:
        leaves = [m for m in leaves if not _has_time(m, turn.now)]
    is_short = len(ranked) + len(_newcomers(turn.state)) < state.min_workers
    if not (newcomers or leaves or is_short or state.paused or state.outcome):
        return
    if any(not m.formed for m in ranked):
        return  # one change at a time: the generation is still forming
    for why, due in (("join", newcomers), ("leave", leaves), ("resume", is_short)):
        if due:
            turn.add_why(why)
    names = tuple(m.trainer for m in ranked)
    turn.do(AnnounceChange(generation=state.generation, trainers=names))
    enter_phase(turn, "changing")


def _back_up(turn: Turn, ranked: list[Member]) -> None:
    """Have the state saved while training goes on: a machine may be taken before its time."""
    state = turn.state
    is_noticed = any(m.save_at < math.inf for m in ranked)
    if is_noticed and state.backed_up != state.generation:
        turn.set(backed_up=state.generation)
        turn.do(AskForCheckpoint(trainers=tuple(m.trainer for m in ranked)))


def _admissible(turn: Turn) -> list[Member]:
    """Return the warm newcomers, or nobody while it pays to wait for more of them."""
    warm = _newcomers(turn.state)
    if not warm or not turn.state.in_phase("starting"):
        return warm
    waited = turn.now - min(m.since for m in warm)
    return warm if waited >= ADMISSION_GRACE_S else []


def _newcomers(state: JobState) -> list[Member]:
    return [m for m in state.in_phase("warm") if not m.leaving and not m.killed_at]


def _settle(turn: Turn) -> None:
    """Nobody steps: form the next generation, wait, or end."""
    _settle_nan_loss(turn)
    publish_undone(turn)
    count_failed_form(turn)
    if turn.state.outcome:
        close_job(turn)
        if turn.state.outcome:
            return
    newcomers = _newcomers(turn.state)
    holders = _let_leavers_go(turn)
    state = turn.state
    members = holders + newcomers
    has_enough = not state.paused and len(members) >= state.min_workers
    is_saving = _save_before_it_is_gone(turn, has_enough=has_enough)
    if state.paused:
        enter_phase(turn, "gathering")
        turn.set_status("paused", state.pause_reason)
    elif not has_enough:
        enter_phase(turn, "gathering")
        if state.generation or not state.in_phase("starting"):
            turn.set_status("waiting", _why_too_few(state, len(members)))
    elif is_saving:
        enter_phase(turn, "gathering")
        turn.set_status("waiting", _why_it_saves(turn.state))
    elif turn.now < state.form_at:
        enter_phase(turn, "gathering")
        turn.set_status("waiting", why_retrying(state))
    elif state.phase != "gathering" or _is_worth_forming(turn):
        _form(turn, members)


def _settle_nan_loss(turn: Turn) -> None:
    """Fail or pause, once all ranks have told whose loss was not finite.

    A generation that has ended otherwise meanwhile is no excuse: the step would come out the same.
    """
    state = turn.state
    found = state.nan_loss
    if found is None:
        return
    # A rank may have seen the others leave before it had the loss: it undid the same step.
    undone = tuple(told for told in state.undone if told[0] != found.step)
    turn.set(nan_loss=None, undone=undone)
    words = found.to_words(state.saved_step)
    turn.publish(
        events.LossNotFinite,
        step=found.step,
        loss=found.loss,
        ranks=[rank for rank, _ in found.sources],
        workers=[worker for _, worker in found.sources],
        saved_step=max(0, state.saved_step),
    )
    if state.outcome:
        return
    if state.pauses_on_nan:
        asked = "%etrain resume tries the step again, %etrain stop ends the job"
        turn.set(paused=True, pause_reason=f"{words}. {asked}")
        return
    error = UserError(
        error=words,
        traceback="",
        workers=tuple(worker for _, worker in found.sources),
        step=found.step - 1,
        nan_loss=found,
    )
    turn.set(user_error=error, outcome="failed")


def _save_before_it_is_gone(turn: Turn, *, has_enough: bool) -> bool:
    """Have the newest state saved if all that hold it will go and nobody can take it over.

    It is done at once where nobody steps anyway, else when the last of them must not step on.

    Returns:
        Whether the next generation has to wait for that.
    """
    if saver_of(turn.state) is not None:
        return True  # what it is told meanwhile would wait in its queue, and the others with it
    holders = newest_holders(turn.state)
    if not holders or not all(m.leaving for m in holders):
        return False
    is_due = all(m.save_at <= turn.now for m in holders)
    if _has_successor(turn.state) or is_newest_durable(turn.state):
        return False
    is_known = any(m.save_at < math.inf for m in holders)
    if not is_due and (has_enough or not is_known):
        return False
    save_newest(turn)
    return True


def _why_it_saves(state: JobState) -> str:
    """Say why nobody steps although enough could, shortly before machines are taken."""
    going = ", ".join(m.worker for m in newest_holders(state))
    failure = f"; the last attempt failed ({state.saving.error})" if state.saving.error else ""
    return f"step {state.step} is saved before {going} is taken{failure}"


def _why_too_few(state: JobState, num_here: int) -> str:
    """Say how many workers are here, and what is known of the others."""
    known = [f"{m.worker} warms up" for m in state.in_phase("starting")]
    known += [f"{w} was lost: {cause}" for w, cause in state.lost if state.of_worker(w) is None]
    has_nobody = all(m.progress == s.NO_PROGRESS for m in state.in_phase("reported"))
    if state.step > 0 and has_nobody and state.saved_step >= state.step:
        known.append(f"the checkpoint of step {state.saved_step} has the state")
    missing = f" ({'; '.join(known)})" if known else ""
    return f"{num_here} of min {state.min_workers} workers are here{missing}"


def _let_leavers_go(turn: Turn) -> list[Member]:
    """Release those that shall leave, if the newest state stays here; return who is left."""
    holders = turn.state.in_phase("reported")
    newest = newest_holders(turn.state)
    if any(not m.leaving for m in newest):
        going = [m for m in holders if m.leaving]
        num_left = len(holders) - len(going) + len(_newcomers(turn.state))
        if num_left < turn.state.min_workers:
            going = [m for m in going if not _has_time(m, turn.now)]
    elif any(m.save_at > turn.now for m in newest) or not _has_successor(turn.state):
        # All that have it must go. Those whose machines are taken soonest go first; the last ones
        # go when it is durable.
        going = [m for m in holders if m.leaving and m.save_at <= turn.now]
    else:
        return holders  # they hand their state over in the next generation, and leave then
    stays = [m for m in holders if m not in going]
    is_kept = any(m in stays for m in newest) or is_newest_durable(turn.state)
    if not is_kept or saver_of(turn.state) in going:
        return holders
    for member in going:
        let_go(turn, member, member.leaving)
    if not any(m in stays for m in newest):
        # They are older than the checkpoint of those that went: it is what the job goes on from.
        for member in stays:
            turn.set_member(member, progress=s.NO_PROGRESS)
    return [turn.state.members[m.trainer] for m in stays]


def _has_time(member: Member, now: float) -> bool:
    """Whether a noticed machine is there for a while: it trains on where too few would be left."""
    return now < member.save_at < math.inf


def _has_successor(state: JobState) -> bool:
    """Whether somebody that need not go would be in the next generation, if it formed now."""
    members = [*state.in_phase("reported"), *_newcomers(state)]
    has_enough = not state.paused and len(members) >= state.min_workers
    return has_enough and any(not m.leaving for m in members)


def _still_missing(state: JobState, num_ranks: int) -> tuple[tuple[str, str], ...]:
    """Return the lost workers that nobody has replaced so far."""
    num_missing = max(0, state.max_workers - num_ranks)
    away = [pair for pair in state.lost if state.of_worker(pair[0]) is None]
    return tuple(away[-num_missing:]) if num_missing else ()


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
    backend = backend_for(turn, ranks)
    is_other_backend = backend != turn.state.used_backend
    # Where nobody was lost, the connections between the ranks were.
    told = turn.state.whys or ("start",)
    whys = ["broken" if why == "lost" and not turn.state.has_lost else why for why in told]
    turn.set(
        **{"generation": generation, "whys": (), "step": step, "world_size": len(ranks)},
        saving=Saving(),
        # Nobody goes back to what this generation has not come through; see ``lineage``.
        saved_steps=tuple(saved for saved in turn.state.saved_steps if saved <= step),
        **{"is_restoring": restore, "is_ready": False, "has_lost": False, "breaks": ()},
        **{"used_backend": backend, "first_step": step},
        lost=_still_missing(turn.state, len(ranks)),
        undone=(),
    )
    for member in ranks:
        turn.set_member(member, phase="ranked", formed=False)
    turn.do(
        FormGeneration(
            generation=generation,
            trainers=tuple(m.trainer for m in ranks),
            is_guarded=turn.state.form_at > 0.0 and turn.now < turn.state.form_at + GUARDED_S,
            behind=behind,
            step=step,
            restore=restore,
            backend=backend,
        )
    )
    turn.publish(
        events.GenerationFormed,
        why="+".join(whys),
        world_size=len(ranks),
        ranks=[m.worker for m in ranks],
        behind=list(behind),
        step=step,
        backend=backend,
        stall_s=turn.now - turn.state.last_step_at if turn.state.last_step_at else 0.0,
    )
    enter_phase(turn, "running")
    slow = why_gloo(turn.state)
    if slow and is_other_backend:
        turn.log(slow)
    turn.set_status("running", slow)
