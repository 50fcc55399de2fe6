"""Durations and throughput of a job, from the columns of its history."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from etrain_jupyter.log.job_record import SET_BACK_S

Columns: TypeAlias = Mapping[str, Sequence[Any]]
"""Columns of ``job.history()``, one row per committed step."""
Floats: TypeAlias = NDArray[np.float64]

BUSY = ("compute_s", "communication_s", "optimizer_s")
"""Parts of a step other than loading."""
MAX_OUTSIDE = 0.1
"""If a job spends more than this share of its time outside its steps, a note reports it."""


def to_floats(values: Sequence[Any] | NDArray[Any]) -> Floats:
    """Return a column as an array, shape ``(num_steps,)``."""
    return np.asarray(values, np.float64)


def step_durations(columns: Columns) -> Floats:
    """Return the duration of each step in seconds, shape ``(num_steps,)``.

    Evaluations, checkpoints and recovery are between steps, so they are not included.
    """
    samples, rate = to_floats(columns["samples"]), to_floats(columns["samples_per_s"])
    # A log may come from another user, so a rate may be zero or not finite.
    is_valid = np.isfinite(rate) & (rate > 0)
    return np.where(is_valid, samples / np.where(is_valid, rate, 1.0), 0.0)


def clock_hours(columns: Columns, gaps: Iterable[tuple[float, float]]) -> Floats:
    """Return the hours since the beginning of the first step, at the end of each step.

    Args:
        columns: One row per committed step.
        gaps: Beginning of each resumed attempt, and the seconds since the end of the previous one,
            which do not count.

    Returns:
        Shape ``(num_steps,)``.
    """
    end = to_floats(columns["time"])
    if not len(end):
        return end
    began = end[0] - step_durations(columns)[0]
    # Where a clock was set back, no time passes. Otherwise, durations would be negative.
    changes = np.diff(end, prepend=end[0])
    since: Floats = end - began - np.where(changes < -SET_BACK_S, changes, 0.0).cumsum()
    for resumed_at, gap_s in gaps:
        if resumed_at > began:
            since[end >= resumed_at] -= gap_s
    since /= 3600
    return since


def busy_durations(columns: Columns) -> Floats:
    """Return the duration of each step without loading, in seconds, shape ``(num_steps,)``."""
    busy: Floats = np.sum([to_floats(columns[name]) for name in BUSY], axis=0)
    return busy


def mean_workers(columns: Columns, durations: Floats) -> float:
    """Return the mean number of workers, weighted by the durations; NaN if all are zero."""
    return divide(float(np.sum(durations * to_floats(columns["world_size"]))), durations.sum())


def divide(amount: float, by: float) -> float:
    """Return ``amount / by``; NaN if ``by`` is zero or not finite."""
    return float(amount / by) if by and np.isfinite(by) else float("nan")
