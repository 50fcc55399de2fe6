"""Statistics, tables and JSON files that all benchmarks share."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


def machine() -> dict[str, Any]:
    """Describe the machine, the software versions and the time of the measurement."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "load_1min": os.getloadavg()[0],
        "cuda_devices": torch.cuda.device_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "measured": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def percentile(values: Sequence[float], share: float) -> float:
    """Return a percentile by the nearest-rank method; ``share`` is between 0 and 1.

    >>> percentile([4.0, 1.0, 2.0, 3.0], 0.95)
    4.0
    """
    # Round first, so that a floating-point error does not turn 0.95 * 20 = 19 into rank 20.
    rank = math.ceil(round(share * len(values), 9))
    return sorted(values)[max(0, rank - 1)]


def median_and_p95(values: Sequence[float]) -> dict[str, float]:
    """Return the median and the 95th percentile under their JSON keys."""
    return {"median_s": statistics.median(values), "p95_s": percentile(values, 0.95)}


def interval_of(values: Sequence[float]) -> dict[str, float]:
    """Return the median and its 95 % confidence interval, which assumes no distribution.

    The number of values below the true median is binomial, so the interval is between two of the
    sorted values.

    >>> interval_of([1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6])
    {'median': 1.3, 'low': 1.0, 'high': 1.6}
    """
    ordered, count = sorted(values), len(values)
    below, outside = 0.0, 0
    while below + math.comb(count, outside) / 2**count <= 0.025:
        below += math.comb(count, outside) / 2**count
        outside += 1
    first = max(0, outside - 1)
    return {
        "median": statistics.median(ordered),
        "low": ordered[first],
        "high": ordered[count - 1 - first],
    }


def steady_rate(times: Sequence[float], samples_per_step: int) -> float:
    """Return samples per second over the second half of the steps, given completion times."""
    half = len(times) // 2
    return (len(times) - 1 - half) * samples_per_step / (times[-1] - times[half])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with aligned columns."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(map(str.ljust, line, widths))} |" for line in lines)


def write(path: Path, result: dict[str, Any]) -> None:
    """Write a result and the description of the machine as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**result, "machine": machine()}, indent=2)
    path.write_text(text + "\n", encoding="utf-8")
