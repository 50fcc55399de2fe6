"""The picture of a job as a pure fold over its events.

What goes in decides what comes out; when it came, and cut into which batches, does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import singledispatchmethod
from typing import Any

import numpy as np

from etrain_jupyter.log.blocks import StepRun, runs_of
from etrain_jupyter.log.events import (
    TERMINAL_STATUSES,
    BestReached,
    CheckpointCommitted,
    CheckpointFailed,
    CheckpointIntervalChosen,
    CostUpdated,
    EvalCompleted,
    Event,
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
from etrain_jupyter.notebook.dashboard.controls import controls_of
from etrain_jupyter.notebook.dashboard.entries import Entries, Markers
from etrain_jupyter.notebook.dashboard.event_text import Line, describe, seconds
from etrain_jupyter.notebook.dashboard.facts import first_facts, json_able
from etrain_jupyter.notebook.dashboard.freshness import Freshness
from etrain_jupyter.notebook.dashboard.pace import StepRate
from etrain_jupyter.notebook.dashboard.series import Floats, Series, SmallFloats
from etrain_jupyter.notebook.dashboard.stack_dumps import CellNumbers, StackDumps
from etrain_jupyter.notebook.dashboard.undone import Undone
from etrain_jupyter.notebook.dashboard.workers import WorkerTable

JOB_ENDED = "job ended"
STANDING = frozenset({"paused", "waiting"})
"""Statuses in which a job lives and nobody steps."""
BY_TIME = "time."
"""How the names of curves begin that are drawn over seconds, not over steps."""


class JobView:
    """Everything the screen shows of one job.

    ``add`` takes the job's events in order, in batches of any size; what was seen before (by its
    ``seq``) is passed over, so that a listener may replay. ``snapshot`` and ``series`` read.

    Args:
        job_id: The job.
        cell_numbers: Tells which cell a frame of a stack is in.

    Attributes:
        rewinds: How often the job went back to an older step and the curves were cut.
        lists_version: Grows whenever an entry of the event list or a marker was added.
    """

    def __init__(self, job_id: str = "", cell_numbers: CellNumbers = dict) -> None:
        self._cell_numbers = cell_numbers
        self._dumps = StackDumps()
        self.rewinds = 0
        self.lists_version = 0
        self._facts = first_facts(job_id)
        self._last_seq = 0
        self._num_steps = 0
        self._workers = WorkerTable()
        self._series: dict[str, Series] = {}
        self._undone = Undone()
        self._num_samples = 0
        self._entries = Entries()
        self._markers = Markers()
        self._pace = StepRate()
        self._freshness = Freshness()
        self._plan: JobPlanned | None = None

    @property
    def status(self) -> str:
        """The job's status, a ``JobStatus``."""
        return str(self._facts["status"])

    @property
    def is_terminal(self) -> bool:
        """Tell whether the job is over."""
        return self.status in TERMINAL_STATUSES

    def add(self, events: Iterable[Event]) -> None:
        """Take the next events."""
        for item in runs_of(events):
            if not isinstance(item, StepRun):
                self._take(item)
            elif item.first_seq > self._last_seq:
                self._take_run(item)
            else:
                for event in item.events():
                    self._take(event)

    def _take(self, event: Event) -> None:
        if event.seq and event.seq <= self._last_seq:
            return
        self._last_seq = event.seq or self._last_seq
        self._facts["updated_at"] = event.time
        self._facts["generation"] = max(self._facts["generation"], event.generation)
        self._fold(event)
        self._enter(event)

    def _take_run(self, run: StepRun) -> None:
        """Take steps that differ little: those between first and last only go into the curves."""
        self._take(run.first)
        rest = run.inner()
        self._num_steps += len(rest)
        self._pace.add_run(rest)
        steps = rest.column("step")
        samples = self._num_samples + np.cumsum(rest.column("samples"))
        self._num_samples = int(samples[-1]) if len(rest) else self._num_samples
        self._series["samples"].extend(steps, samples)
        self._series["elapsed_s"].extend(steps, rest.column("time") - self._facts["started_at"])
        for name in ("loss", "lr", "samples_per_s"):
            self._series[name].extend(steps, rest.column(name))
        for name, column in rest.metrics().items():
            self._series[f"metrics.{name}"].extend(steps, column)
        self._take(run.last)

    def snapshot(self, *, has_lists: bool = True) -> dict[str, Any]:
        """Return the picture as JSON-able data.

        Numbers that JSON lacks are strings that JavaScript reads: ``NaN``, ``Infinity``.

        Args:
            has_lists: Whether ``events`` and ``markers`` are in it: see ``lists_version``.
        """
        facts = self._facts
        ended = facts["updated_at"] if facts["ended_at"] is None else facts["ended_at"]
        started = facts["started_at"]
        picture = facts | {
            "progress": self._progress(),
            "eta_s": self._eta_s(),
            "elapsed_s": None if started is None else ended - started,
            "samples_per_s": self._samples_per_s(),
            "checkpoint_due": self._freshness.to_dict(
                step_s=self._pace.step_s(),
                steps_per_epoch=self._plan.steps_per_epoch if self._plan else None,
            ),
            "controls": controls_of(self.status, num_training=self._workers.num_training()),
            "workers": self._workers.to_list(self._num_steps),
        }
        if has_lists:
            picture |= {"events": self._entries.to_list(), "markers": self._markers.to_list()}
        return {key: json_able(value) for key, value in picture.items()}

    def series(self) -> dict[str, tuple[Floats, SmallFloats]]:
        """Return every curve as ``(x, y)`` over steps.

        The names are ``loss``, ``lr``, ``samples_per_s``, ``world_size`` (a point where it
        changes), ``metrics.NAME``, ``eval.loss`` and ``eval.NAME``; ``samples`` and ``elapsed_s``
        tell what a step is on the other axes. ``time.world_size`` is over seconds since the start:
        no rewind undoes it. ``undone.NAME`` is what a rewind cut off. The arrays are views: copy
        what has to outlive the next ``add``.
        """
        curves = {name: (series.x, series.y) for name, series in self._series.items()}
        return curves | self._undone.curves()

    # Folding, one method an event.

    @singledispatchmethod
    def _fold(self, event: Event) -> None:
        """Most remarks only enter the event list."""

    @_fold.register
    def _(self, event: JobSubmitted) -> None:
        config = event.config
        self._freshness.promise(config)
        self._facts |= {
            "job_id": event.job_id,
            "name": event.name,
            "pool": event.pool,
            "min_workers": event.min_workers,
            "max_workers": event.max_workers,
            "submitted_at": event.time,
            "charts": {
                "metrics": list(config.get("metrics") or {}),
                "has_eval": bool((config.get("data") or {}).get("eval")),
            },
        }

    @_fold.register
    def _(self, event: JobResumed) -> None:
        self._facts |= {
            "pool": event.pool,
            "min_workers": event.min_workers,
            "max_workers": event.max_workers,
            "ended_at": None,
            "error": None,
            "reason": "",
        }
        self._workers.begin_anew(self._num_steps)
        self._set_world_size(0, event.time)
        self._pace.rewind()
        self._mark(event, "resumed", f"Resumed on pool {event.pool}")

    @_fold.register
    def _(self, event: JobPlanned) -> None:
        self._facts |= {
            "total_steps": event.total_steps,
            "epochs": event.total_steps / event.steps_per_epoch if event.steps_per_epoch else None,
            "global_batch_size": event.global_batch_size,
            "num_parameters": event.num_parameters,
        }
        self._plan = event
        self._facts["charts"]["has_eval"] = event.num_eval_samples > 0

    @_fold.register
    def _(self, event: JobStatusChanged) -> None:
        facts = self._facts
        before = facts["status"]
        facts["status"], facts["reason"] = event.status, event.reason
        if event.status == before:
            return
        if event.status == "running":
            self._freshness.train_from(event.time)
            if before in STANDING and facts["step"]:
                self._mark(event, "resumed", f"Running again after it was {before}")
        if event.status in TERMINAL_STATUSES:
            facts["ended_at"] = event.time
            if event.status == "finished" and facts["step"]:
                facts["total_steps"] = facts["step"]  # it may have ended before its time
            self._workers.end(self._num_steps)
        elif event.status in STANDING:
            self._workers.stand_still("paused" if event.status == "paused" else "")
            num_ranks = self._workers.num_ranks() if event.status == "paused" else 0
            self._set_world_size(num_ranks, event.time)
        if event.status in ("paused", "waiting", "failed") and facts["started_at"] is not None:
            self._mark(event, event.status, event.status.capitalize())

    @_fold.register
    def _(self, event: WorkersScaled) -> None:
        self._facts["min_workers"] = event.min_workers
        self._facts["max_workers"] = event.max_workers

    @_fold.register
    def _(self, event: WorkerJoined) -> None:
        self._workers.join(event)

    @_fold.register
    def _(self, event: WorkerWarmed) -> None:
        self._workers.warm(event.worker, event.trainer_pid)

    @_fold.register
    def _(self, event: GenerationFormed) -> None:
        if event.step < self._facts["step"]:
            self._rewind_to(event.step)
        is_first = self._facts["started_at"] is None
        if is_first:
            self._facts["started_at"] = event.time
        joined = self._workers.form(event.ranks, event.trainer_pids, self._num_steps)
        self._set_world_size(event.world_size, event.time)
        if joined and not is_first:
            self._mark(event, "join", f"{', '.join(joined)} joined, now {event.world_size}")
        self._facts["num_generations"] += 1
        self._facts["stall_s"] = event.stall_s

    @_fold.register
    def _(self, event: JobRestored) -> None:
        if event.step < self._facts["step"]:
            self._rewind_to(event.step)
        self._facts["num_undone"] += event.num_undone
        best = self._facts["best"]
        if best is not None and best["step"] > event.step:
            self._facts["best"] = None
        again = f", {event.num_undone:,} steps are trained again" if event.num_undone else ""
        self._mark(event, "restored", f"Restored the state of step {event.step:,}{again}")

    @_fold.register
    def _(self, event: StepCompleted) -> None:
        if event.step <= self._facts["step"]:
            self._rewind_to(event.step - 1)
        self._num_steps += 1
        self._num_samples += event.samples
        if self._facts["started_at"] is None:
            self._facts["started_at"] = event.time
        self._facts |= {
            "step": event.step,
            "epoch": event.epoch,
            "loss": event.loss,
            "lr": event.lr,
            "metrics": event.metrics,
        }
        if self._plan is not None:
            self._facts["total_steps"] = self._plan.total_steps_after(event)
        self._pace.add_step(event)
        self._point("loss", event.step, event.loss)
        self._point("lr", event.step, event.lr)
        self._point("samples", event.step, self._num_samples)
        self._point("elapsed_s", event.step, event.time - self._facts["started_at"])
        self._point("samples_per_s", event.step, event.samples_per_s)
        for name, value in event.metrics.items():
            self._point(f"metrics.{name}", event.step, value)
        charted = self._facts["charts"]["metrics"]
        charted += [name for name in event.metrics if name not in charted]  # those of a ``step``
        if event.world_size != self._facts["world_size"]:
            self._set_world_size(event.world_size, event.time)
        if self._plan is not None:
            self._facts["global_batch_size"] = self._plan.batch_size_of(event.world_size)

    @_fold.register
    def _(self, event: StepUndone) -> None:
        self._facts["num_undone"] += 1

    @_fold.register
    def _(self, event: RankTimed) -> None:
        self._workers.time(event)

    @_fold.register
    def _(self, event: CostUpdated) -> None:
        self._facts["cost"] = {
            "spent_usd": event.spent_usd,
            "saved_usd": max(0.0, event.on_demand_usd - event.spent_usd),
            "wasted_usd": event.wasted_usd,
        }

    @_fold.register
    def _(self, event: EvalCompleted) -> None:
        self._pace.add_eval(event)
        self._facts["eval"] = {
            "step": event.step,
            "epoch": event.epoch,
            "samples": event.samples,
            "loss": event.loss,
            "metrics": event.metrics,
        }
        for name, value in {"loss": event.loss, **event.metrics}.items():
            self._point(f"eval.{name}", event.step, value)

    @_fold.register
    def _(self, event: BestReached) -> None:
        self._facts["best"] = {
            "step": event.step,
            "metric": event.metric,
            "value": event.value,
        }

    @_fold.register
    def _(self, event: PreemptionNoticed) -> None:
        left_s = max(0.0, event.deadline - event.time)
        self._workers.mark(event.worker, "leaving", "preemption", self._num_steps)
        self._facts["num_preempted"] += 1
        self._mark(event, "notice", f"{event.worker} to be preempted in {seconds(left_s)}")

    @_fold.register
    def _(self, event: RebalanceRecommended) -> None:
        self._mark(event, "notice", f"{event.worker} likely to be preempted")

    @_fold.register
    def _(self, event: FaultInjected) -> None:
        self._mark(event, "notice", f"{event.fault} of {event.worker} on purpose")

    @_fold.register
    def _(self, event: WorkerLeft) -> None:
        if self.is_terminal or event.reason == JOB_ENDED:
            return  # everybody goes when it is over: the table keeps who was there at the end
        self._workers.mark(event.worker, "left", event.reason, self._num_steps)
        self._count_if_paused(event.time)
        self._mark(event, "left", f"{event.worker} left ({event.reason})")

    @_fold.register
    def _(self, event: WorkerLost) -> None:
        self._workers.mark(event.worker, "lost", event.cause, self._num_steps)
        self._count_if_paused(event.time)
        self._facts["num_lost"] += 1
        self._mark(event, "lost", f"{event.worker} lost ({event.cause})")

    @_fold.register
    def _(self, event: CheckpointCommitted) -> None:
        self._freshness.commit(event.time, event.duration_s)
        before = self._facts["checkpoint"] or {"count": 0}
        self._facts["checkpoint"] = {
            "step": event.step,
            "time": event.time,
            "size_bytes": event.size_bytes,
            "count": before["count"] + 1,
        }
        self._markers.add(event, "checkpoint", event.step, f"Checkpoint of step {event.step:,}")
        self.lists_version += 1

    @_fold.register
    def _(self, event: CheckpointIntervalChosen) -> None:
        self._freshness.choose(event.interval_s)

    @_fold.register
    def _(self, event: CheckpointFailed) -> None:
        self._freshness.fail(event.step, event.error)
        self._mark(event, "failed", f"Checkpoint of step {event.step:,} failed")

    @_fold.register
    def _(self, event: UserErrorRaised) -> None:
        self._facts["error"] = {
            "error": event.error,
            "traceback": event.traceback,
            "workers": event.workers,
            "step": event.step,
        }
        self._mark(event, "failed", event.error)

    # What the folding above is made of.

    def _enter(self, event: Event) -> None:
        """Put an event into the list; the lines of one dump of stacks share an entry."""
        dump = self._dumps.add(event) if isinstance(event, LogLine) else None
        if dump is None:
            line = describe(event)
            if line is not None:
                self._list(event, line)
        elif dump.seq == event.seq:
            self._list(event, dump.describe(self._cell_numbers()))
        else:
            self._amend(dump.seq, dump.describe(self._cell_numbers()))

    def _list(self, event: Event, line: Line) -> None:
        self._entries.add(event, line)
        self.lists_version += 1

    def _amend(self, seq: int, line: Line) -> None:
        """Say something else in an entry, if it is still in the list."""
        self.lists_version += self._entries.amend(seq, line.text)

    def _mark(self, event: Event, kind: str, text: str) -> None:
        self._markers.add(event, kind, self._facts["step"], text)
        self.lists_version += 1

    def _point(self, name: str, x: float, y: float) -> None:
        self._series.setdefault(name, Series()).append(x, y)

    def _set_world_size(self, world_size: int, time: float) -> None:
        self._facts["world_size"] = world_size
        places = {"world_size": float(self._facts["step"])}
        if self._facts["started_at"] is not None:
            places[f"{BY_TIME}world_size"] = time - self._facts["started_at"]
        for name, x in places.items():
            curve = self._series.get(name)
            if curve is None or not len(curve) or curve.y[-1] != world_size:
                self._point(name, x, world_size)

    def _count_if_paused(self, time: float) -> None:
        # Otherwise the next generation says how many there are.
        if self.status == "paused":
            self._set_world_size(self._workers.num_ranks(), time)

    def _samples_per_s(self) -> float | None:
        recent = self._pace.samples_per_s()
        return 0.0 if self.status in STANDING and recent is not None else recent

    def _rewind_to(self, step: int) -> None:
        """The job resumed from an older step: what came after it did not happen."""
        for name, series in self._series.items():
            if not name.startswith(BY_TIME):
                self._undone.keep(name, series, step)
                series.cut_from(step + 1)
        samples = self._series.get("samples")
        self._num_samples = int(samples.y[-1]) if samples else 0
        self._facts["step"] = step
        self._pace.rewind()
        self.rewinds += 1

    def _progress(self) -> float | None:
        total: int | None = self._facts["total_steps"]
        return min(1.0, self._facts["step"] / total) if total else None

    def _eta_s(self) -> float | None:
        total = self._facts["total_steps"]
        if self.status != "running" or not total:
            return None
        return self._pace.remaining_s(self._facts["step"], total)
