"""Takes over the run folder of a job that no coordinator has any more."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from etrain_jupyter.errors import CheckpointError
from etrain_jupyter.head.coordinator import clock
from etrain_jupyter.head.jobs.job_records import PendingRequests
from etrain_jupyter.head.jobs.job_spec import JobSpec, TrainerFacts
from etrain_jupyter.log.event_log import read_events
from etrain_jupyter.log.events import Event
from etrain_jupyter.rules.membership import stimuli as s
from etrain_jupyter.rules.membership.adoption import is_of_job
from etrain_jupyter.rules.membership.lineage import NOT_BEGUN
from etrain_jupyter.rules.membership.membership import JobState
from etrain_jupyter.rules.replay.recalled_workers import RecalledWorkers
from etrain_jupyter.rules.replay.replay import Past, past_of
from etrain_jupyter.storage.checkpoints import open_store
from etrain_jupyter.wire.messages import TrainerSummary


def read_past(order: JobSpec, log: Path) -> Past:
    """Return what the log of a job tells, and its checkpoints of generations that the log lost.

    A crash of the whole machine may take the last second of the log along, but no checkpoint.
    Whoever goes on takes a higher number than any that has written one: that is what fences.
    """
    return past_from(read_events(log), order)


def past_from(log: Sequence[Event], order: JobSpec) -> Past:
    """Return the same from the events of a log."""
    past = past_of(log)
    newest = max(past.generation, _newest_writer(order))
    past.starts += [NOT_BEGUN] * (newest - len(past.starts))
    past.generation = newest
    return past


def _newest_writer(order: JobSpec) -> int:
    """Return the newest generation that has written a checkpoint; 0 without any."""
    store = open_store(order.checkpoints)
    newest = 0
    for step in store.list_steps():
        with contextlib.suppress(CheckpointError):
            manifest = store.read_manifest(step)
            newest = max(newest, manifest.generation if manifest.job_id == order.job_id else 0)
    return newest


def state_after(past: Past, fresh: JobState) -> JobState:
    """Return the state of a job whose trainers have all died, from that of a new one."""
    return fresh.replace(
        generation=past.generation,
        step=past.step,
        saved_steps=past.saved_steps,
        num_started=past.num_started,
        whys=("resume",) if past.generation else fresh.whys,
    )


def state_of_recalled(
    state: JobState, recalled: RecalledWorkers, wishes: PendingRequests, *, past: Past
) -> JobState:
    """Return the state of a job whose trainers may live, from that of one whose have died."""
    low, high = recalled.bounds or (state.min_workers, state.max_workers)
    return state.replace(
        min_workers=low,
        max_workers=high,
        status=recalled.status,
        reason=recalled.reason,
        whys=("restart",) if past.generation else ("start",),
        has_trained=recalled.has_trained,
        step_s=recalled.step_s,
        last_step_at=recalled.last_step_at,
        paused=wishes.paused,
        pause_reason=wishes.pause_reason,
        outcome="stopped" if wishes.is_stopping else "",
    )


def find_trainers(
    recalled: RecalledWorkers, state: JobState, summaries: Mapping[str, TrainerSummary]
) -> Iterator[tuple[s.SurvivorFound, TrainerFacts]]:
    """Yield those of the job's trainers that are alive, with what they reported of themselves.

    Args:
        recalled: Which trainers the job had.
        state: The job.
        summaries: The supervisors' summaries of their trainers, by name.
    """
    for worker, name in recalled.trainers.items():
        known = summaries.get(name)
        if known is None:
            continue
        hello = known.hello
        found = s.SurvivorFound(
            trainer=name,
            worker=worker,
            generation=known.generation,
            # A rank that has left the newest generation counts as inside, and its report is handled
            # again: it may say why the job ends.
            is_inside=bool(known.generation)
            and (known.left is None or known.generation == state.generation),
            is_warm=hello is not None,
            warm_s=hello.warm_s if hello is not None else 0.0,
            device=hello.device if hello is not None else "",
            gpu=hello.gpu if hello is not None else "",
            progress=known.progress,
        )
        facts = TrainerFacts(
            worker,
            clock.from_wall(known.started_at),
            pid=hello.pid if hello is not None else known.pid,
        )
        facts.device, facts.gpu = found.device, found.gpu
        if is_of_job(found, state):
            yield found, facts
