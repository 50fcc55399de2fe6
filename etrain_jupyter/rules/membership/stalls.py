"""Who holds the others up: told from the ranks' progress, as their supervisors read it.

All ranks start the same collectives in the same order. So when nobody moves any more, the rank that
has started the fewest is the one that the others wait for. A process that is stopped, or of which
one thread keeps the interpreter to itself, may have started as many as the others: that one is told
by its pulse. Only who is to blame is killed. Where that cannot be told the connections may be: the
generation is formed anew, and who then does not even report has told on itself.
"""

from __future__ import annotations

from dataclasses import replace

from etrain_jupyter.rules.membership import stimuli as s
from etrain_jupyter.rules.membership.commands import DumpStacks, KillTrainer
from etrain_jupyter.rules.membership.losses import count_step_fault, take_trainer_lost
from etrain_jupyter.rules.membership.membership import JobState, LifeSigns, Member
from etrain_jupyter.rules.membership.saving import saver_of
from etrain_jupyter.rules.membership.turn import Turn, begin_collecting

STEPS_PER_LIMIT = 10
"""A rank may stand still as long as so many ordinary steps take."""

WARM_UPS_PER_LIMIT = 3
"""Before the first step: as long as so many warm-ups took, each of which had a whole pass in it."""

RESTORE_PATIENCE = 10
WARM_UP_PATIENCE = 4
"""How many times longer than in a step nobody worries: reading a checkpoint or building a workload
may take long, and says nothing meanwhile."""

FROZEN_S = 3.0
"""A living process pulses four times a second; one that did not for so long is frozen."""

NEWS_S = 5.0
"""What a trainer does is unknown if its supervisor has told nothing for so long."""

KILL_PATIENCE_S = 10.0
"""A trainer that lives so long after it was killed (stuck in the kernel) is given up."""


def take_progress(turn: Turn, seen: s.ProgressSeen) -> None:
    """Remember what a trainer's page said, and when it last said something new."""
    member = turn.state.members.get(seen.trainer)
    if member is None:
        return
    old = member.signs
    has_moved = old is None or _position(old.seen) != _position(seen)
    moved_at = turn.now if old is None or has_moved else old.moved_at
    signs = LifeSigns(seen=seen, heard_at=turn.now, moved_at=moved_at)
    is_warned_of = member.is_warned_of and not has_moved
    turn.put(replace(member, signs=signs, is_warned_of=is_warned_of))


def _position(seen: s.ProgressSeen) -> tuple[int, int, int]:
    return seen.generation, seen.collectives, seen.beats


def check_stalls(turn: Turn) -> None:
    """Find who stands still, and do something about it. Called with each tick."""
    _give_up_the_unkillable(turn)
    _check_newcomers(turn)
    phase = turn.state.phase
    if phase in ("running", "changing"):
        _check_generation(turn)
    elif phase == "collecting":
        _check_reports(turn)
    elif phase in ("closing", "gathering"):
        _check_saver(turn)


def excuse_sleep(turn: Turn, asleep_s: float) -> None:
    """Do not count the time in which the coordinator itself stood still."""
    for member in list(turn.state.members.values()):
        signs = member.signs
        if signs is not None:
            heard_at, moved_at = signs.heard_at + asleep_s, signs.moved_at + asleep_s
            signs = replace(signs, heard_at=heard_at, moved_at=moved_at)
        killed_at = member.killed_at and member.killed_at + asleep_s
        since = member.since + asleep_s
        turn.put(replace(member, since=since, signs=signs, killed_at=killed_at))
    saving = turn.state.saving
    if saving.since:
        turn.update_saving(replace(saving, since=saving.since + asleep_s))
    turn.excuse_sleep(asleep_s)


# --- the ranks of a generation ---


def _check_generation(turn: Turn) -> None:
    state = turn.state
    ranked = state.in_phase("ranked")
    quiet_s = turn.now - _moved_at(state, ranked)
    if not ranked or quiet_s <= patience_s(state) or not _are_heard(turn, ranked):
        return
    suspects = find_suspects(state, now=turn.now, quiet_s=quiet_s)
    for member in suspects:
        num_waiting = state.current.world_size - len(suspects)
        _kill(turn, member, _blame(turn, member, quiet_s, num_waiting))
    if suspects:
        return
    if state.current.world_size == 1:
        _warn(turn, ranked[0], f"no progress for {quiet_s:.0f} s at step {state.step + 1}")
    else:
        _form_anew(turn, quiet_s)


def patience_s(state: JobState) -> float:
    """Return how long the ranks of a generation may all stand still."""
    slow_s = STEPS_PER_LIMIT * state.timings.step_s or WARM_UPS_PER_LIMIT * state.timings.warm_s
    limit_s = max(state.hang_s, slow_s)
    if state.current.is_restoring and not all(m.formed for m in state.in_phase("ranked")):
        limit_s *= RESTORE_PATIENCE
    return limit_s


def find_suspects(state: JobState, *, now: float, quiet_s: float) -> list[Member]:
    """Return the ranks that the others wait for; nobody if it cannot be told.

    Those that have left the generation already are ahead of all that have not. Two that stand at
    the same place, behind others, may well be waiting for each other. Alone, a rank is suspected
    only if it is frozen.

    Args:
        state: The job, with the life signs of its ranks.
        now: When it is so.
        quiet_s: How long nobody has moved.
    """
    ranked = state.in_phase("ranked")
    frozen = [m for m in ranked if _is_frozen(m, now, quiet_s, state.hang_s)]
    if frozen:
        return frozen
    places = {m.trainer: _place(state, m) for m in ranked}
    behind = [m for m in ranked if places[m.trainer] == min(places.values())]
    return behind if len(behind) == 1 and state.current.world_size > 1 else []


def _place(state: JobState, member: Member) -> tuple[bool, int]:
    seen = member.signs.seen if member.signs else None
    if seen is None or seen.generation < state.generation:
        return False, 0  # it has not even begun
    return True, seen.collectives


def _is_frozen(member: Member, now: float, quiet_s: float, hang_s: float) -> bool:
    """Whether none of its Python code has run since nobody moves, or for very long.

    A busy machine delays a pulse, but never by so much; a rank may freeze in the midst of a step.
    """
    if member.signs is None:
        return False
    age_s = member.signs.seen.alive_age_s
    frozen_s = age_s + now - member.signs.heard_at
    return age_s > min(FROZEN_S, hang_s / 2) and frozen_s >= min(0.9 * quiet_s, hang_s)


def _moved_at(state: JobState, ranked: list[Member]) -> float:
    """Return when anybody last made any progress."""
    moves = [m.signs.moved_at for m in ranked if m.signs]
    reports = [m.since for m in state.in_phase("reported")]
    return max([state.since, *moves, *reports])


def _are_heard(turn: Turn, members: list[Member]) -> bool:
    return all(m.signs and turn.now - m.signs.heard_at <= NEWS_S for m in members)


def _form_anew(turn: Turn, quiet_s: float) -> None:
    """It cannot be told who is to blame, so the connections between them are."""
    state = turn.state
    num_ranks = len(state.in_phase("ranked"))
    what = f"{num_ranks} ranks stood still for {quiet_s:.0f} s with none clearly to blame"
    turn.log(f"{what} at step {state.step + 1}; generation {state.generation} is formed anew")
    if state.current.is_ready:  # else not even the step had begun: that is the network's fault
        count_step_fault(turn, error=what)
    begin_collecting(turn, "stalled")


# --- between generations ---


def _check_reports(turn: Turn) -> None:
    """A generation was aborted: whoever neither reports nor moves holds up the next one."""
    state = turn.state
    limit_s = max(state.hang_s, STEPS_PER_LIMIT * state.timings.step_s)
    for member in state.in_phase("ranked"):
        quiet_s = turn.now - _moved_at(replace(state, members={}), [member])
        if quiet_s > limit_s:
            is_frozen = _is_frozen(member, turn.now, quiet_s, state.hang_s)
            how = f"{_frozen_words(member)}, " if is_frozen else ""
            why = f"{how}no report {quiet_s:.0f} s after its generation was aborted"
            _kill(turn, member, why)


def _check_saver(turn: Turn) -> None:
    """A checkpoint is waited for: whoever writes it must move, but may take long."""
    state = turn.state
    saver = saver_of(state)
    _check_frozen(turn, [saver] if saver else [], state.hang_s)
    if saver is None:
        return
    quiet_s = turn.now - _moved_at(replace(state, members={}, since=state.saving.since), [saver])
    if quiet_s > RESTORE_PATIENCE * state.hang_s and _are_heard(turn, [saver]):
        _kill(turn, saver, f"no progress for {quiet_s:.0f} s while it saved step {state.step}")


def _check_newcomers(turn: Turn) -> None:
    """Nobody waits for those that warm up: only what can never wake up by itself is killed."""
    state = turn.state
    patience = WARM_UP_PATIENCE * state.hang_s
    _check_frozen(turn, state.in_phase("starting"), patience)
    _check_frozen(turn, state.in_phase("warm"), state.hang_s)
    for member in turn.state.in_phase("starting"):
        quiet_s = turn.now - max(member.since, member.signs.moved_at if member.signs else 0.0)
        if quiet_s > patience:
            _warn(turn, member, f"still warming up after {turn.now - member.since:.0f} s")


def _check_frozen(turn: Turn, members: list[Member], limit_s: float) -> None:
    for member in members:
        signs = member.signs
        if signs is not None and signs.seen.alive_age_s > limit_s:
            how = _frozen_words(member)
            _kill(turn, member, f"{how} for {signs.seen.alive_age_s:.0f} s")


def _give_up_the_unkillable(turn: Turn) -> None:
    for member in list(turn.state.members.values()):
        if member.killed_at and turn.now - member.killed_at > KILL_PATIENCE_S:
            take_trainer_lost(turn, s.TrainerLost(trainer=member.trainer, cause=member.killed_why))


# --- what is done about it ---


def _kill(turn: Turn, member: Member, why: str) -> None:
    if member.killed_at:
        return
    turn.put(replace(member, killed_at=turn.now, killed_why=why))
    turn.do(KillTrainer(trainer=member.trainer, why=why, stacks=True))


def _warn(turn: Turn, member: Member, what: str) -> None:
    """Nobody waits for it, so that it may take its time; but somebody may want to know."""
    if member.is_warned_of or member.signs is None or member.killed_at:
        return
    turn.put(replace(member, is_warned_of=True))
    turn.log(f"{member.worker}: {what}; this is what it is doing", worker=member.worker)
    turn.do(DumpStacks(trainer=member.trainer))


def _blame(turn: Turn, member: Member, quiet_s: float, num_waiting: int) -> str:
    state = turn.state
    words = [f"no progress for {quiet_s:.0f} s at step {state.step + 1}"]
    phase = member.signs.seen.phase if member.signs else ""
    if phase in ("forming", "syncing", "evaluating", "saving"):
        words[0] += f" ({phase})"
    if _is_frozen(member, turn.now, quiet_s, state.hang_s):
        words.insert(0, f"{_frozen_words(member)},")
    if num_waiting:
        words.append(f"while {num_waiting} {'rank' if num_waiting == 1 else 'ranks'} waited")
    return " ".join(words)


def _frozen_words(member: Member) -> str:
    process = member.signs.seen.process if member.signs else ""
    if process == "stopped":
        return "stopped (SIGSTOP)"
    if process in ("", "running", "sleeping"):
        return "held the GIL"
    return f"frozen ({process})"
