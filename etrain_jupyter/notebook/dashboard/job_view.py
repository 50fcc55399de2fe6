"""Pure fold of a job's events into its snapshot and curves.

The result depends only on the events, not on when they arrive or how they are batched.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import singledispatchmethod

from etrain_jupyter.display.numbers import seconds
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
    FaultInjected,
    GenerationFormed,
    JobPlanned,
    JobRestored,
    JobResumed,
    JobStatusChanged,
    JobSubmitted,
    LogLine,
    PreemptionNoticed,
    RankTimed,
    RebalanceRecommended,
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
from etrain_jupyter.notebook.dashboard.entries import Entries, Markers
from etrain_jupyter.notebook.dashboard.event_text import (
    Line,
    describe,
    first_step_line,
    restored_text,
)
from etrain_jupyter.notebook.dashboard.facts import JobFacts, controls_of
from etrain_jupyter.notebook.dashboard.freshness import Freshness
from etrain_jupyter.notebook.dashboard.pace import StepRate
from etrain_jupyter.notebook.dashboard.saved_exhibits import series_of
from etrain_jupyter.notebook.dashboard.snapshot import (
    BestValue,
    ChartList,
    CostSummary,
    ErrorSummary,
    LatestCheckpoint,
    LatestEval,
    Snapshot,
    field_names,
)
from etrain_jupyter.notebook.dashboard.stack_dumps import CellNumbers, StackDumps
from etrain_jupyter.notebook.dashboard.workers import WorkerTable

JOB_ENDED = "job ended"
STALLED = frozenset({"paused", "waiting"})
"""Statuses of a job that has not ended but is not training."""


class JobView:
    """Fold of one job's events into everything that the front end shows about it.

    ``add`` takes the events in order, in batches of any size. It skips those already folded, by
    their ``seq``, so a caller may replay the log.

    Args:
        job_id: The job.
        cell_numbers: Returns the cell that a stack frame is in.

    Attributes:
        rewinds: How often the job returned to an older step, so that the curves were cut.
        lists_version: Incremented with each marker and each new or changed entry in the event list.
    """

    def __init__(self, job_id: str = "", cell_numbers: CellNumbers = dict) -> None:
        self._cell_numbers = cell_numbers
        self.rewinds = 0
        self.lists_version = 0
        self._facts = JobFacts(job_id=job_id, name=job_id)
        self._last_seq = 0
        self._num_steps = 0
        self._step_at = -math.inf
        self._plan: JobPlanned | None = None
        self._workers = WorkerTable()
        self.curves = CurveSet()
        """The curves, each as ``(x, y)`` over steps; only to be read."""
        self._entries = Entries()
        self._markers = Markers()
        self._dumps = StackDumps()
        self._pace = StepRate()
        self._freshness = Freshness()
        self._startup = Startup()
        self.exhibits: dict[int, dict[str, ExhibitStored]] = {}
        """The exhibits by step and then by name; only to be read."""
        self._has_new_exhibits = False  # since the last snapshot

    @property
    def status(self) -> str:
        """The job's status, as in ``log.events.STATUSES``."""
        return self._facts.status

    @property
    def is_terminal(self) -> bool:
        """True if the job has ended."""
        return self.status in TERMINAL_STATUSES

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
        facts = self._facts
        if self._has_new_exhibits:
            facts.exhibits, self._has_new_exhibits = series_of(self.exhibits), False
        ended_at = facts.updated_at if facts.ended_at is None else facts.ended_at
        workers = self._workers.rows(self._num_steps)
        return Snapshot(
            **{name: getattr(facts, name) for name in field_names(JobFacts)},
            progress=self._progress(),
            eta_s=self._eta_s(),
            elapsed_s=None if facts.started_at is None else max(0.0, ended_at - facts.started_at),
            samples_per_s=self._samples_per_s(),
            checkpoint_due=self._freshness.due(
                step_s=self._pace.step_s(),
                steps_per_epoch=self._plan.steps_per_epoch if self._plan else None,
            ),
            startup=() if self._startup.is_over else tuple(self._startup.stages()),
            controls=controls_of(self.status, num_training=self._workers.num_training()),
            workers=workers,
            num_more_workers=self._workers.num - len(workers),
            events=self._entries.to_tuple(),
            markers=self._markers.to_tuple(),
        )

    def _add_event(self, event: Event) -> None:
        # Events that are not in the log have seq 0 and are never skipped.
        if event.seq and event.seq <= self._last_seq:
            return
        self._last_seq = event.seq or self._last_seq
        self._facts.updated_at = event.time
        self._facts.generation = max(self._facts.generation, event.generation)
        self._startup_event(event)
        self._fold(event)
        self._list_event(event)

    def _add_run(self, run: StepRun) -> None:
        # All steps of a run have the same generation, world size and metrics. So the snapshot
        # depends only on the first and the last; the steps in between only extend the curves.
        self._add_event(run.first)
        rest = run.inner()
        self._num_steps += len(rest)
        self._pace.add_run(rest)
        if self._facts.started_at is not None:  # the first step has set it
            self.curves.add_run(rest, self._facts.started_at)
        self._add_event(run.last)

    # --- the fold: one method per kind of event ---

    @singledispatchmethod
    def _fold(self, event: Event) -> None:
        """Ignore an event that only appears in the event list."""

    @_fold.register
    def _fold_job_submitted(self, event: JobSubmitted) -> None:
        config = event.config
        self._freshness.configure(config)
        self._facts.job_id = event.job_id
        self._facts.name = event.name
        self._facts.pool = event.pool
        self._facts.min_workers = event.min_workers
        self._facts.max_workers = event.max_workers
        self._facts.submitted_at = event.time
        self._facts.charts = ChartList(
            metrics=tuple(config.get("metrics") or ()),
            has_eval=bool((config.get("data") or {}).get("eval")),
        )

    @_fold.register
    def _fold_job_resumed(self, event: JobResumed) -> None:
        # The curves stay: a resumed job continues its log.
        self._facts.pool = event.pool
        self._facts.min_workers = event.min_workers
        self._facts.max_workers = event.max_workers
        self._facts.ended_at = None
        self._facts.error = None
        self._facts.reason = ""
        self._workers.restart(self._num_steps)
        self._set_world_size(0, event.time)
        self._pace.rewind()
        self._mark(event, "resumed", f"Resumed on pool {event.pool}")

    @_fold.register
    def _fold_job_planned(self, event: JobPlanned) -> None:
        self._plan = event
        per_epoch = event.steps_per_epoch
        self._facts.total_steps = event.total_steps
        self._facts.epochs = event.total_steps / per_epoch if per_epoch else None
        self._facts.global_batch_size = event.global_batch_size
        self._facts.num_parameters = event.num_parameters
        self._facts.num_trained_parameters = event.num_trained_parameters
        self._facts.charts = replace(self._facts.charts, has_eval=event.num_eval_samples > 0)

    @_fold.register
    def _fold_job_status_changed(self, event: JobStatusChanged) -> None:
        facts, previous = self._facts, self._facts.status
        self._facts.status = event.status
        self._facts.reason = event.reason
        if event.status == previous:  # only the reason has changed
            return
        if event.status == "running":
            self._freshness.start_training(event.time)
            if previous in STALLED and facts.step:
                self._mark(event, "resumed", f"Resumed after it was {previous}")
        if event.status in TERMINAL_STATUSES:
            self._facts.ended_at = event.time
            if event.status == "finished" and facts.step:
                facts.total_steps = facts.step  # early stopping
            self._workers.end(self._num_steps)
        elif event.status in STALLED:
            # The ranks of a paused job keep their state and still count; a waiting job has no
            # ranks.
            self._workers.stall("paused" if event.status == "paused" else "")
            num_ranks = self._workers.num_ranks() if event.status == "paused" else 0
            self._set_world_size(num_ranks, event.time)
        if event.status in ("paused", "waiting", "failed") and facts.started_at is not None:
            self._mark(event, event.status, event.status.capitalize())

    @_fold.register
    def _fold_workers_scaled(self, event: WorkersScaled) -> None:
        self._facts.min_workers = event.min_workers
        self._facts.max_workers = event.max_workers

    @_fold.register
    def _fold_worker_joined(self, event: WorkerJoined) -> None:
        self._workers.join(event)

    @_fold.register
    def _fold_worker_warmed(self, event: WorkerWarmed) -> None:
        self._workers.warm(event.worker, event.trainer_pid)

    @_fold.register
    def _fold_generation_formed(self, event: GenerationFormed) -> None:
        if event.step < self._facts.step:
            self._rewind_to(event.step)
        # Elapsed time starts at the first generation. Its workers did not join later, so they get
        # no markers.
        is_first = self._facts.started_at is None
        if is_first:
            self._facts.started_at = event.time
        joined = self._workers.form(event.ranks, event.trainer_pids, self._num_steps)
        self._set_world_size(event.world_size, event.time)
        if joined and not is_first:
            self._mark(event, "join", f"{', '.join(joined)} joined, now {event.world_size}")
        self._facts.num_generations += 1
        self._facts.stall_s = event.stall_s

    @_fold.register
    def _fold_job_restored(self, event: JobRestored) -> None:
        if event.step < self._facts.step:
            self._rewind_to(event.step)
        best = self._facts.best
        is_undone = best is not None and best.step > event.step  # the weights are older
        self._facts.num_undone += event.num_undone
        self._facts.best = None if is_undone else best
        self._mark(event, "restored", restored_text(event))

    @_fold.register
    def _fold_step_completed(self, event: StepCompleted) -> None:
        # Usually, a rewind was already announced by the new generation or the restore. Cut the
        # curves in any case, because a curve's positions must not decrease.
        if event.step <= self._facts.step:
            self._rewind_to(event.step - 1)
        facts = self._facts
        self._num_steps += 1
        fall_s, self._step_at = fall_of(self._step_at, event.time), event.time
        if facts.started_at is None:
            facts.started_at = event.time
        facts.started_at -= fall_s
        if facts.submitted_at is not None:
            facts.submitted_at -= fall_s
        facts.step, facts.epoch = event.step, event.epoch
        facts.loss, facts.lr, facts.metrics = event.loss, event.lr, event.metrics
        facts.charts = with_metrics(facts.charts, event.metrics)
        if self._plan is not None:
            facts.total_steps = self._plan.total_steps_after(event)
            facts.global_batch_size = self._plan.batch_size_of(event.world_size)
        self._pace.add_step(event)
        self.curves.add_step(event, event.time - facts.started_at)
        if event.world_size != facts.world_size:
            self._set_world_size(event.world_size, event.time)

    @_fold.register
    def _fold_step_undone(self, event: StepUndone) -> None:
        self._facts.num_undone += 1

    @_fold.register
    def _fold_rank_timed(self, event: RankTimed) -> None:
        self._workers.time(event)

    @_fold.register
    def _fold_cost_updated(self, event: CostUpdated) -> None:
        saved_usd = max(0.0, event.on_demand_usd - event.spent_usd)
        self._facts.cost = CostSummary(
            spent_usd=event.spent_usd, saved_usd=saved_usd, wasted_usd=event.wasted_usd
        )

    @_fold.register
    def _fold_eval_completed(self, event: EvalCompleted) -> None:
        self._pace.add_eval(event)
        self.curves.add_eval(event)
        self._facts.eval = LatestEval(
            step=event.step,
            epoch=event.epoch,
            samples=event.samples,
            loss=event.loss,
            metrics=event.metrics,
        )

    @_fold.register
    def _fold_eval_scored(self, event: EvalScored) -> None:
        self.curves.add_eval(event)
        facts = self._facts
        facts.charts = with_metrics(facts.charts, event.scores)
        latest = facts.eval
        # With ``eval.loss: false``, the evaluation has no other event.
        if latest is None or latest.step != event.step:
            latest = LatestEval(
                step=event.step, epoch=facts.epoch, samples=event.samples, loss=None, metrics={}
            )
        facts.eval = replace(latest, metrics={**latest.metrics, **event.scores})

    @_fold.register
    def _fold_exhibit(self, event: ExhibitStored | ExhibitsRemoved) -> None:
        apply_exhibit(self.exhibits, event)
        self._has_new_exhibits = True

    @_fold.register
    def _fold_best_reached(self, event: BestReached) -> None:
        self._facts.best = BestValue(step=event.step, metric=event.metric, value=event.value)

    @_fold.register
    def _fold_preemption_noticed(self, event: PreemptionNoticed) -> None:
        left_s = max(0.0, event.deadline - event.time)
        self._workers.mark(event.worker, "leaving", "preemption", self._num_steps)
        self._facts.num_preempted += 1
        self._mark(event, "notice", f"{event.worker} to be preempted in {seconds(left_s)}")

    @_fold.register
    def _fold_rebalance_recommended(self, event: RebalanceRecommended) -> None:
        self._mark(event, "notice", f"{event.worker} likely to be preempted")

    @_fold.register
    def _fold_fault_injected(self, event: FaultInjected) -> None:
        self._mark(event, "notice", f"Fault {event.fault} injected into {event.worker}")

    @_fold.register
    def _fold_worker_left(self, event: WorkerLeft) -> None:
        if self.is_terminal or event.reason == JOB_ENDED:
            return  # keep the table as it was when the job ended
        self._workers.mark(event.worker, "left", event.reason, self._num_steps)
        self._count_if_paused(event.time)
        self._mark(event, "left", f"{event.worker} left ({event.reason})")

    @_fold.register
    def _fold_worker_lost(self, event: WorkerLost) -> None:
        self._workers.mark(event.worker, "lost", event.cause, self._num_steps)
        self._count_if_paused(event.time)
        self._facts.num_lost += 1
        self._mark(event, "lost", f"{event.worker} lost ({event.cause})")

    @_fold.register
    def _fold_checkpoint_committed(self, event: CheckpointCommitted) -> None:
        self._freshness.commit(event.time, event.duration_s)
        previous = self._facts.checkpoint
        self._facts.checkpoint = LatestCheckpoint(
            step=event.step,
            time=event.time,
            size_bytes=event.size_bytes,
            count=1 + (previous.count if previous else 0),
        )
        self._markers.add(event, "checkpoint", event.step, f"Checkpoint of step {event.step:,}")
        self.lists_version += 1

    @_fold.register
    def _fold_checkpoint_interval_chosen(self, event: CheckpointIntervalChosen) -> None:
        self._freshness.choose(event.interval_s)

    @_fold.register
    def _fold_checkpoint_failed(self, event: CheckpointFailed) -> None:
        self._freshness.fail(event.step, event.error)
        self._mark(event, "failed", f"Checkpoint of step {event.step:,} failed")

    @_fold.register
    def _fold_user_error_raised(self, event: UserErrorRaised) -> None:
        self._facts.error = ErrorSummary(
            error=event.error,
            traceback=event.traceback,
            workers=tuple(event.workers),
            step=event.step,
        )
        self._mark(event, "failed", event.error)

    # --- parts of the fold ---

    def _startup_event(self, event: Event) -> None:
        startup = self._startup
        was_over = startup.is_over
        startup.apply(event)
        if isinstance(event, StepCompleted) and not was_over:
            stages = {s.name: s.took_s for s in startup.stages() if s.took_s is not None}
            if stages:
                self._add_entry(event, first_step_line(stages))

    def _list_event(self, event: Event) -> None:
        # A stack dump arrives as one log line per frame. Its first line makes an entry, and each
        # further line changes the text of that entry.
        dump = self._dumps.add(event) if isinstance(event, LogLine) else None
        if dump is None:
            line = self._line_of(event)
            if line is not None:
                self._add_entry(event, line)
        elif dump.seq == event.seq:
            self._add_entry(event, dump.describe(self._cell_numbers()))
        else:
            line = dump.describe(self._cell_numbers())
            self.lists_version += self._entries.amend(dump.seq, line.text)

    def _line_of(self, event: Event) -> Line | None:
        line, facts = describe(event), self._facts
        if line is None or not isinstance(event, JobStatusChanged):
            return line
        # Each job waits for its first workers. That is a warning only if one was lost.
        if event.status == "waiting" and not self._startup.is_over and not facts.num_lost:
            return replace(line, level="info")
        # The entry of the error is above it.
        if facts.error is not None and event.reason == facts.error.error:
            return replace(line, text=event.status.capitalize())
        return line

    def _add_entry(self, event: Event, line: Line) -> None:
        self._entries.add(event, line)
        self.lists_version += 1

    def _mark(self, event: Event, kind: str, text: str) -> None:
        self._markers.add(event, kind, self._facts.step, text)
        self.lists_version += 1

    def _set_world_size(self, world_size: int, time: float) -> None:
        facts = self._facts
        facts.world_size = world_size
        elapsed_s = None if facts.started_at is None else time - facts.started_at
        self.curves.add_world_size(world_size, step=facts.step, elapsed_s=elapsed_s)

    def _count_if_paused(self, time: float) -> None:
        # The world size of a running job changes when the next generation forms.
        if self.status == "paused":
            self._set_world_size(self._workers.num_ranks(), time)

    def _rewind_to(self, step: int) -> None:
        self.curves.rewind_to(step)
        self._facts.step = step
        self._pace.rewind()
        self.rewinds += 1  # views cannot remove points, so feeds send a reset

    def _samples_per_s(self) -> float | None:
        recent = self._pace.samples_per_s()
        return 0.0 if self.status in STALLED and recent is not None else recent

    def _progress(self) -> float | None:
        total = self._facts.total_steps
        return min(1.0, self._facts.step / total) if total else None

    def _eta_s(self) -> float | None:
        total = self._facts.total_steps
        if self.status != "running" or not total:
            return None
        return self._pace.remaining_s(self._facts.step, total)


def with_metrics(charts: ChartList, metrics: Iterable[str]) -> ChartList:
    """Return the charts, with one added for each metric that a ``step`` function returns."""
    new = tuple(name for name in metrics if name not in charts.metrics)
    return replace(charts, metrics=charts.metrics + new) if new else charts
