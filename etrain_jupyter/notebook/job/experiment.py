"""Request an experiment from a running job, and wait for its result."""

from __future__ import annotations

import queue
import time
import uuid
from collections.abc import Sequence

from etrain_jupyter.errors import EtrainError
from etrain_jupyter.log.blocks import runs_of
from etrain_jupyter.log.events import (
    TERMINAL_STATUSES,
    Event,
    ExperimentCompleted,
    GenerationFormed,
    JobStatusChanged,
)
from etrain_jupyter.notebook.job.training_job import TrainingJob

BEGIN_S = 30.0
"""Time for an experiment to begin, in seconds, in addition to the next steps of the job."""
MANY = 20
NUM_STEPS = 400
"""Upper limit for the job's own steps during an experiment."""
GONE_S = 5.0
"""Time in which the result of an abandoned experiment arrives."""
SLICE_S = 0.2


def run_experiment(
    job: TrainingJob,
    cause: str,
    *,
    variants: Sequence[str],
    left_out: Sequence[int],
    generation: int,
    seconds: float,
) -> ExperimentCompleted:
    """Run an experiment on a job's workers, and return its result, which is also in the log.

    Args:
        job: A running job.
        cause: The suspect.
        variants: Variants of a step to time; see ``trainer.loop.trial_steps``.
        left_out: Ranks of the stragglers.
        generation: The generation to which the ranks belong.
        seconds: Maximum time for which training waits.

    Raises:
        PoolError: If the coordinator refuses, because the job is paused or its workers changed.
        EtrainError: If the job has ended, or no result arrives.
    """
    request = uuid.uuid4().hex[:12]
    job.request(
        "experiment",
        number=request,
        cause=cause,
        variants=list(variants),
        left_out=list(left_out),
        generation=generation,
        seconds=seconds,
    )
    limit_s = BEGIN_S + seconds + NUM_STEPS * _step_s(job)
    inbox = _Inbox()
    job.subscribe(inbox.put)
    try:
        result = _await_result(inbox, request, generation=generation, timeout_s=limit_s)
    finally:
        inbox.is_closed = True
    if result is None:
        raise EtrainError(
            f"the experiment on job {job.id} has no result: it was abandoned because the workers "
            f"changed, or did not begin within {limit_s:.0f} s. The job is not affected. Repeat "
            "%etrain diagnose, or leave the experiment out with --no-experiments."
        )
    return result


def _step_s(job: TrainingJob) -> float:
    times = job.history()["time"][-MANY:]
    return max(0.0, (times[-1] - times[0]) / len(times)) if times else 0.0


class _Inbox:
    """Receives events until it is closed; a listener cannot be removed."""

    def __init__(self) -> None:
        self.batches: queue.SimpleQueue[Sequence[Event]] = queue.SimpleQueue()
        self.is_closed = False

    def put(self, events: Sequence[Event]) -> None:
        """Take the next events."""
        if not self.is_closed:
            self.batches.put(events)


def _await_result(
    inbox: _Inbox, request: str, *, generation: int, timeout_s: float
) -> ExperimentCompleted | None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            # Wait in slices, so that an interrupt is handled.
            events = inbox.batches.get(timeout=SLICE_S)
        except queue.Empty:
            continue
        for event in runs_of(events):
            if isinstance(event, ExperimentCompleted) and event.request == request:
                return event
            # The rank that reports may itself be lost. Its report follows the end of a generation.
            if _ends(event, generation):
                deadline = min(deadline, time.monotonic() + GONE_S)
    return None


def _ends(event: object, generation: int) -> bool:
    match event:
        case GenerationFormed():
            return event.generation > generation
        # The log of a resumed job has the end of its earlier part, too.
        case JobStatusChanged():
            return event.generation >= generation and event.status in TERMINAL_STATUSES
    return False
