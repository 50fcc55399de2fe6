"""Pure fold of a job's events into its snapshot and curves.

The result depends only on the events, not on when they arrive or how they are batched.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from etrain_jupyter.log.blocks import StepRun, runs_of
from etrain_jupyter.log.events import (
    TERMINAL_STATUSES,
    BestReached,
    CheckpointCommitted,
    CheckpointFailed,
    CheckpointIntervalChosen,
    CostUpdated,
    EvalCompleted,
    EvalScored,
    Event,
    ExhibitsRemoved,
    ExhibitStored,
    GenerationFormed,
    JobPlanned,
    JobRestored,
    JobResumed,
    JobStatusChanged,
    JobSubmitted,
    PreemptionNoticed,
    RankTimed,
    StepCompleted,
    StepUndone,
    UserErrorRaised,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
    WorkersScaled,
    WorkerWarmed,
)
from etrain_jupyter.log.job_record import apply_exhibit, fall_of
from etrain_jupyter.log.startup import Startup
from etrain_jupyter.notebook.dashboard.curves import CurveSet
from etrain_jupyter.notebook.dashboard.event_list import CellNumbers, EventList
from etrain_jupyter.notebook.dashboard.pace import Freshness, StepRate
from etrain_jupyter.notebook.dashboard.saved_exhibits import series_of
from etrain_jupyter.notebook.dashboard.snapshot import (
    BestValue,
    ChartList,
    CostSummary,
    ErrorSummary,
    LatestCheckpoint,
    LatestEval,
    Snapshot,
)
from etrain_jupyter.notebook.dashboard.workers import WorkerTable

JOB_ENDED = "job ended"
STALLED = frozenset({"paused", "waiting"})
"""Statuses of a job that has not ended but is not training."""
REQUESTS = ("pause", "resume", "checkpoint", "scale", "preempt", "stop")
"""The requests that have a button."""

_ENDED = {"finished": "has finished", "stopped": "was stopped", "failed": "has failed"}


class JobView:
    """Fold of one job's events into everything that the front end shows about it.

    ``add`` takes the events in order, in batches of any size. It skips those already folded, by
    their ``seq``, so a caller may replay the log.

    Attributes:
        rewinds: How often the job returned to an older step, so that the curves were cut.
    """

    def __init__(self, job_id: str = "", cell_numbers: CellNumbers = dict) -> None:
        self.rewinds = 0
        # The fields that events set directly; `snapshot` adds the others.
        self._state = Snapshot(job_id=job_id, name=job_id)
        self._last_seq = 0
        self._step_at = -math.inf
        self._plan: JobPlanned | None = None
        self._workers = WorkerTable()
        self.curves = CurveSet()
        """The curves, each as ``(x, y)`` over steps; only to be read."""
        self._list = EventList(cell_numbers)
        self._pace = StepRate()
        self._freshness = Freshness()
        self._startup = Startup()
        self.exhibits: dict[int, dict[str, ExhibitStored]] = {}
        """The exhibits by step and then by name; only to be read."""
        self._has_new_exhibits = False  # since the last snapshot

    @property
    def status(self) -> str:
        """The job's status, as in ``log.events.STATUSES``."""
        return self._state.status

    @property
    def is_terminal(self) -> bool:
        """True if the job has ended."""
        return self.status in TERMINAL_STATUSES

    @property
    def lists_version(self) -> int:
        """Incremented with each marker and each new or changed entry in the event list."""
        return self._list.version

    def add(self, events: Iterable[Event]) -> None:
        """Fold the next events."""
        for item in runs_of(events):
            if not isinstance(item, StepRun):
                self._add_event(item)
            # A run that overlaps known events is folded step by step below, so that known events
            # are skipped.
            elif item.first_seq > self._last_seq:
                self._add_run(item)
            else:
                for event in item.events():
                    self._add_event(event)

    def snapshot(self) -> Snapshot:
        """Return the current state."""
        state = self._state
        if self._has_new_exhibits:
            state.exhibits, self._has_new_exhibits = series_of(self.exhibits), False
        ended_at = state.updated_at if state.ended_at is None else state.ended_at
        workers = self._workers.rows()
        # The throughput is zero while the job stalls, but unknown before its first step.
        samples_per_s = self._pace.samples_per_s()
        if samples_per_s is not None and self.status in STALLED:
            samples_per_s = 0.0
        total, is_running = state.total_steps, self.status == "running"
        return replace(
            state,
            progress=min(1.0, state.step / total) if total else None,
            eta_s=self._pace.remaining_s(state.step, total) if is_running and total else None,
            elapsed_s=None if state.started_at is None else max(0.0, ended_at - state.started_at),
            samples_per_s=samples_per_s,
            checkpoint_due=self._freshness.due(
                step_s=self._pace.step_s(),
                steps_per_epoch=self._plan.steps_per_epoch if self._plan else None,
            ),
            startup=() if self._startup.is_over else tuple(self._startup.stages()),
            controls=controls_of(self.status, num_training=self._workers.num_training()),
            workers=workers,
            num_more_workers=self._workers.num - len(workers),
            events=self._list.entries(),
            markers=self._list.markers(),
        )

    def _add_event(self, event: Event) -> None:
        # Events that are not in the log have seq 0 and are never skipped.
        if event.seq and event.seq <= self._last_seq:
            return
        self._last_seq = event.seq or self._last_seq
        self._state.updated_at = event.time
        self._state.generation = max(self._state.generation, event.generation)
        was_starting = not self._startup.is_over
        self._startup.apply(event)
        if was_starting and isinstance(event, StepCompleted):
            self._list.add_first_step(event, self._startup)
        self._fold(event)
        self._list.add(event, self._state, is_starting=not self._startup.is_over)

    def _add_run(self, run: StepRun) -> None:
        # All steps of a run have the same generation, world size and metrics. So the snapshot
        # depends only on the first and the last; the steps in between only extend the curves.
        self._add_event(run.first)
        rest = run.inner()
        self._workers.num_steps += len(rest)
        self._pace.add_run(rest)
        if self._state.started_at is not None:  # the first step has set it
            self.curves.add_run(rest, self._state.started_at)
        self._add_event(run.last)

    # --- the fold ---

    def _fold(self, event: Event) -> None:
        state = self._state
        match event:
            case StepCompleted():
                self._fold_step(event)
            case RankTimed():
                self._workers.time(event)
            case EvalCompleted() | EvalScored():
                self._fold_eval(event)
            case GenerationFormed():
                self._fold_generation_formed(event)
            case StepUndone():
                state.num_undone += 1
            case JobRestored():
                self._fold_job_restored(event)
            case WorkerJoined():
                self._workers.join(event)
            case WorkerWarmed():
                self._workers.warm(event.worker, event.trainer_pid)
            case PreemptionNoticed():
                self._workers.mark(event.worker, "leaving", "preemption")
                state.num_preempted += 1
            case WorkerLeft() | WorkerLost():
                self._fold_worker_gone(event)
            case CheckpointCommitted() | CheckpointFailed() | CheckpointIntervalChosen():
                self._fold_checkpoint(event)
            case BestReached():
                state.best = BestValue(step=event.step, metric=event.metric, value=event.value)
            case ExhibitStored() | ExhibitsRemoved():
                apply_exhibit(self.exhibits, event)
                self._has_new_exhibits = True
            case CostUpdated():
                saved_usd = max(0.0, event.on_demand_usd - event.spent_usd)
                state.cost = CostSummary(
                    spent_usd=event.spent_usd, saved_usd=saved_usd, wasted_usd=event.wasted_usd
                )
            case JobSubmitted():
                self._fold_job_submitted(event)
            case JobResumed():
                self._fold_job_resumed(event)
            case JobPlanned():
                self._fold_job_planned(event)
            case JobStatusChanged():
                self._fold_job_status_changed(event)
            case WorkersScaled():
                state.min_workers, state.max_workers = event.min_workers, event.max_workers
            case UserErrorRaised():
                state.error = ErrorSummary(
                    error=event.error,
                    traceback=event.traceback,
                    workers=tuple(event.workers),
                    step=event.step,
                )
            case _:
                pass  # events that only appear in the event list

    def _fold_job_submitted(self, event: JobSubmitted) -> None:
        state, config = self._state, event.config
        self._freshness.configure(config)
        state.job_id, state.name, state.pool = event.job_id, event.name, event.pool
        state.min_workers, state.max_workers = event.min_workers, event.max_workers
        state.submitted_at = event.time
        state.charts = ChartList(
            metrics=tuple(config.get("metrics") or ()),
            has_eval=bool((config.get("data") or {}).get("eval")),
        )

    def _fold_job_resumed(self, event: JobResumed) -> None:
        # The curves stay, because a resumed job continues its log.
        state = self._state
        state.pool = event.pool
        state.min_workers, state.max_workers = event.min_workers, event.max_workers
        state.ended_at, state.error, state.reason = None, None, ""
        self._workers.restart()
        self._set_world_size(0, event.time)
        self._pace.rewind()

    def _fold_job_planned(self, event: JobPlanned) -> None:
        self._plan, state = event, self._state
        per_epoch = event.steps_per_epoch
        state.total_steps = event.total_steps
        state.epochs = event.total_steps / per_epoch if per_epoch else None
        state.global_batch_size = event.global_batch_size
        state.num_parameters = event.num_parameters
        state.num_trained_parameters = event.num_trained_parameters
        state.charts = replace(state.charts, has_eval=event.num_eval_samples > 0)

    def _fold_job_status_changed(self, event: JobStatusChanged) -> None:
        state, status, previous = self._state, event.status, self._state.status
        state.status, state.reason = status, event.reason
        if status == previous:  # only the reason has changed
            return
        if status == "running":
            self._freshness.start_training(event.time)
            if previous in STALLED and state.step:
                self._list.mark(event, state.step, "resumed", f"Resumed after it was {previous}")
        if status in TERMINAL_STATUSES:
            state.ended_at = event.time
            if status == "finished" and state.step:
                state.total_steps = state.step  # early stopping
            self._workers.end()
        elif status in STALLED:
            # The ranks of a paused job keep their state and still count; a waiting job has no
            # ranks.
            self._workers.stall("paused" if status == "paused" else "")
            num_ranks = self._workers.num_ranks() if status == "paused" else 0
            self._set_world_size(num_ranks, event.time)
        if status in ("paused", "waiting", "failed") and state.started_at is not None:
            self._list.mark(event, state.step, status, status.capitalize())

    def _fold_generation_formed(self, event: GenerationFormed) -> None:
        state = self._state
        if event.step < state.step:
            self._rewind_to(event.step)
        # Elapsed time starts at the first generation. Its workers did not join later, so they get
        # no markers.
        is_first = state.started_at is None
        if is_first:
            state.started_at = event.time
        joined = self._workers.form(event.ranks, event.trainer_pids)
        self._set_world_size(event.world_size, event.time)
        if joined and not is_first:
            text = f"{', '.join(joined)} joined, now {event.world_size}"
            self._list.mark(event, state.step, "join", text)
        state.num_generations += 1
        state.stall_s = event.stall_s

    def _fold_job_restored(self, event: JobRestored) -> None:
        state = self._state
        if event.step < state.step:
            self._rewind_to(event.step)
        state.num_undone += event.num_undone
        if state.best is not None and state.best.step > event.step:  # the weights are older
            state.best = None

    def _fold_step(self, event: StepCompleted) -> None:
        state = self._state
        # Usually, a rewind has been announced by the new generation or the restore. Cut the
        # curves in any case, because a curve's positions must not decrease.
        if event.step <= state.step:
            self._rewind_to(event.step - 1)
        self._workers.num_steps += 1
        fall_s, self._step_at = fall_of(self._step_at, event.time), event.time
        if state.started_at is None:
            state.started_at = event.time
        state.started_at -= fall_s
        if state.submitted_at is not None:
            state.submitted_at -= fall_s
        state.step, state.epoch = event.step, event.epoch
        state.loss, state.lr, state.metrics = event.loss, event.lr, event.metrics
        state.charts = with_metrics(state.charts, event.metrics)
        if self._plan is not None:
            state.total_steps = self._plan.total_steps_after(event)
            state.global_batch_size = self._plan.batch_size_of(event.world_size)
        self._pace.add_step(event)
        self.curves.add_step(event, event.time - state.started_at)
        if event.world_size != state.world_size:
            self._set_world_size(event.world_size, event.time)

    def _fold_eval(self, event: EvalCompleted | EvalScored) -> None:
        self.curves.add_eval(event)
        state, latest = self._state, self._state.eval
        if isinstance(event, EvalCompleted):
            self._pace.add_eval(event)
            state.eval = LatestEval(
                step=event.step,
                epoch=event.epoch,
                samples=event.samples,
                loss=event.loss,
                metrics=event.metrics,
            )
            return
        state.charts = with_metrics(state.charts, event.scores)
        # With ``eval.loss: false``, the evaluation has no other event.
        if latest is None or latest.step != event.step:
            latest = LatestEval(
                step=event.step, epoch=state.epoch, samples=event.samples, loss=None, metrics={}
            )
        state.eval = replace(latest, metrics={**latest.metrics, **event.scores})

    def _fold_worker_gone(self, event: WorkerLeft | WorkerLost) -> None:
        if isinstance(event, WorkerLost):
            state, why = "lost", event.cause
            self._state.num_lost += 1
        elif self.is_terminal or event.reason == JOB_ENDED:
            return  # keep the table as it was when the job ended
        else:
            state, why = "left", event.reason
        self._workers.mark(event.worker, state, why)
        # The world size of a running job changes when the next generation forms.
        if self.status == "paused":
            self._set_world_size(self._workers.num_ranks(), event.time)
        self._list.mark(event, self._state.step, state, f"{event.worker} {state} ({why})")

    def _fold_checkpoint(
        self, event: CheckpointCommitted | CheckpointFailed | CheckpointIntervalChosen
    ) -> None:
        match event:
            case CheckpointIntervalChosen():
                self._freshness.choose(event.interval_s)
            case CheckpointFailed():
                self._freshness.fail(event.step, event.error)
            case CheckpointCommitted():
                self._freshness.commit(event.time, event.duration_s)
                previous = self._state.checkpoint
                self._state.checkpoint = LatestCheckpoint(
                    step=event.step,
                    time=event.time,
                    size_bytes=event.size_bytes,
                    count=1 + (previous.count if previous else 0),
                )

    def _set_world_size(self, world_size: int, time: float) -> None:
        state = self._state
        state.world_size = world_size
        elapsed_s = None if state.started_at is None else time - state.started_at
        self.curves.add_world_size(world_size, step=state.step, elapsed_s=elapsed_s)

    def _rewind_to(self, step: int) -> None:
        self.curves.rewind_to(step)
        self._state.step = step
        self._pace.rewind()
        self.rewinds += 1  # views cannot remove points, so feeds send a reset


def with_metrics(charts: ChartList, metrics: Iterable[str]) -> ChartList:
    """Return the charts, with one added for each metric that a ``step`` function returns."""
    new = tuple(name for name in metrics if name not in charts.metrics)
    return replace(charts, metrics=charts.metrics + new) if new else charts


def controls_of(status: str, *, num_training: int) -> dict[str, str]:
    """Return the reason why each request is not possible now; empty if it is possible."""
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
