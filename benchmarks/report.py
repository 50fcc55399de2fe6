"""What every benchmark writes: figures with the machine that gave them, and a table."""

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
    """Return what a figure depends on besides the software."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "load_1min": os.getloadavg()[0],
        "cuda_devices": torch.cuda.device_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "measured": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that ``share`` of the values do not exceed: the nearest rank.

    >>> percentile([4.0, 1.0, 2.0, 3.0], 0.95)
    4.0
    """
    # Rounded first: 0.95 * 20 must not become 20 through a last bit.
    rank = math.ceil(round(share * len(values), 9))
    return sorted(values)[max(0, rank - 1)]


def median_and_p95(values: Sequence[float]) -> dict[str, float]:
    """Return both, under the names that the JSON files use."""
    return {"median_s": statistics.median(values), "p95_s": percentile(values, 0.95)}


def steady_rate(times: Sequence[float], samples_per_step: int) -> float:
    """Return samples a second over the second half of the steps, from when each was done."""
    half = len(times) // 2
    return (len(times) - 1 - half) * samples_per_step / (times[-1] - times[half])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with aligned columns."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(map(str.ljust, line, widths))} |" for line in lines)


def write(path: Path, result: dict[str, Any]) -> None:
    """Write a result, with the machine, as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**result, "machine": machine()}, indent=2)
    path.write_text(text + "\n", encoding="utf-8")
