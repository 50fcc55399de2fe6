"""The part of a snapshot that events set directly, and the requests that a job accepts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from etrain_jupyter.log.events import TERMINAL_STATUSES
from etrain_jupyter.notebook.dashboard.snapshot import (
    BestValue,
    ChartList,
    CostSummary,
    ErrorSummary,
    ExhibitSeries,
    LatestCheckpoint,
    LatestEval,
)

REQUESTS = ("pause", "resume", "checkpoint", "scale", "preempt", "stop")
"""The requests that have a button."""

_ENDED = {"finished": "has finished", "stopped": "was stopped", "failed": "has failed"}


@dataclass(kw_only=True, slots=True)
class JobFacts:
    """Mutable state of the fold; ``Snapshot`` describes the fields.

    Mutable for speed: copying a whole snapshot would double the time to fold a step.
    """

    job_id: str
    name: str
    status: str = "submitted"
    reason: str = ""
    pool: str = ""
    submitted_at: float | None = None
    started_at: float | None = None
    updated_at: float = 0.0
    ended_at: float | None = None
    step: int = 0
    total_steps: int | None = None
    epoch: int = 0
    epochs: float | None = None
    loss: float | None = None
    lr: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    eval: LatestEval | None = None
    best: BestValue | None = None
    global_batch_size: int | None = None
    num_parameters: int | None = None
    num_trained_parameters: int | None = None
    world_size: int = 0
    min_workers: int | None = None
    max_workers: int | None = None
    generation: int = 0
    num_generations: int = 0
    num_lost: int = 0
    num_preempted: int = 0
    num_undone: int = 0
    stall_s: float | None = None
    checkpoint: LatestCheckpoint | None = None
    cost: CostSummary | None = None
    error: ErrorSummary | None = None
    charts: ChartList = field(default_factory=ChartList)
    exhibits: tuple[ExhibitSeries, ...] = ()


def controls_of(status: str, *, num_training: int) -> dict[str, str]:
    """Return the reason why each request is not possible now; empty if it is possible.

    Args:
        status: Status of the job.
        num_training: Workers that are training, including those about to leave.
    """
    if status in TERMINAL_STATUSES:
        ended = dict.fromkeys(REQUESTS, f"The job {_ENDED[status]}.")
        # Stopped and failed jobs resume where they stopped. A finished job has no steps left.
        # Resuming it requires a new length, which a button cannot supply.
        longer = "The job has finished. To train longer, run %etrain resume --epochs N."
        return ended | {"resume": longer if status == "finished" else ""}
    refused = dict.fromkeys(REQUESTS, "")
    if status == "paused":
        refused["pause"] = "The job is paused."
    else:
        refused["resume"] = "The job is not paused."
    if status != "running" or not num_training:
        refused["checkpoint"] = "No worker is training, so there is nothing new to save."
    if not num_training:
        refused["preempt"] = "No worker is training."
    return refused
