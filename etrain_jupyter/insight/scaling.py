"""Throughput by number of workers, next to linear scaling."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etrain_jupyter.insight.runs import Run, Task

MIN_RATIO = 1.05
"""Ratio of the numbers of workers below which they count as equal: they are means."""


@dataclass(frozen=True, kw_only=True)
class ScalingPoints:
    """Points of a chart of throughput by number of workers."""

    measured: tuple[tuple[int, float, float], ...]
    """Index of a job, its mean number of workers, and its samples per second."""
    ideal: tuple[tuple[tuple[float, float], tuple[float, float]], ...]
    """Per task, the ends of a line: numbers of workers, and samples per second."""


def scaling_points(runs: Sequence[Run], rows: Sequence[Mapping[str, Any]]) -> ScalingPoints | None:
    """Return the points of the jobs that have an efficiency.

    None if no two of them have different numbers of workers.
    """
    by_task: dict[Task, list[int]] = {}
    for index, row in enumerate(rows):
        if not math.isnan(row["efficiency"]):
            by_task.setdefault(runs[index].task, []).append(index)
    measured, ideal = [], []
    for members in by_task.values():
        points = [(i, runs[i].workers, runs[i].samples_per_s) for i in members]
        _, fewest, rate = min(points, key=lambda point: point[1])
        most = max(workers for _, workers, _ in points)
        if most > MIN_RATIO * fewest:
            measured += points
            ideal.append(((fewest, most), (rate, rate * most / fewest)))
    if not measured:
        return None
    return ScalingPoints(measured=tuple(measured), ideal=tuple(ideal))
