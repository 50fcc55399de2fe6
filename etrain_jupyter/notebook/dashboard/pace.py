"""Measure a job's pace: its throughput, its remaining time, and the age of its checkpoint."""

from __future__ import annotations

import statistics
from collections import deque
from typing import Any

from etrain_jupyter.config.fields import Interval
from etrain_jupyter.log.blocks import StepRun
from etrain_jupyter.log.events import EvalCompleted, StepCompleted
from etrain_jupyter.notebook.dashboard.snapshot import CheckpointDue, Snapshot

RATE_WINDOW = 129
"""Number of logged steps that are used to estimate the remaining time."""
SMOOTH_WINDOW = 15
"""Number of logged steps whose median throughput is shown."""
OVERDUE_AFTER = 3
"""Number of intervals after which a checkpoint is overdue: one may be in flight, one late."""
MIN_LIMIT_S = 30.0
"""Minimum time until a checkpoint is overdue, so that short intervals cause no false alarms."""


class StepRate:
    """Track the throughput, based on the times of steps and evaluations."""

    def __init__(self) -> None:
        self._instants: deque[tuple[int, float]] = deque(maxlen=RATE_WINDOW)
        self._rates: deque[float] = deque(maxlen=SMOOTH_WINDOW)
        self._num_evals = 0
        self._eval_s = 0.0

    def add_step(self, event: StepCompleted) -> None:
        """Add a committed step."""
        self._instants.append((event.step, event.time))
        self._rates.append(event.samples_per_s)

    def add_run(self, run: StepRun) -> None:
        """Add a run of committed steps."""
        # Only the newest steps fit into the windows, so do not convert the others to Python
        # numbers.
        steps, times, rates = (
            run.column(name)[-RATE_WINDOW:].tolist() for name in ("step", "time", "samples_per_s")
        )
        self._instants.extend(zip(steps, times, strict=True))
        self._rates.extend(rates)

    def add_eval(self, event: EvalCompleted) -> None:
        """Add an evaluation."""
        self._num_evals += 1
        self._eval_s = event.duration_s

    def rewind(self) -> None:
        """Discard the step times, because a rate must not span a rewind."""
        # Step numbers repeat after a rewind, so the difference between two steps could be zero
        # or negative.
        self._instants.clear()

    def samples_per_s(self) -> float | None:
        """Return the recent throughput; None before the first step."""
        return statistics.median(self._rates) if self._rates else None

    def remaining_s(self, step: int, total_steps: int) -> float | None:
        """Estimate the remaining time, with the time of past evaluations spread over the steps."""
        step_s = self.step_s()
        if step_s is None or not step:
            return None
        eval_s = self._num_evals * self._eval_s / step
        return max(0, total_steps - step) * max(0.0, step_s + eval_s)

    def step_s(self) -> float | None:
        """Return seconds per step, robust against stalls and batched events; None at the start."""
        # Events arrive in batches, so neighbouring steps can have the same time. Compare each step
        # with the one a quarter of the window later:
        #
        #   steps   0 1 2 3 4 5 6 7 ......... 128
        #           |-------------->|
        #             |-------------->|          32 steps apart
        #
        # The median of these rates ignores rare delays, such as a new generation.
        if len(self._instants) < 3:
            return None
        points = list(self._instants)
        pairs = zip(points, points[max(1, len(points) // 4) :], strict=False)
        return statistics.median((t1 - t0) / (s1 - s0) for (s0, t0), (s1, t1) in pairs)


class Freshness:
    """Track when the next checkpoint is overdue, without I/O.

    The clock starts at the last checkpoint or, if that is later, when training last started or
    resumed. Time spent waiting does not count, because no work is at risk then.
    """

    def __init__(self) -> None:
        self._every: Interval | None = None
        self._since: float | None = None
        self._duration_s = 0.0
        self._failed = ""

    def configure(self, config: dict[str, Any]) -> None:
        """Set ``checkpoint.every`` from the JSON form of a job's configuration."""
        text = (config.get("checkpoint") or {}).get("every")
        self._every = Interval.parse(text) if text else None

    def choose(self, interval_s: float) -> None:
        """Set the interval that ``checkpoint.every: auto`` has chosen."""
        self._every = Interval(value=interval_s, unit="s")

    def start_training(self, time: float) -> None:
        """Start the clock when training starts or resumes."""
        # Never move it back, because a checkpoint may have been committed after this event.
        self._since = max(time, self._since or time)

    def commit(self, time: float, duration_s: float) -> None:
        """Restart the clock, because a checkpoint is durable."""
        self._since, self._duration_s, self._failed = time, duration_s, ""

    def fail(self, step: int, error: str) -> None:
        """Record that a checkpoint could not be written."""
        self._failed = f"step {step:,}: {error}"

    def due(self, *, step_s: float | None, steps_per_epoch: int | None) -> CheckpointDue:
        """Return when the next checkpoint is overdue."""
        interval_s = self._interval_s(step_s, steps_per_epoch)
        limit_s = None
        if interval_s is not None:
            # A checkpoint counts once it is durable; assume that this takes as long as last time.
            limit_s = max(OVERDUE_AFTER * interval_s + self._duration_s, MIN_LIMIT_S)
        return CheckpointDue(since=self._since, limit_s=limit_s, failed=self._failed)

    def _interval_s(self, step_s: float | None, steps_per_epoch: int | None) -> float | None:
        every = self._every
        if every is None:
            return None  # `auto` chooses an interval once it has measured a checkpoint
        if every.unit == "s":
            return every.value
        steps = every.value
        if every.unit == "epochs":
            # Without a plan, the length of an epoch and thus the limit is unknown: return None
            # below.
            steps *= steps_per_epoch or 0
        return steps * step_s if step_s is not None and steps else None


def trouble_of(snapshot: Snapshot, now: float) -> str:
    """Return ``failed`` or ``overdue``; empty if checkpoints are in order."""
    due = snapshot.checkpoint_due
    if due.failed:
        return "failed"
    # A paused or waiting job is not training, so no work could be lost.
    if snapshot.status != "running" or due.since is None or due.limit_s is None:
        return ""
    return "overdue" if now - due.since > due.limit_s else ""
