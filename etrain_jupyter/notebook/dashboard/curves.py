"""The curves of a job: loss, metrics and throughput over steps, world size over steps and time."""

from __future__ import annotations

import numpy as np

from etrain_jupyter.log.blocks import StepRun
from etrain_jupyter.log.events import EvalCompleted, EvalScored, StepCompleted
from etrain_jupyter.notebook.dashboard.series import Floats, Series, SmallFloats, thin

BY_TIME = "time."
"""Name prefix of curves over seconds since the start; all others are over steps."""
UNDONE = "undone."
"""Name prefix of the curves of undone steps."""
MAX_POINTS = 1000
"""Maximum points per curve of undone steps, since the number of rewinds is not limited."""


class CurveSet:
    """All curves of a job, by name."""

    def __init__(self) -> None:
        self._series: dict[str, Series] = {}
        self._undone = UndoneCurves()
        self._num_samples = 0

    def add_step(self, event: StepCompleted, elapsed_s: float) -> None:
        """Append a step; ``elapsed_s`` counts from the start of the job."""
        self._num_samples += event.samples
        self._append("loss", event.step, event.loss)
        self._append("lr", event.step, event.lr)
        self._append("samples", event.step, self._num_samples)
        self._append("elapsed_s", event.step, elapsed_s)
        self._append("samples_per_s", event.step, event.samples_per_s)
        for name, value in event.metrics.items():
            self._append(f"metrics.{name}", event.step, value)

    def add_run(self, run: StepRun, started_at: float) -> None:
        """Append a run of steps; ``add_step`` has added the step before it."""
        # All steps of the run have the same metrics, so every curve of the run already exists.
        steps = run.column("step")
        samples = self._num_samples + np.cumsum(run.column("samples"))
        self._num_samples = int(samples[-1]) if len(run) else self._num_samples
        self._series["samples"].extend(steps, samples)
        self._series["elapsed_s"].extend(steps, run.column("time") - started_at)
        for name in ("loss", "lr", "samples_per_s"):
            self._series[name].extend(steps, run.column(name))
        for name, column in run.metrics().items():
            self._series[f"metrics.{name}"].extend(steps, column)

    def add_eval(self, event: EvalCompleted | EvalScored) -> None:
        """Append an evaluation."""
        for name, value in event.values.items():
            self._append(f"eval.{name}", event.step, value)

    def add_world_size(self, world_size: int, *, step: int, elapsed_s: float | None) -> None:
        """Append the world size if it has changed; ``elapsed_s`` is None before the job starts."""
        # One curve is over steps, for the charts of a run; the other is over time, to show when
        # workers joined and left.
        positions = {"world_size": float(step)}
        if elapsed_s is not None:
            positions[f"{BY_TIME}world_size"] = elapsed_s
        for name, x in positions.items():
            curve = self._series.get(name)
            if curve is None or not len(curve) or curve.y[-1] != world_size:
                self._append(name, x, world_size)

    def rewind_to(self, step: int) -> None:
        """Remove the points after ``step`` from the curves over steps."""
        # Curves over time keep their points: they show how many workers there were, and when.
        for name, series in self._series.items():
            if not name.startswith(BY_TIME):
                self._undone.keep(name, series, step)
                series.cut_from(step + 1)
        # `cut_from` has removed the undone steps, so the last point counts the samples that still
        # count as trained.
        samples = self._series.get("samples")
        self._num_samples = int(samples.y[-1]) if samples else 0

    def to_dict(self) -> dict[str, tuple[Floats, SmallFloats]]:
        """Return every curve as ``(x, y)`` over steps: views that the next append may change.

        The names are ``loss``, ``lr``, ``samples_per_s``, ``world_size`` (one point per change),
        ``metrics.NAME``, ``eval.loss`` and ``eval.NAME``. ``samples`` and ``elapsed_s`` convert
        steps to the other units of the axis. ``time.world_size`` is over seconds since the start;
        rewinds do not change it. ``undone.NAME`` has the points that a rewind discarded.
        """
        curves = {name: (series.x, series.y) for name, series in self._series.items()}
        return curves | self._undone.to_dict()

    def _append(self, name: str, x: float, y: float) -> None:
        self._series.setdefault(name, Series()).append(x, y)


class UndoneCurves:
    """Keep the last value of each step before it was undone, with a limited number of points.

    The charts draw them faintly, to show how much a rewind discarded and whether the repeated steps
    have similar values.
    """

    def __init__(self) -> None:
        self._curves: dict[str, tuple[Floats, SmallFloats]] = {}

    def keep(self, name: str, series: Series, step: int) -> None:
        """Store the points from ``step`` on, before the curve removes them."""
        #   before          1 2 3 4 5 6 7
        #   rewind to 4     1 2 3 4              undone: 4 5 6 7, so that it starts on the curve
        #   5, then to 2    1 2                  undone: 2 3 4 5 (new) and 6 7 (of the first rewind)
        #
        # Keep only the curves that the charts draw faintly: the loss and the metrics.
        if name != "loss" and not name.startswith("metrics."):
            return
        start = int(np.searchsorted(series.x, step))
        x, y = series.x[start:].copy(), series.y[start:].copy()
        # The curve has no point after the step, so nothing is lost.
        if not len(x) or x[-1] <= step:
            return
        previous = self._curves.get(name)
        if previous is not None:
            # An earlier rewind may have discarded steps beyond those of this one.
            is_beyond = previous[0] > x[-1]
            x, y = np.append(x, previous[0][is_beyond]), np.append(y, previous[1][is_beyond])
        self._curves[name] = thin(x, y, MAX_POINTS)

    def to_dict(self) -> dict[str, tuple[Floats, SmallFloats]]:
        """Return the curves by name."""
        return {UNDONE + name: curve for name, curve in self._curves.items()}
