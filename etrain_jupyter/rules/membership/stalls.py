"""Find the straggler from the ranks' progress counters, which their supervisors report.

All ranks start the same collectives in the same order. If no rank makes progress, the ranks are
therefore waiting for the one that has started the fewest collectives. A process that is stopped, or
in which one thread holds the GIL, may have started as many as the others, but it is recognized by
the age of its pulse. Only the straggler is killed. Without a clear straggler, the connections may
be the cause, so the generation is aborted and the next one forms. If a rank does hang, it then
fails to report.

========================================  ========================================================
no progress for ``patience_s`` and ...    action
========================================  ========================================================
some ranks are frozen                     kill them
exactly one rank is behind the others     kill it
several are behind, or none is            abort the generation (``stalled``)
the job has one rank, which is not frozen warn, with its stacks: a step may take long
========================================  ========================================================
"""

from __future__ import annotations

from etrain_jupyter.rules.membership import stimuli as s
from etrain_jupyter.rules.membership.commands import DumpStacks, KillTrainer
from etrain_jupyter.rules.membership.losses import count_step_fault, take_trainer_lost
from etrain_jupyter.rules.membership.members import Member, ProgressReading, replace
from etrain_jupyter.rules.membership.membership import JobState
from etrain_jupyter.rules.membership.saving import saver_of
from etrain_jupyter.rules.membership.turn import Turn, begin_collecting

STEPS_PER_LIMIT = 10
"""Maximum time without progress, in multiples of the duration of a step."""

WARM_UPS_PER_LIMIT = 3
"""Maximum time without progress before the first step, in multiples of a warm-up's duration.

A warm-up includes a forward and backward pass.
"""

RESTORE_PATIENCE = 10
WARM_UP_PATIENCE = 4
"""Factors applied to the time allowed without progress, because reading a checkpoint or building
the model may take long without reporting progress."""

FROZEN_S = 3.0
"""A running process pulses four times a second. It is frozen after this many seconds without
one."""

MAX_REPORT_AGE_S = 8.0
"""If a trainer's last report is older than this many seconds, its state is unknown. Twice the
longest heartbeat interval; see ``silence``."""

KILL_PATIENCE_S = 10.0
"""A trainer that still exists this many seconds after the kill (stuck in the kernel) is declared
lost."""


def take_progress(turn: Turn, seen: s.ProgressSeen) -> None:
    """Record the newest reading of a trainer's progress, and when its counters last changed."""
    member = turn.state.members.get(seen.trainer)
    if member is None:
        return
    # Both times are on the coordinator's clock, which is never compared with the trainer's.
    old = member.signs
    has_moved = old is None or _position(old.seen) != _position(seen)
    moved_at = turn.now if old is None or has_moved else old.moved_at
    signs = ProgressReading(seen=seen, last_seen=turn.now, moved_at=moved_at)
    is_warned_of = member.is_warned_of and not has_moved
    turn.put(replace(member, signs=signs, is_warned_of=is_warned_of))


def _position(seen: s.ProgressSeen) -> tuple[int, int, int]:
    return seen.generation, seen.collectives, seen.beats


def check_stalls(turn: Turn) -> None:
    """Find the members that make no progress, and act on them. Called with each tick."""
    _declare_unkillable_lost(turn)
    _check_newcomers(turn)
    phase = turn.state.phase
    if phase in ("running", "changing"):
        _check_generation(turn)
    elif phase == "collecting":
        _check_reports(turn)
    elif phase in ("closing", "gathering"):
        _check_saver(turn)


def excuse_sleep(turn: Turn, asleep_s: float) -> None:
    """Do not count the time during which the coordinator itself was suspended."""
    # Shift all times from which timeouts are measured.
    for member in list(turn.state.members.values()):
        signs = member.signs
        if signs is not None:
            last_seen, moved_at = signs.last_seen + asleep_s, signs.moved_at + asleep_s
            signs = replace(signs, last_seen=last_seen, moved_at=moved_at)
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
    # A report counts as progress of the generation, because there is one rank fewer to wait for.
    since = max([state.since, *(m.since for m in state.in_phase("reported"))])
    quiet_s = turn.now - _moved_at(since, ranked)
    # If a rank's reports stop, its supervisor is the problem: ``silence`` evicts that worker.
    if not ranked or quiet_s <= patience_s(state) or not _have_fresh_reports(turn, ranked):
        return
    # last progress of any rank                    now
    #  |----------------- quiet_s ------------------|
    #  |-- patience_s: max(hang_s, 10 steps) --|         the straggler is killed; its exit aborts
    #                                                    the generation (``take_trainer_lost``)
    suspects = find_suspects(state, now=turn.now, quiet_s=quiet_s)
    for member in suspects:
        num_waiting = state.current.world_size - len(suspects)
        _kill(turn, member, _describe_stall(turn, member, quiet_s, num_waiting))
    if suspects:
        return
    if state.current.world_size == 1:
        # It waits for no other rank, so it is busy: only the user can tell whether that is normal.
        _warn(turn, ranked[0], f"no progress for {quiet_s:.0f} s at step {state.step + 1}")
    else:
        _restart_generation(turn, quiet_s)


def patience_s(state: JobState) -> float:
    """Return the maximum number of seconds that a generation may go without progress."""
    # Before the first step, the duration of a step is unknown (0.0), but a warm-up includes one.
    slow_s = STEPS_PER_LIMIT * state.timings.step_s or WARM_UPS_PER_LIMIT * state.timings.warm_s
    limit_s = max(state.hang_s, slow_s)
    # The ranks wait for the store.
    if state.current.is_saving:
        return limit_s * RESTORE_PATIENCE
    # The other ranks wait while rank 0 reads the checkpoint.
    if state.current.is_restoring and not all(m.formed for m in state.in_phase("ranked")):
        limit_s *= RESTORE_PATIENCE
    return limit_s


def find_suspects(state: JobState, *, now: float, quiet_s: float) -> list[Member]:
    """Return the ranks that the others are waiting for; empty if unclear.

    Ranks that have already left the generation are ahead of all that have not. Two ranks at the
    same place, behind the others, may be waiting for each other. A single rank is suspected only if
    it is frozen.

    Args:
        state: The job, with the newest progress of its ranks.
        now: The current time.
        quiet_s: Seconds for which no rank has made progress.
    """
    ranked = state.in_phase("ranked")
    # Check for frozen ranks first, as they may have started as many collectives as the waiting
    # ranks.
    frozen = [m for m in ranked if _is_frozen(m, now, quiet_s, state.hang_s)]
    if frozen:
        return frozen
    # collectives started    41   41   40   41     the third rank is behind: kill it
    #                        41   40   40   41     unclear: abort the generation
    places = {m.trainer: _place(state, m) for m in ranked}
    behind = [m for m in ranked if places[m.trainer] == min(places.values())]
    return behind if len(behind) == 1 and state.current.world_size > 1 else []


def _place(state: JobState, member: Member) -> tuple[bool, int]:
    seen = member.signs.seen if member.signs else None
    if seen is None or seen.generation < state.generation:
        return False, 0  # it has not begun to form
    return True, seen.collectives


def _is_frozen(member: Member, now: float, quiet_s: float, hang_s: float) -> bool:
    # A rank is frozen if its process has not run Python code since the ranks last made progress, or
    # for ``hang_s``. A busy machine delays a pulse, but not by that much. The factor 0.9 allows for
    # a rank that froze in the middle of a step, shortly after the last progress.
    if member.signs is None:
        return False
    age_s = member.signs.seen.alive_age_s  # when its supervisor read the page
    frozen_s = age_s + now - member.signs.last_seen
    return age_s > min(FROZEN_S, hang_s / 2) and frozen_s >= min(0.9 * quiet_s, hang_s)


def _moved_at(since: float, members: list[Member]) -> float:
    return max([since, *(m.signs.moved_at for m in members if m.signs)])


def _have_fresh_reports(turn: Turn, members: list[Member]) -> bool:
    return all(m.signs and turn.now - m.signs.last_seen <= MAX_REPORT_AGE_S for m in members)


def _restart_generation(turn: Turn, quiet_s: float) -> None:
    # The connections may be the cause, and a new generation connects again. If a rank does hang, it
    # does not report, and ``_check_reports`` kills it.
    state = turn.state
    num_ranks = len(state.in_phase("ranked"))
    what = f"{num_ranks} ranks made no progress for {quiet_s:.0f} s, without a clear straggler"
    turn.log(f"{what}, at step {state.step + 1}; aborting generation {state.generation}")
    if state.current.is_ready:  # otherwise no step had begun, so the network is the likely cause
        count_step_fault(turn, error=what)
    begin_collecting(turn, "stalled")


# --- between generations ---


def _check_reports(turn: Turn) -> None:
    # After an abort, no rank waits for another. A rank may still be running the notebook's code,
    # but for no longer than a step takes.
    state = turn.state
    limit_s = max(state.hang_s, STEPS_PER_LIMIT * state.timings.step_s)
    for member in state.in_phase("ranked"):
        # Only its own progress counts, not the reports of the others.
        quiet_s = turn.now - _moved_at(state.since, [member])
        if quiet_s > limit_s:
            is_frozen = _is_frozen(member, turn.now, quiet_s, state.hang_s)
            how = f"{_describe_freeze(member)}, " if is_frozen else ""
            why = f"{how}no report {quiet_s:.0f} s after its generation was aborted"
            _kill(turn, member, why)


def _check_saver(turn: Turn) -> None:
    # A slow store is not a hang, so allow a writer that is alive more time.
    state = turn.state
    saver = saver_of(state)
    _check_frozen(turn, [saver] if saver else [], state.hang_s)
    if saver is None:
        return
    quiet_s = turn.now - _moved_at(state.saving.since, [saver])
    if quiet_s > RESTORE_PATIENCE * state.hang_s and _have_fresh_reports(turn, [saver]):
        _kill(turn, saver, f"no progress for {quiet_s:.0f} s while saving step {state.step}")


def _check_newcomers(turn: Turn) -> None:
    # No rank waits for newcomers, so slow ones are only logged. Frozen ones are killed.
    state = turn.state
    patience = WARM_UP_PATIENCE * state.hang_s  # one long call may build the model or the data
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
            how = _describe_freeze(member)
            _kill(turn, member, f"{how} for {signs.seen.alive_age_s:.0f} s")


def _declare_unkillable_lost(turn: Turn) -> None:
    # A process that is blocked in the kernel, for example reading from a dead network file system,
    # does not react to SIGKILL. The job does not wait for it.
    for member in list(turn.state.members.values()):
        if member.killed_at and turn.now - member.killed_at > KILL_PATIENCE_S:
            take_trainer_lost(turn, s.TrainerLost(trainer=member.trainer, cause=member.killed_why))


# --- actions ---


def _kill(turn: Turn, member: Member, why: str) -> None:
    if member.killed_at:
        return  # already killed; ``TrainerLost`` will report its exit
    turn.put(replace(member, killed_at=turn.now, killed_why=why))
    turn.do(KillTrainer(trainer=member.trainer, why=why, stacks=True))


def _warn(turn: Turn, member: Member, what: str) -> None:
    # Warn only once until it makes progress again, because the stacks are long.
    if member.is_warned_of or member.signs is None or member.killed_at:
        return
    turn.put(replace(member, is_warned_of=True))
    turn.log(f"{member.worker}: {what}; its stacks follow", worker=member.worker)
    turn.do(DumpStacks(trainer=member.trainer))


def _describe_stall(turn: Turn, member: Member, quiet_s: float, num_waiting: int) -> str:
    state = turn.state
    parts = [f"no progress for {quiet_s:.0f} s at step {state.step + 1}"]
    phase = member.signs.seen.phase if member.signs else ""
    if phase in ("forming", "syncing", "evaluating", "saving"):
        parts[0] += f" ({phase})"
    if _is_frozen(member, turn.now, quiet_s, state.hang_s):
        parts.insert(0, f"{_describe_freeze(member)},")
    if num_waiting:
        parts.append(f"while {num_waiting} {'rank' if num_waiting == 1 else 'ranks'} waited")
    return " ".join(parts)


def _describe_freeze(member: Member) -> str:
    process = member.signs.seen.process if member.signs else ""
    if process == "stopped":
        return "stopped (SIGSTOP)"
    # The process may be running, but not its pulse thread, because another thread holds the GIL.
    if process in ("", "running", "sleeping"):
        return "held the GIL"
    return f"frozen ({process})"
