"""How fast a job goes, and so how long it will take."""

from __future__ import annotations

import statistics
from collections import deque

from etrain_jupyter.log.blocks import StepRun
from etrain_jupyter.log.events import EvalCompleted, StepCompleted

RATE_WINDOW = 129
"""Logged steps from which the remaining time is foretold."""
SMOOTH_WINDOW = 15
"""Logged steps whose median throughput is shown."""


class StepRate:
    """Folds when steps and evaluations were done."""

    def __init__(self) -> None:
        self._instants: deque[tuple[int, float]] = deque(maxlen=RATE_WINDOW)
        self._rates: deque[float] = deque(maxlen=SMOOTH_WINDOW)
        self._num_evals = 0
        self._eval_s = 0.0

    def add_step(self, event: StepCompleted) -> None:
        """A step was committed."""
        self._instants.append((event.step, event.time))
        self._rates.append(event.samples_per_s)

    def add_run(self, run: StepRun) -> None:
        """Steps were committed, one after the other; only the newest matter."""
        steps, times, rates = (
            run.column(name)[-RATE_WINDOW:].tolist() for name in ("step", "time", "samples_per_s")
        )
        self._instants.extend(zip(steps, times, strict=True))
        self._rates.extend(rates)

    def add_eval(self, event: EvalCompleted) -> None:
        """An evaluation was done."""
        self._num_evals += 1
        self._eval_s = event.duration_s

    def rewind(self) -> None:
        """The job went back to an older step: no rate spans that."""
        self._instants.clear()

    def samples_per_s(self) -> float | None:
        """Return the recent throughput; None before the first step."""
        return statistics.median(self._rates) if self._rates else None

    def remaining_s(self, step: int, total_steps: int) -> float | None:
        """Foretell the remaining time; evaluation is added as it was, spread over the steps."""
        step_s = self.step_s()
        if step_s is None or not step:
            return None
        eval_s = self._num_evals * self._eval_s / step
        return max(0, total_steps - step) * max(0.0, step_s + eval_s)

    def step_s(self) -> float | None:
        """Return seconds a step, by a rate that neither stalls nor batches of events upset.

        Each logged step is compared with the one a quarter of the window later; the median of these
        rates ignores what happens seldom, such as a generation forming. None before the third step.
        """
        if len(self._instants) < 3:
            return None
        points = list(self._instants)
        pairs = zip(points, points[max(1, len(points) // 4) :], strict=False)
        return statistics.median((t1 - t0) / (s1 - s0) for (s0, t0), (s1, t1) in pairs)
