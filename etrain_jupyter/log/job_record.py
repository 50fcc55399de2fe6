"""Fold a job's events into one record that holds the job's current state.

The scheduler folds the events as it appends them. Resuming a job, taking it over from a dead
scheduler, auditing it and displaying it all fold the same log, and so obtain the same record. Data
that can be derived from events is not stored anywhere else.

Example of the fields that change when a checkpoint is restored::

    event                      logged_step  saved_steps  starts
    GenerationFormed 1, at 0        0        ()          [NOT_BEGUN]
    GenerationReady 1               0        ()          [0]
    StepCompleted 1, 2, 3           3        ()          [0]
    CheckpointCommitted 2           3        (2,)        [0]
    GenerationFormed 2, at 2        3        (2,)        [0, NOT_BEGUN]
    JobRestored 2, at 2             2        (2,)        [0, 2]
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

from etrain_jupyter.log.blocks import StepRun, runs_of
from etrain_jupyter.log.events import (
    TERMINAL_STATUSES,
    BestReached,
    CheckpointCommitted,
    CostUpdated,
    EarlyStopped,
    EvalCompleted,
    EvalScored,
    Event,
    ExhibitsRemoved,
    ExhibitStored,
    GenerationFormed,
    GenerationReady,
    JobPlanned,
    JobRestored,
    JobResumed,
    JobStatus,
    JobStatusChanged,
    JobSubmitted,
    PreemptionNoticed,
    RankTimed,
    RebalanceRecommended,
    StepCompleted,
    UserErrorRaised,
    WeightsHashed,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
    WorkersScaled,
    WorkersSized,
)
from etrain_jupyter.log.startup import Startup

NOT_BEGUN = 2**53
"""Start step of a generation that has no events yet, because it may still load a checkpoint."""

KEEP_SAVED = 8
"""Number of durable checkpoints to remember, in case the job returns to a step before the
newest."""

SET_BACK_S = 60.0
"""A clock was set back if step times fall by more seconds than this; otherwise rank 0 moved."""


@dataclass(frozen=True, kw_only=True)
class TypeWork:
    """Total samples and busy time of the workers on one machine type."""

    samples: int = 0
    busy_s: float = 0.0
    """Time of their steps without waiting for other workers, in seconds."""

    def plus(self, samples: int, busy_s: float) -> TypeWork:
        """Return the sum."""
        return TypeWork(samples=self.samples + samples, busy_s=self.busy_s + max(0.0, busy_s))


@dataclass(kw_only=True)
class JobRecord:
    """Record of a job, built from its log. ``apply`` adds one event, in the order of the log.

    The record is updated in place, because a log may have a million events. The result is the same
    whether events are added one by one, in blocks of steps, or in several parts.
    """

    # --- the job ---

    num_events: int = 0
    status: JobStatus = "submitted"
    """The newest status in the log; not a terminal status if the coordinator died."""
    reason: str = ""
    started_at: float = math.nan
    """When the job was submitted, in seconds since the epoch."""
    attempt_at: float = math.nan
    """When the current attempt was submitted or resumed, in seconds since the epoch."""
    attempt_step: int = 0
    """Step at which the current attempt began."""
    changed_at: float = math.nan
    """Time of the newest event."""
    workers: tuple[int, int] = (0, 0)
    """Minimum and maximum number of workers, as last requested."""
    sized: WorkersSized | None = None
    """The newest number of workers chosen by ``workers.target: goodput``."""
    plan: JobPlanned | None = None
    """The newest plan."""
    is_planned: bool = False
    """True if ``plan`` belongs to the current attempt; False from a resume until the next plan."""
    num_samples_before: int = 0
    """Training samples in the plan of the previous attempt; 0 if there is none."""
    shards_before: tuple[str, str] = ("", "")
    """Layout and digest of the training set in that plan; empty if it was in memory."""
    cost: CostUpdated | None = None
    """The newest cost; None if the pool has no prices."""
    user_error: UserErrorRaised | None = None
    """Error that caused the current attempt to fail."""
    early_stop: EarlyStopped | None = None
    """The decision to end the current attempt early."""

    startup: Startup = field(default_factory=Startup)
    """Stages of the current attempt until its first step."""

    # --- training ---

    step: int = 0
    """Current step of the job. After a restore it may be ahead of ``logged_step``, because a
    checkpoint may be newer than the log."""
    logged_step: int = 0
    """The newest step in the log that no restore has undone."""
    last_step: StepCompleted | None = None
    """The newest ``StepCompleted``, even if a restore has undone it."""
    total_steps: int = 0
    """Number of steps in the whole job at the current number of workers."""
    samples: int = 0
    """Samples trained on so far, including those of repeated epochs."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The newest value of each metric; those from evaluations are named ``eval_...``."""
    evaluated_steps: set[int] = field(default_factory=set)
    """Steps of the evaluations that no restore has undone."""
    scored_steps: set[int] = field(default_factory=set)
    """Steps of the evaluations with scores that no restore has undone."""
    best: list[BestReached] = field(default_factory=list)
    """The best evaluations, in the order in which they were reported; the best is last."""
    best_reported: BestReached | None = None
    """The newest ``BestReached``; None once a restore has undone its step. After that, rank 0
    reports the best evaluation again."""
    exhibits: dict[int, dict[str, ExhibitStored]] = field(default_factory=dict)
    """Stored figures, texts and tables of the evaluations: by step, then by name."""

    # --- checkpoints ---

    saved_step: int = 0
    """Step of the newest checkpoint that was committed; 0 if there is none."""
    saved_steps: tuple[int, ...] = ()
    """Steps of the newest checkpoints that belong to the job's state, oldest first."""
    stalls: dict[int, float] = field(default_factory=dict)
    """Seconds that each checkpoint blocked training, by step."""

    # --- generations ---

    generation: int = 0
    """Number of the newest generation; 0 before the first."""
    world_size: int = 0
    """Number of ranks that are training; 0 while the job waits."""
    ranks: tuple[str, ...] = ()
    """Workers of the newest generation in rank order; empty after a resume."""
    is_ready: bool = False
    """True if all ranks of the newest generation have started training."""
    has_trained: bool = False
    """True if all ranks of at least one generation have started training."""
    backend: str = "gloo"
    """The backend that sums the gradients of the newest generation."""
    restored_in: int = 0
    """The newest generation that returned to an older state; 0 if no generation has."""

    # --- workers ---

    trainers: dict[str, str] = field(default_factory=dict)
    """Name of each worker's trainer, for workers that were neither lost nor released."""
    machine_types: dict[str, str] = field(default_factory=dict)
    """Machine type by worker, including former ones; empty if the pool has no types."""
    work: dict[str, TypeWork] = field(default_factory=dict)
    """Reported samples and times by machine type."""
    num_started: int = 0
    """Number of trainers started so far."""
    notices: dict[str, float] = field(default_factory=dict)
    """Deadline in seconds since the epoch, by worker, for machines that will be interrupted."""
    at_risk: set[str] = field(default_factory=set)
    """Workers whose machines are likely to be interrupted."""
    num_preempted: int = 0
    """Number of interruption notices so far."""
    num_lost: int = 0
    """Number of workers that were lost without a notice."""

    _starts: dict[int, int] = field(default_factory=dict)  # step by generation, where known
    _step_at: float = -math.inf  # time of the newest step
    _planned_start: int = 0  # step at which the newest generation was meant to begin
    # Ranks of the newest generation that have neither left nor been lost; None if the log does not
    # contain its beginning, or if the job has been resumed since.
    _present: frozenset[str] | None = None

    # --- derived values ---

    @property
    def is_terminal(self) -> bool:
        """True if the job has ended."""
        return self.status in TERMINAL_STATUSES

    @property
    def starts(self) -> list[int]:
        """The step at which each generation began; see ``rules.membership.lineage``."""
        return [self._starts.get(number, NOT_BEGUN) for number in range(1, self.generation + 1)]

    @property
    def epoch(self) -> int:
        """Epoch of the newest step, from 0."""
        return self.last_step.epoch if self.last_step else 0

    @property
    def samples_per_s(self) -> float:
        """Samples per second of the newest step; NaN before the first."""
        return self.last_step.samples_per_s if self.last_step else math.nan

    @property
    def step_s(self) -> float:
        """Duration of the newest step in seconds; 0.0 before the first."""
        last = self.last_step
        return last.samples / max(last.samples_per_s, 1e-9) if last else 0.0

    @property
    def early_stop_generation(self) -> int:
        """The generation that decided to end early; 0 if no generation has."""
        return self.early_stop.generation if self.early_stop else 0

    # --- the fold ---

    def apply(self, event: Event) -> Self:
        """Add the next event of the log, and return this record."""
        self.num_events += 1
        self.changed_at = event.time
        self.startup.apply(event)
        match event:
            case StepCompleted():
                self._apply_step(event)
            case GenerationReady() | WeightsHashed() | RankTimed():
                self._apply_report(event)
            case EvalCompleted() | EvalScored():
                self._apply_eval(event)
            case CheckpointCommitted() | BestReached():
                self._apply_saved(event)
            case ExhibitStored() | ExhibitsRemoved():
                apply_exhibit(self.exhibits, event)
            case GenerationFormed():
                self._apply_formed(event)
            case JobRestored():
                self._apply_restored(event)
            case WorkerJoined() | WorkerLost() | WorkerLeft():
                self._apply_worker(event)
            case PreemptionNoticed():
                self.num_preempted += 1
                self.notices[event.worker] = event.deadline
            case RebalanceRecommended():
                self.at_risk.add(event.worker)
            case JobSubmitted():
                self.started_at = self.attempt_at = event.time
                self.workers = (event.min_workers, event.max_workers)
            case JobResumed():
                self._apply_resumed(event)
            case JobPlanned():
                self.plan, self.is_planned = event, True
                self.total_steps = event.total_steps
            case JobStatusChanged():
                self._apply_status(event)
            case WorkersScaled():
                self.workers = (event.min_workers, event.max_workers)
            case WorkersSized():
                self.sized = event
            case CostUpdated():
                self.cost = event
            case EarlyStopped():
                self.early_stop = event
            case UserErrorRaised():
                self.user_error = event
            case _:
                pass  # events that do not affect the record
        return self

    def apply_run(self, run: StepRun) -> Self:
        """Add a run of steps of one generation. Only the last step affects the record."""
        last = run.last
        self.startup.apply(run.first)
        self.num_events += len(run)
        self._note_step_at(run.first.time)
        self.changed_at = last.time
        self._apply_step(last)
        return self

    def apply_all(self, events: Iterable[Event]) -> Self:
        """Add the next events of the log, without examining each step of a block."""
        for item in runs_of(events):
            if isinstance(item, StepRun):
                self.apply_run(item)
            else:
                self.apply(item)
        return self

    def started_from(self, step: int) -> None:
        """Record where the newest generation begins, if it restores no checkpoint.

        The scheduler knows this when it forms the generation. In the log, the start is known only
        from the generation's first event, because a generation may also die while it loads a
        checkpoint.
        """
        self._begin(self.generation, step)

    def _apply_report(self, event: GenerationReady | WeightsHashed | RankTimed) -> None:
        if isinstance(event, GenerationReady):
            self.is_ready = self.has_trained = True
        if isinstance(event, RankTimed):
            # The time for which a rank waits for others depends on their machines.
            machine = self.machine_types.get(event.worker, "")
            busy_s = event.elapsed_s - event.communication_s
            self.work[machine] = self.work.get(machine, TypeWork()).plus(event.samples, busy_s)
        # Any report from a member shows that the generation began at the planned step, because
        # otherwise ``JobRestored`` would precede the report.
        self._begin(event.generation, self._planned_start)

    def _apply_eval(self, event: EvalCompleted | EvalScored) -> None:
        self.metrics = self.metrics | {f"eval_{k}": v for k, v in event.values.items()}
        if isinstance(event, EvalScored):
            self.scored_steps.add(event.step)
        else:
            self.evaluated_steps.add(event.step)
            self._begin(event.generation, self._planned_start)

    def _apply_saved(self, event: CheckpointCommitted | BestReached) -> None:
        if isinstance(event, CheckpointCommitted):
            self.saved_step = event.step
            self.saved_steps = tuple(sorted({*self.saved_steps, event.step})[-KEEP_SAVED:])
            self.stalls[event.step] = event.stall_s
        else:  # a new rank 0 may report it again; the newest report counts
            self.best = [*(b for b in self.best if b.step != event.step), event]
            self.best_reported = event

    def _apply_worker(self, event: WorkerJoined | WorkerLost | WorkerLeft) -> None:
        if isinstance(event, WorkerJoined):
            # Same names as in ``rules.membership.turn.Turn.start``.
            self.num_started += 1
            self.machine_types[event.worker] = event.machine
            self.trainers[event.worker] = f"{event.job_id}/{event.worker}/{self.num_started}"
        else:
            self.num_lost += isinstance(event, WorkerLost)
            self._remove_worker(event.worker)

    def _apply_step(self, event: StepCompleted) -> None:
        self.step = self.logged_step = event.step
        self.last_step = event
        self._note_step_at(event.time)
        if self.plan is not None:
            self.samples = event.epoch * self.plan.num_train_samples + event.first + event.samples
            self.total_steps = self.plan.total_steps_after(event)
        self.metrics = self.metrics | {"loss": event.loss, **event.metrics}
        # A reader that sees only the end of a log takes the generation from the steps.
        self.world_size = event.world_size
        if event.generation > self.generation:
            self.generation, self._present = event.generation, None
        self._begin(event.generation, self._planned_start)

    def _note_step_at(self, time: float) -> None:
        fall_s = fall_of(self._step_at, time)
        self.started_at -= fall_s
        self.attempt_at -= fall_s
        self._step_at = time

    def _apply_formed(self, event: GenerationFormed) -> None:
        self.generation, self.world_size = event.generation, event.world_size
        self.step = event.step
        self.ranks, self.is_ready = tuple(event.ranks), False
        self._present = frozenset(event.ranks)
        self.backend = event.backend
        self._planned_start = event.step
        # The generation may die while it loads a checkpoint, so its start is recorded with its
        # first event. Checkpoints after its first step, however, are no longer part of the job.
        self._drop_saved_after(event.step)

    def _apply_restored(self, event: JobRestored) -> None:
        self._begin(event.generation, event.step)
        self.restored_in = event.generation
        self._drop_saved_after(event.step)
        self.step = event.step  # a checkpoint may be ahead of the log
        self.logged_step = min(self.logged_step, event.step)
        self.evaluated_steps = {step for step in self.evaluated_steps if step <= event.step}
        self.scored_steps = {step for step in self.scored_steps if step <= event.step}
        self.best = [best for best in self.best if best.step <= event.step]
        if self.best_reported is not None and self.best_reported.step > event.step:
            self.best_reported = None

    def _apply_status(self, event: JobStatusChanged) -> None:
        self.status, self.reason = event.status, event.reason
        if event.status == "waiting":
            self.world_size = 0  # idle trainers do not count as ranks, except during a pause
        if event.status == "finished" and self.step:
            self.total_steps = self.step  # early stopping may have ended it before its last step
        self._count_if_paused()

    def _apply_resumed(self, event: JobResumed) -> None:
        """Begin another attempt, in which no workers from the previous attempt remain."""
        self.workers = (event.min_workers, event.max_workers)
        self.attempt_at, self.attempt_step = event.time, event.step
        if self.plan is not None:
            self.num_samples_before = self.plan.num_train_samples
            self.shards_before = (self.plan.train_layout, self.plan.train_digest)
        self.is_planned = False
        self.user_error = self.early_stop = None
        self.world_size, self.ranks, self.is_ready, self._present = 0, (), False, None
        self.trainers, self.notices, self.at_risk = {}, {}, set()

    def _remove_worker(self, worker: str) -> None:
        self.trainers.pop(worker, None)
        self.notices.pop(worker, None)
        self.at_risk.discard(worker)
        self._present = self._present and self._present - {worker}
        self._count_if_paused()

    def _count_if_paused(self) -> None:
        # In any other status, the next generation event contains the number of ranks.
        if self.status == "paused" and self._present is not None:
            self.world_size = len(self._present)

    def _begin(self, generation: int, step: int) -> None:
        # Only the newest generation's start may be unknown.
        if generation == self.generation:
            self._starts.setdefault(generation, step)

    def _drop_saved_after(self, step: int) -> None:
        self.saved_steps = tuple(saved for saved in self.saved_steps if saved <= step)


def fall_of(before: float, time: float) -> float:
    """Return the seconds by which a clock was set back between two steps of a log, usually 0.

    Durations then count from an origin that is earlier by as much, so that none is negative. Only
    steps are compared, because rank 0 reports all of them: other events have the times of other
    machines, whose clocks may differ.
    """
    return before - time if before - time > SET_BACK_S else 0.0


def apply_exhibit(
    exhibits: dict[int, dict[str, ExhibitStored]], event: ExhibitStored | ExhibitsRemoved
) -> None:
    """Add an event to a job's exhibits, which are grouped by step and then by name."""
    if isinstance(event, ExhibitsRemoved):
        exhibits.pop(event.step, None)
    else:
        exhibits.setdefault(event.step, {})[event.name] = event
