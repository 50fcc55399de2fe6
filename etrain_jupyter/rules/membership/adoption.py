"""Adopt the trainers that have outlived their scheduler.

============================================================  ====================================
trainers of the newest generation                             what happens
============================================================  ====================================
all are present, and have stepped in it                       it continues: its ranks are training
                                                              and need no command
all are present, but it was still forming                     it is aborted (``restart``)
some are missing                                              it is aborted (``lost``; ``restart``
                                                              if no worker was lost)
none is still in it                                           the job gathers workers
============================================================  ====================================

After an abort the next generation starts from the newest state that any trainer holds.
"""

from __future__ import annotations

from etrain_jupyter.log import events
from etrain_jupyter.rules.membership import stimuli as s
from etrain_jupyter.rules.membership.members import Member, MemberPhase, replace
from etrain_jupyter.rules.membership.membership import JobState
from etrain_jupyter.rules.membership.turn import Turn, begin_collecting

LOST_MEANWHILE = "lost while the scheduler was down"


def take_found(turn: Turn, stimulus: s.TrainersFound) -> None:
    """Adopt the trainers that were found, and count the other workers as lost."""
    # Trainers keep training while the scheduler is down:
    #
    #   scheduler 1   forms generation 4   dies
    #   trainers      ------ step 40 ------------ 41 -- 42 -- 43 -----------
    #   scheduler 2                               starts   hellos   TrainersFound, here
    #
    # A rank that has left generation 4 by then is still listed as a member: its report follows.
    for found in stimulus.found:
        turn.put(_member_of(turn, found, stimulus.is_ready))
    turn.assign(found.worker for found in stimulus.found)
    timings = turn.state.timings
    warm_s = max([timings.warm_s, *(found.warm_s for found in stimulus.found)])
    turn.update_timings(replace(timings, warm_s=warm_s))
    for worker in stimulus.lost:
        turn.update_faults(turn.state.faults.with_lost(worker, LOST_MEANWHILE))
        turn.publish(events.WorkerLost, worker=worker, cause=LOST_MEANWHILE, detected_s=0.0)
    ranked = turn.state.in_phase("ranked")
    if not ranked:
        turn.enter_phase("gathering")
        return
    is_short = len(ranked) < stimulus.world_size  # the others wait for the missing rank
    current = replace(
        turn.state.current,
        world_size=stimulus.world_size,
        backend=stimulus.backend,
        first_step=turn.state.step,
        ready_at=turn.now if stimulus.is_ready else None,
        has_lost=is_short and bool(stimulus.lost),
    )
    turn.adopt_generation(current)
    turn.enter_phase("running")  # ``begin_collecting`` requires it
    if is_short:
        begin_collecting(turn, "lost" if stimulus.lost else "restart")
    elif not stimulus.is_ready:
        # Ranks connect through a store that the dead scheduler relayed, so entries may be lost.
        begin_collecting(turn, "restart")


def may_adopt(found: s.SurvivorFound, state: JobState) -> bool:
    """Return whether a trainer may be adopted; one still in an older generation is fenced.

    >>> old = s.SurvivorFound(trainer="j/w1/1", worker="w1", generation=2, is_inside=True)
    >>> may_adopt(old, JobState(job_id="j", min_workers=1, max_workers=1))
    False
    """
    return not found.is_inside or found.generation == state.generation


def _member_of(turn: Turn, found: s.SurvivorFound, is_ready: bool) -> Member:
    phase = _phase_of(found)
    has_stepped = phase == "ranked" and is_ready
    return Member(
        trainer=found.trainer,
        worker=found.worker,
        order=int(found.trainer.rpartition("/")[2]),  # see ``Turn.start``
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
        return "reported"  # at a step boundary, with a state that other trainers may not have
    return "warm" if found.is_warm else "starting"
