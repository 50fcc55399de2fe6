"""What follows from a state: changes begin, generations form, the job waits or ends."""

from __future__ import annotations

import dataclasses

from etrain_jupyter.elastic import stimuli as s
from etrain_jupyter.elastic.commands import (
    AnnounceChange,
    FormGeneration,
)
from etrain_jupyter.elastic.health import wait_after
from etrain_jupyter.elastic.membership import JobState, Member
from etrain_jupyter.elastic.turn import (
    Turn,
    begin_collecting,
    close_job,
    enter_phase,
    let_go,
    publish_undone,
)
from etrain_jupyter.events import types as events

ADMISSION_GRACE_S = 1.0
"""How long warm newcomers wait for others that still warm up: one change admits them together."""

MAX_FAULTS = 3
"""Faults in a row at one place (before the first step, or in one step) that count as the user's."""


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
    enter_phase(turn, "changing")


def _admissible(turn: Turn) -> list[Member]:
    """Return the warm newcomers, or nobody while it pays to wait for more of them."""
    warm = _newcomers(turn)
    if not warm or not turn.state.in_phase("starting"):
        return warm
    waited = turn.now - min(m.since for m in warm)
    return warm if waited >= ADMISSION_GRACE_S else []


def _newcomers(turn: Turn) -> list[Member]:
    return [m for m in turn.state.in_phase("warm") if not m.leaving and not m.killed_at]


def _settle(turn: Turn) -> None:
    """Nobody steps: form the next generation, wait, or end."""
    publish_undone(turn)
    _count_failed_form(turn)
    if turn.state.outcome:
        close_job(turn)
        if turn.state.outcome:
            return
    state = turn.state
    holders = _let_leavers_go(turn)
    newcomers = _newcomers(turn)
    if state.paused:
        enter_phase(turn, "gathering")
        turn.set_status("paused")
        return
    members = holders + newcomers
    if len(members) < state.min_workers:
        enter_phase(turn, "gathering")
        if state.generation or not state.in_phase("starting"):
            turn.set_status("waiting", _why_too_few(state, len(members)))
    elif turn.now < state.form_at:
        enter_phase(turn, "gathering")
        text = f"generation {state.generation} did not form although no worker was lost"
        turn.set_status("waiting", f"{text}; it is tried again")
    elif state.phase != "gathering" or _is_worth_forming(turn):
        _form(turn, members)


def _count_failed_form(turn: Turn) -> None:
    """Let a generation wait that keeps breaking before its first step: it may be the network."""
    state = turn.state
    if state.phase != "collecting" or state.is_ready or state.has_lost:
        return
    num_failed = state.failed_forms + 1
    turn.set(failed_forms=num_failed, form_at=turn.now + wait_after(num_failed - 1))


def _why_too_few(state: JobState, num_here: int) -> str:
    """Say how many workers are here, and what is known of the others."""
    known = [f"{m.worker} warms up" for m in state.in_phase("starting")]
    known += [f"{w} was lost: {cause}" for w, cause in state.lost if state.of_worker(w) is None]
    missing = f" ({'; '.join(known)})" if known else ""
    return f"{num_here} of min {state.min_workers} workers are here{missing}"


def _let_leavers_go(turn: Turn) -> list[Member]:
    """Release those that shall leave, if the newest state stays here; return who is left."""
    holders = turn.state.in_phase("reported")
    stays = [m for m in holders if not m.leaving]
    newest = max((m.progress for m in holders), default=s.NO_PROGRESS)
    if not any(m.progress == newest for m in stays):
        return holders  # they hand their state over in the next generation, and leave then
    for member in holders:
        if member.leaving:
            let_go(turn, member, member.leaving)
    return stays


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
    # Where nobody was lost, the connections between the ranks were.
    told = turn.state.whys or ("start",)
    whys = ["broken" if why == "lost" and not turn.state.has_lost else why for why in told]
    turn.set(
        **{"generation": generation, "whys": (), "step": step, "world_size": len(ranks)},
        **{"is_restoring": restore, "is_ready": False, "has_lost": False},
        lost=_still_missing(turn.state, len(ranks)),
        undone=(),
    )
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
        behind=list(behind),
        step=step,
        stall_s=turn.now - turn.state.last_step_at if turn.state.last_step_at else 0.0,
    )
    enter_phase(turn, "running")
    turn.set_status("running")
