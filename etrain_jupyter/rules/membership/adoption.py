"""A scheduler has died and another one takes over: what becomes of the trainers that live.

If every rank of the newest generation is there and has stepped in it, the generation goes on: its
ranks have trained meanwhile and need nothing. Else it is ended, as if a rank had been lost, and the
next one takes the newest state that anybody holds.
"""

from __future__ import annotations

from etrain_jupyter.log import events
from etrain_jupyter.rules.membership import stimuli as s
from etrain_jupyter.rules.membership.losses import KEEP_LOST
from etrain_jupyter.rules.membership.membership import JobState, Member, MemberPhase
from etrain_jupyter.rules.membership.turn import Turn, begin_collecting, enter_phase

RESTARTED = "restart"
"""Why a generation forms whose predecessor no scheduler knew well enough."""

LOST_MEANWHILE = "lost while the scheduler was away"


def take_found(turn: Turn, stimulus: s.TrainersFound) -> None:
    """Adopt the trainers that are there, and do without the others."""
    for found in stimulus.found:
        turn.state = turn.state.with_member(_member_of(turn, found, stimulus.is_ready))
    turn.set(assigned=tuple(found.worker for found in stimulus.found))
    turn.set(warm_s=max([turn.state.warm_s, *(found.warm_s for found in stimulus.found)]))
    for worker in stimulus.lost:
        turn.set(lost=(*turn.state.lost, (worker, LOST_MEANWHILE))[-KEEP_LOST:])
        turn.publish(events.WorkerLost, worker=worker, cause=LOST_MEANWHILE, detected_s=0.0)
    ranked = turn.state.in_phase("ranked")
    if not ranked:
        enter_phase(turn, "gathering")
        return
    turn.set(world_size=stimulus.world_size, is_ready=stimulus.is_ready, whys=())
    turn.set(used_backend=stimulus.backend, first_step=turn.state.step, ready_at=turn.now)
    enter_phase(turn, "running")
    if len(ranked) < stimulus.world_size:
        turn.set(has_lost=bool(stimulus.lost))
        begin_collecting(turn, "lost" if stimulus.lost else RESTARTED)
    elif not stimulus.is_ready:
        begin_collecting(turn, RESTARTED)


def is_of_job(found: s.SurvivorFound, state: JobState) -> bool:
    """Whether a trainer may be adopted: one that is still inside an older generation was given up.

    >>> old = s.Found(trainer="j/w1/1", worker="w1", generation=2, is_inside=True)
    >>> is_of_job(old, JobState(job_id="j", min_workers=1, max_workers=1, generation=3))
    False
    """
    return not found.is_inside or found.generation == state.generation


def _member_of(turn: Turn, found: s.SurvivorFound, is_ready: bool) -> Member:
    phase = _phase_of(found)
    has_stepped = phase == "ranked" and is_ready
    return Member(
        trainer=found.trainer,
        worker=found.worker,
        order=int(found.trainer.rpartition("/")[2]),
        device=found.device,
        gpu=found.gpu,
        phase=phase,
        since=turn.now,
        progress=found.progress,
        formed=has_stepped,
        steps_since=turn.now if has_stepped else 0.0,
    )


def _phase_of(found: s.SurvivorFound) -> MemberPhase:
    if found.is_inside:
        return "ranked"
    if found.progress != s.NO_PROGRESS:
        return "reported"
    return "warm" if found.is_warm else "starting"
