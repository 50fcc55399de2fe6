"""A job as one row of a list: its snapshot without the long parts, and its loss as a sparkline."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from etrain_jupyter.notebook.dashboard.job_view import JobView
from etrain_jupyter.notebook.dashboard.series import means

MAX_CURVE_POINTS = 48
"""Maximum points in the sparkline: at least one per pixel."""
LONG_FIELDS = ("workers", "events", "markers")


def row_of(view: JobView) -> dict[str, Any]:
    """Return ``snapshot`` without its lists and traceback, and ``loss`` as ``{x, y}``."""
    # Each job's row is sent up to twice per second, so it omits all parts that can become large.
    snapshot = view.snapshot()
    if snapshot.error is not None:
        snapshot = replace(snapshot, error=replace(snapshot.error, traceback=""))
    curve = view.curves.to_dict().get("loss")
    x, y = means(*curve, MAX_CURVE_POINTS) if curve else ((), ())
    return {
        "snapshot": snapshot.to_json(without=LONG_FIELDS),
        "loss": {
            "x": [round(float(step), 1) for step in x],
            # JSON has no NaN: null is a gap in the sparkline.
            "y": [float(f"{v:.4g}") if abs(v) < float("inf") else None for v in map(float, y)],
        },
    }
