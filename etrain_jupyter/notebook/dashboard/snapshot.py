"""The state of a job as the front end draws it: a value, and its JSON form.

``job_view`` folds events into a ``Snapshot``. Its TypeScript type in the front end,
``snapshot.ts``, is generated from this module by ``typescript``. Run ``make snapshot`` after
changing a field. The order of the fields is the order of the keys on the wire.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

from etrain_jupyter.log.startup import StartupStage

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class TimeSplit:
    """Time split of a worker's latest steps."""

    step: int
    """The last of these steps."""
    num_steps: int
    samples_per_s: float
    shares: Mapping[str, float]
    """Share of the time by part: ``data``, ``compute``, ``communication``, ``optimizer`` and
    ``other``. They add up to 1."""


@dataclass(frozen=True, kw_only=True)
class WorkerRow:
    """One row of the table of workers."""

    worker: str
    rank: int | None
    """Rank in the current generation; None if it is not a member."""
    state: str
    """``starting``, ``warm``, ``training``, ``waiting``, ``leaving``, ``left``, ``lost`` or
    ``done``."""
    note: str
    """Reason for the state; empty if the state needs no explanation."""
    device: str
    machine: str
    """Machine type; empty if the pool does not report it."""
    zone: str
    lifecycle: str
    """Purchase option of the machine, such as ``spot``; empty if the pool does not report it."""
    usd_per_h: float | None
    """Price per hour when the worker joined."""
    trainer_pid: int | None
    steps: int
    """Number of steps in which the worker took part."""
    split: TimeSplit | None
    """Time split of its latest steps; None until reported."""
    waits_for: str
    """Why the worker is not computing; empty if it is."""


@dataclass(frozen=True, kw_only=True)
class EventLine:
    """One entry of the event list."""

    id: int
    """Key of the entry in this view."""
    seq: int
    """Sequence number of the event in the log; 0 if the event is not in the log."""
    time: float
    kind: str
    """Class name of the event."""
    level: str
    """``info``, ``good``, ``warning`` or ``error``."""
    text: str


@dataclass(frozen=True, kw_only=True)
class Marker:
    """An event marked on the charts."""

    id: int
    """Key of the marker in this view."""
    seq: int
    step: int
    """The job's step at the time of the event."""
    time: float
    kind: str
    """``failed``, ``lost``, ``restored``, ``notice``, ``waiting``, ``paused``, ``resumed``,
    ``join``, ``left`` or ``checkpoint``."""
    text: str


@dataclass(frozen=True, kw_only=True)
class LatestEval:
    """The newest evaluation."""

    step: int
    epoch: int
    samples: int
    loss: float | None
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class BestValue:
    """The best evaluation of the metric that ``checkpoint.best`` names."""

    step: int
    metric: str
    value: float | None


@dataclass(frozen=True, kw_only=True)
class LatestCheckpoint:
    """The newest durable checkpoint."""

    step: int
    time: float
    size_bytes: int
    count: int
    """Number of checkpoints so far."""


@dataclass(frozen=True, kw_only=True)
class CheckpointDue:
    """When the next checkpoint is overdue: ``limit_s`` seconds after ``since``."""

    since: float | None = None
    """Time of the newest checkpoint, or of the start of training if that is later."""
    limit_s: float | None = None
    """None if the interval between checkpoints is unknown."""
    failed: str = ""
    """Step and error of a newer checkpoint that failed."""


@dataclass(frozen=True, kw_only=True)
class CostSummary:
    """Cost of the machines."""

    spent_usd: float
    saved_usd: float
    """Savings compared with on-demand prices."""
    wasted_usd: float
    """Cost of training that preemptions discarded."""


@dataclass(frozen=True, kw_only=True)
class ErrorSummary:
    """The error that made the job fail."""

    error: str
    traceback: str
    workers: tuple[str, ...]
    """Workers that raised it."""
    step: int


@dataclass(frozen=True, kw_only=True)
class ChartList:
    """The charts of a job, derived from its configuration, so that no chart appears late."""

    metrics: tuple[str, ...] = ()
    has_eval: bool = False


@dataclass(frozen=True, kw_only=True)
class ExhibitSeries:
    """The exhibits of one name: figures, texts or tables that ``eval.score`` returned."""

    name: str
    steps: tuple[int, ...]
    """Steps of the evaluations that have one, in ascending order."""


# Not frozen, because `job_view` updates a snapshot of its own: a copy per event would double the
# time to fold a step.
@dataclass(kw_only=True, slots=True)
class Snapshot:
    """The state of one job at one time. Times are seconds since the epoch."""

    job_id: str
    name: str
    status: str = "submitted"
    reason: str = ""
    """Reason for the status; empty if it needs no explanation."""
    pool: str = ""
    submitted_at: float | None = None
    started_at: float | None = None
    """Time of the first generation."""
    updated_at: float = 0.0
    """Time of the newest event."""
    ended_at: float | None = None
    step: int = 0
    """The newest committed step."""
    total_steps: int | None = None
    """None until the job is planned."""
    epoch: int = 0
    """Epoch of the newest step, starting at 0."""
    epochs: float | None = None
    """Planned epochs; may be a fraction."""
    loss: float | None = None
    lr: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the newest step."""
    eval: LatestEval | None = None
    best: BestValue | None = None
    global_batch_size: int | None = None
    num_parameters: int | None = None
    num_trained_parameters: int | None = None
    """Parameters that require a gradient."""
    world_size: int = 0
    min_workers: int | None = None
    max_workers: int | None = None
    generation: int = 0
    num_generations: int = 0
    num_lost: int = 0
    """Workers lost so far."""
    num_preempted: int = 0
    """Workers preempted so far."""
    num_undone: int = 0
    """Steps undone by rewinds so far."""
    stall_s: float | None = None
    """Time for which training stalled before the current generation."""
    checkpoint: LatestCheckpoint | None = None
    cost: CostSummary | None = None
    """None if the pool does not report costs."""
    error: ErrorSummary | None = None
    charts: ChartList = ChartList()
    exhibits: tuple[ExhibitSeries, ...] = ()
    """Sorted by name. A view requests their content when it displays them."""
    startup: tuple[StartupStage, ...] = ()
    """Stages from the start of the scheduler until the first step; empty once it is committed."""
    num_more_workers: int = 0
    """Number of ranks that ``workers`` leaves out."""
    progress: float | None = None
    """Share of the planned steps that are done, from 0 to 1."""
    eta_s: float | None = None
    """Estimated remaining time; None if unknown or not running."""
    elapsed_s: float | None = None
    samples_per_s: float | None = None
    """Recent throughput."""
    checkpoint_due: CheckpointDue = CheckpointDue()
    controls: Mapping[str, str] = field(default_factory=dict)
    """Why each request is not possible now; empty if it is possible."""
    workers: tuple[WorkerRow, ...] = ()
    """Ranks in order, then newcomers, then workers that are gone; at most ``workers.MAX_ROWS``."""
    events: tuple[EventLine, ...] = ()
    """Oldest first."""
    markers: tuple[Marker, ...] = ()
    """Oldest first."""

    def to_json(self, *, without: Collection[str] = ()) -> Json:
        """Return the snapshot as JSON-able data."""
        # Do not use dataclasses.asdict, which makes deep copies: this runs for each message.
        names = (name for name in field_names(Snapshot) if name not in without)
        return {name: to_json(getattr(self, name)) for name in names}


def to_json(value: Any) -> Any:
    """Return a value of a snapshot as JSON-able data.

    JSON has no NaN and no infinity. They become strings that JavaScript's ``Number()`` parses.
    """
    # bool is an int, and is valid in JSON.
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    kind: type = type(value)
    return {name: to_json(getattr(value, name)) for name in field_names(kind)}


@cache
def field_names(kind: type) -> tuple[str, ...]:
    """Return the names of a dataclass's fields, in order."""
    return tuple(item.name for item in fields(kind))
