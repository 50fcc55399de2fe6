"""Take over a job: fold its log, recover its state, and find its surviving trainers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace

from etrain_jupyter.errors import CheckpointError
from etrain_jupyter.head.coordinator import clock
from etrain_jupyter.head.jobs.job_records import PendingRequests
from etrain_jupyter.head.jobs.job_spec import JobSpec, TrainerFacts
from etrain_jupyter.log.event_log import read_events
from etrain_jupyter.log.events import Event
from etrain_jupyter.log.job_record import JobRecord
from etrain_jupyter.rules.membership import stimuli as s
from etrain_jupyter.rules.membership.adoption import may_adopt
from etrain_jupyter.rules.membership.membership import (
    GenerationState,
    JobState,
    Pause,
    Stopping,
    Timings,
)
from etrain_jupyter.storage.checkpoints import open_store
from etrain_jupyter.wire.messages import TrainerSummary


def replay_log(spec: JobSpec) -> tuple[JobRecord, list[Event]]:
    """Read and fold a job's log for the coordinator that resumes or takes over the job."""
    # A machine crash may lose the last second of the log, but no durable checkpoint:
    #
    #     log           generation 3 ... (the events of generation 4 are lost)
    #     checkpoint    from generation 4, step 120
    #
    # The next generation is number 5, so that late messages and checkpoints from 4 are fenced.
    past = read_events(spec.log_path)
    record = JobRecord().apply_all(past)
    record.generation = max(record.generation, _newest_writer(spec))
    return record, list(past)


def _newest_writer(spec: JobSpec) -> int:
    # Ignore damaged manifests, and those from other jobs in the same folder.
    store = open_store(spec.checkpoints)
    newest = 0
    for step in store.list_steps():
        with contextlib.suppress(CheckpointError):
            manifest = store.read_manifest(step)
            newest = max(newest, manifest.generation if manifest.job_id == spec.job_id else 0)
    return newest


def resumed_state(record: JobRecord, fresh: JobState) -> JobState:
    """Return the state of a job whose trainers have all died, based on a new job's state."""
    return replace(
        fresh,
        current=GenerationState(number=record.generation),
        step=record.logged_step,
        saved_steps=record.saved_steps,
        num_started=record.num_started,
        next_whys=("resume",) if record.generation else fresh.next_whys,
    )


def recovered_state(record: JobRecord, fresh: JobState, pending: PendingRequests) -> JobState:
    """Return the state of a job whose trainers may still be alive, based on a new job's state."""
    low, high = record.workers
    last_step_at = clock.from_wall(record.last_step.time) if record.last_step else 0.0
    return replace(
        resumed_state(record, fresh),
        min_workers=low,
        max_workers=high,
        status=record.status,
        reason=record.reason,
        next_whys=("restart",) if record.generation else ("start",),
        has_trained=record.has_trained,
        timings=Timings(step_s=record.step_s, last_step_at=last_step_at),
        pause=Pause(reason=pending.pause_reason) if pending.paused else None,
        ending=Stopping() if pending.is_stopping else None,
    )


def find_trainers(
    record: JobRecord, state: JobState, summaries: Mapping[str, TrainerSummary]
) -> Iterator[tuple[s.SurvivorFound, TrainerFacts]]:
    """Yield the surviving trainers of a job, with their facts.

    Args:
        record: Record of the job.
        state: Recovered state of the job.
        summaries: The supervisors' summaries of their trainers, by name.
    """
    # The log shows which trainers belong to the job; the supervisors report which of them are
    # alive.
    for worker, name in record.trainers.items():
        known = summaries.get(name)
        if known is None:
            continue
        hello = known.hello
        found = s.SurvivorFound(
            trainer=name,
            worker=worker,
            generation=known.generation,
            # A rank that has left the newest generation still counts as a member:
            # ``HostedJob.adopt`` handles its report again, and that report may end the job.
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
        if may_adopt(found, state):
            yield found, facts
