"""Measure a job's pace and estimate its remaining time."""

from __future__ import annotations

import statistics
from collections import deque

from etrain_jupyter.log.blocks import StepRun
from etrain_jupyter.log.events import EvalCompleted, StepCompleted

RATE_WINDOW = 129
"""Number of logged steps that are used to estimate the remaining time."""
SMOOTH_WINDOW = 15
"""Number of logged steps whose median throughput is shown."""


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
