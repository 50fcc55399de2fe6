"""Form a generation: rank its members, and announce it."""

from __future__ import annotations

from collections.abc import Sequence

from etrain_jupyter.log import events
from etrain_jupyter.rules.membership import stimuli as s
from etrain_jupyter.rules.membership.commands import FormGeneration
from etrain_jupyter.rules.membership.connecting import backend_for, why_gloo
from etrain_jupyter.rules.membership.members import Member, replace
from etrain_jupyter.rules.membership.membership import GenerationState, JobState
from etrain_jupyter.rules.membership.turn import Turn


def form_generation(turn: Turn, members: Sequence[Member], *, saves: bool = False) -> None:
    """Form the next generation from these members.

    Args:
        turn: The job, no member of which is stepping.
        members: Members that are warm or have reported.
        saves: True if the ranks only save the state, of which each has a part, and then leave.
    """
    # Newest state first, so that rank 0 holds it; among equals, the oldest trainer first:
    #
    #   rank        0          1          2          3
    #   progress  (7, 1)     (7, 1)     (6, 1)     none       step 7, behind = (2, 3)
    #   progress   none       none       none                 restore, behind = (1, 2)
    state = turn.state
    ranks = sorted(members, key=lambda m: (-m.progress[0], -m.progress[1], m.order))
    newest = ranks[0].progress
    restore = newest == s.NO_PROGRESS and state.generation > 0
    behind = tuple(rank for rank, m in enumerate(ranks) if rank and m.progress != newest)
    if newest == s.NO_PROGRESS:  # the initial weights may differ, and rank 0 restores for all
        behind = tuple(range(1, len(ranks)))
    previous = state.current
    current = GenerationState(
        number=previous.number + 1,
        world_size=len(ranks),
        first_step=max(0, state.saved_step if restore else newest[0]),
        backend=backend_for(turn, ranks),
        is_restoring=restore,
        why_restored=_why_restored(state) if restore else "",
        is_saving=saves,
        trainers=tuple(m.trainer for m in ranks),
    )
    turn.begin_generation(current)
    turn.update_faults(replace(state.faults, lost=_still_missing(turn.state, len(ranks))))
    for member in ranks:
        turn.put(replace(member, phase="ranked", since=turn.now, formed=False))
    turn.do(
        FormGeneration(
            generation=current.number,
            trainers=tuple(m.trainer for m in ranks),
            behind=behind,
            step=current.first_step,
            restore=restore,
            backend=current.backend,
            saves=saves,
        )
    )
    _publish_formed(turn, ranks, why="save" if saves else "+".join(_whys(state)), behind=behind)
    turn.enter_phase("running")
    slow = why_gloo(turn.state)
    if slow and current.backend != previous.backend:
        turn.log(slow)
    turn.set_status("running", slow)


def _publish_formed(
    turn: Turn, ranks: Sequence[Member], *, why: str, behind: Sequence[int]
) -> None:
    last_step_at = turn.state.timings.last_step_at
    turn.publish(
        events.GenerationFormed,
        why=why,
        world_size=len(ranks),
        ranks=[m.worker for m in ranks],
        behind=list(behind),
        step=turn.state.current.first_step,
        backend=turn.state.current.backend,
        stall_s=turn.now - last_step_at if last_step_at else 0.0,
    )


def _whys(state: JobState) -> list[str]:
    # If no worker was lost, the connections between the ranks broke.
    lost = "lost" if state.current.has_lost else "broken"
    # Without a reason, the change was cancelled before the ranks had left: a pause was resumed, or
    # a worker that was scaled away was assigned again.
    whys = state.next_whys or ("resume",)
    return [lost if why == "lost" else why for why in whys]


def _still_missing(state: JobState, num_ranks: int) -> tuple[tuple[str, str], ...]:
    # A lost worker may return under its own name or be replaced by another worker. If the job has
    # its maximum number of ranks, no worker is missing.
    num_missing = max(0, state.max_workers - num_ranks)
    away = [pair for pair in state.faults.lost if state.of_worker(pair[0]) is None]
    return tuple(away[-num_missing:]) if num_missing else ()


def _why_restored(state: JobState) -> str:
    # The ranks compared what they have, and found that some shard has no holder.
    errors = [found.error for found in state.current.breaks if found.is_excused and found.error]
    return errors[0] if state.is_sharded and errors else ""
