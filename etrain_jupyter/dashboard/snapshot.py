"""The picture of a job as a pure fold over its events.

What goes in decides what comes out; when it came, and cut into which batches, does not.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from functools import singledispatchmethod
from typing import Any

from etrain_jupyter.dashboard.pace import Pace
from etrain_jupyter.dashboard.series import Floats, Series, SmallFloats
from etrain_jupyter.dashboard.words import Line, describe, seconds
from etrain_jupyter.dashboard.workers import WorkerTable
from etrain_jupyter.events.types import (
    TERMINAL_STATUSES,
    CheckpointCommitted,
    CheckpointFailed,
    EvalCompleted,
    Event,
    FaultInjected,
    GenerationFormed,
    JobPlanned,
    JobRestored,
    JobStatusChanged,
    JobSubmitted,
    PreemptionNoticed,
    StepCompleted,
    StepUndone,
    UserErrorRaised,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
    WorkersScaled,
    WorkerWarmed,
)

JOB_ENDED = "job ended"
MAX_EVENTS = 50
MAX_MARKERS = 300
MAX_CHECKPOINT_MARKERS = 60


class JobView:
    """Everything the screen shows of one job.

    ``add`` takes the job's events in order, in batches of any size; what was seen before (by its
    ``seq``) is passed over, so that a listener may replay. ``snapshot`` and ``series`` read.

    Attributes:
        rewinds: How often the job went back to an older step and the curves were cut.
        lists_version: Grows whenever an entry of the event list or a marker was added.
    """

    def __init__(self, job_id: str = "") -> None:
        self.rewinds = 0
        self.lists_version = 0
        self._facts = _first_facts(job_id)
        self._last_seq = 0
        self._num_steps = 0
        self._workers = WorkerTable()
        self._series: dict[str, Series] = {}
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._markers: deque[dict[str, Any]] = deque(maxlen=MAX_MARKERS)
        self._checkpoint_markers: deque[dict[str, Any]] = deque(maxlen=MAX_CHECKPOINT_MARKERS)
        self._pace = Pace()

    @property
    def status(self) -> str:
        """The job's status, as in ``events.types.STATUSES``."""
        return str(self._facts["status"])

    @property
    def is_terminal(self) -> bool:
        """Tell whether the job is over."""
        return self.status in TERMINAL_STATUSES

    def add(self, events: Iterable[Event]) -> None:
        """Take the next events."""
        for event in events:
            if event.seq and event.seq <= self._last_seq:
                continue
            self._last_seq = event.seq or self._last_seq
            self._facts["updated_at"] = event.time
            self._facts["generation"] = max(self._facts["generation"], event.generation)
            self._fold(event)
            line = describe(event)
            if line is not None:
                self._list(event, line)

    def snapshot(self) -> dict[str, Any]:
        """Return the picture as JSON-able data.

        Numbers that JSON lacks are strings that JavaScript reads: ``NaN``, ``Infinity``.
        """
        facts = self._facts
        ended = facts["updated_at"] if facts["ended_at"] is None else facts["ended_at"]
        started = facts["started_at"]
        picture = facts | {
            "progress": self._progress(),
            "eta_s": self._eta_s(),
            "elapsed_s": None if started is None else ended - started,
            "samples_per_s": self._pace.samples_per_s(),
            "workers": self._workers.to_list(self._num_steps),
            "events": list(self._events),
            "markers": sorted(
                [*self._markers, *self._checkpoint_markers], key=lambda marker: marker["seq"]
            ),
        }
        return {key: _json_able(value) for key, value in picture.items()}

    def series(self) -> dict[str, tuple[Floats, SmallFloats]]:
        """Return every curve as ``(x, y)`` over steps.

        The names are ``loss``, ``lr``, ``samples_per_s``, ``world_size`` (a point where it
        changes), ``metrics.NAME``, ``eval.loss`` and ``eval.NAME``. The arrays are views: copy
        what has to outlive the next ``add``.
        """
        return {name: (series.x, series.y) for name, series in self._series.items()}

    # Folding, one method an event.

    @singledispatchmethod
    def _fold(self, event: Event) -> None:
        """Most remarks only enter the event list."""

    @_fold.register
    def _(self, event: JobSubmitted) -> None:
        config = event.config
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
    def _(self, event: JobPlanned) -> None:
        self._facts |= {
            "total_steps": event.total_steps,
            "epochs": event.total_steps / event.steps_per_epoch if event.steps_per_epoch else None,
            "global_batch_size": event.global_batch_size,
            "num_parameters": event.num_parameters,
        }
        self._facts["charts"]["has_eval"] = event.num_eval_samples > 0

    @_fold.register
    def _(self, event: JobStatusChanged) -> None:
        facts = self._facts
        facts["status"], facts["reason"] = event.status, event.reason
        if event.status in TERMINAL_STATUSES:
            facts["ended_at"] = event.time
            self._workers.end(self._num_steps)
        elif event.status == "waiting":
            self._set_world_size(0)
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
        self._set_world_size(event.world_size)
        if joined and not is_first:
            self._mark(event, "join", f"{', '.join(joined)} joined, now {event.world_size}")
        self._facts["num_generations"] += 1
        self._facts["stall_s"] = event.stall_s

    @_fold.register
    def _(self, event: JobRestored) -> None:
        if event.step < self._facts["step"]:
            self._rewind_to(event.step)
        self._facts["num_undone"] += event.num_undone
        self._mark(event, "restored", f"Restored the state of step {event.step:,}")

    @_fold.register
    def _(self, event: StepCompleted) -> None:
        if event.step <= self._facts["step"]:
            self._rewind_to(event.step - 1)
        self._num_steps += 1
        self._facts |= {
            "step": event.step,
            "epoch": event.epoch,
            "loss": event.loss,
            "lr": event.lr,
            "metrics": event.metrics,
        }
        self._pace.add_step(event)
        self._point("loss", event.step, event.loss)
        self._point("lr", event.step, event.lr)
        self._point("samples_per_s", event.step, event.samples_per_s)
        for name, value in event.metrics.items():
            self._point(f"metrics.{name}", event.step, value)
        if event.world_size != self._facts["world_size"]:
            self._set_world_size(event.world_size)

    @_fold.register
    def _(self, event: StepUndone) -> None:
        self._facts["num_undone"] += 1

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
    def _(self, event: PreemptionNoticed) -> None:
        left_s = max(0.0, event.deadline - event.time)
        self._workers.mark(event.worker, "leaving", "preemption", self._num_steps)
        self._facts["num_preempted"] += 1
        self._mark(event, "notice", f"{event.worker} to be preempted in {seconds(left_s)}")

    @_fold.register
    def _(self, event: FaultInjected) -> None:
        self._mark(event, "notice", f"{event.fault} of {event.worker} on purpose")

    @_fold.register
    def _(self, event: WorkerLeft) -> None:
        if self.is_terminal or event.reason == JOB_ENDED:
            return  # everybody goes when it is over: the table keeps who was there at the end
        self._workers.mark(event.worker, "left", event.reason, self._num_steps)
        self._mark(event, "left", f"{event.worker} left ({event.reason})")

    @_fold.register
    def _(self, event: WorkerLost) -> None:
        self._workers.mark(event.worker, "lost", event.cause, self._num_steps)
        self._facts["num_lost"] += 1
        self._mark(event, "lost", f"{event.worker} lost ({event.cause})")

    @_fold.register
    def _(self, event: CheckpointCommitted) -> None:
        before = self._facts["checkpoint"] or {"count": 0}
        self._facts["checkpoint"] = {
            "step": event.step,
            "time": event.time,
            "size_bytes": event.size_bytes,
            "count": before["count"] + 1,
        }
        text = f"Checkpoint of step {event.step:,}"
        self._checkpoint_markers.append(_marker(event, "checkpoint", event.step, text))
        self.lists_version += 1

    @_fold.register
    def _(self, event: CheckpointFailed) -> None:
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

    def _list(self, event: Event, line: Line) -> None:
        entry = {"seq": event.seq, "time": event.time, "kind": event.kind}
        self._events.append(entry | {"level": line.level, "text": line.text})
        self.lists_version += 1

    def _mark(self, event: Event, kind: str, text: str) -> None:
        self._markers.append(_marker(event, kind, self._facts["step"], text))
        self.lists_version += 1

    def _point(self, name: str, x: float, y: float) -> None:
        self._series.setdefault(name, Series()).append(x, y)

    def _set_world_size(self, world_size: int) -> None:
        self._facts["world_size"] = world_size
        curve = self._series.get("world_size")
        if curve is None or not len(curve) or curve.y[-1] != world_size:
            self._point("world_size", self._facts["step"], world_size)

    def _rewind_to(self, step: int) -> None:
        """The job resumed from an older step: what came after it did not happen."""
        for series in self._series.values():
            series.cut_from(step + 1)
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


def _first_facts(job_id: str) -> dict[str, Any]:
    """What is known of a job before its first event; every key of a snapshot is always there."""
    return {
        "job_id": job_id,
        "name": job_id,
        "status": "submitted",
        "reason": "",
        "pool": "",
        "submitted_at": None,
        "started_at": None,
        "updated_at": 0.0,
        "ended_at": None,
        "step": 0,
        "total_steps": None,
        "epoch": 0,
        "epochs": None,
        "loss": None,
        "lr": None,
        "metrics": {},
        "eval": None,
        "global_batch_size": None,
        "num_parameters": None,
        "world_size": 0,
        "min_workers": None,
        "max_workers": None,
        "generation": 0,
        "num_generations": 0,
        "num_lost": 0,
        "num_preempted": 0,
        "num_undone": 0,
        "stall_s": None,
        "checkpoint": None,
        "error": None,
        "charts": {"metrics": [], "has_eval": False},
    }


def _marker(event: Event, kind: str, step: int, text: str) -> dict[str, Any]:
    return {"seq": event.seq, "step": step, "time": event.time, "kind": kind, "text": text}


def _json_able(value: Any) -> Any:
    """Copy ``value``, with floats that JSON lacks as strings that JavaScript's Number() reads."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _json_able(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_able(item) for item in value]
    return value
