"""A job as one row of a list: its picture without the long parts, and its loss as a small curve."""

from __future__ import annotations

from typing import Any

from etrain_jupyter.notebook.dashboard.series import means
from etrain_jupyter.notebook.dashboard.snapshot import JobView

MAX_CURVE_POINTS = 48
"""More than the small curve has pixels for."""


def row_of(view: JobView) -> dict[str, Any]:
    """Return ``snapshot`` without its lists and tracebacks, and ``loss`` as ``{x, y}``."""
    snapshot = view.snapshot(has_lists=False)
    del snapshot["workers"]
    if snapshot["error"]:
        snapshot["error"] = snapshot["error"] | {"traceback": ""}
    curve = view.series().get("loss")
    x, y = means(*curve, MAX_CURVE_POINTS) if curve else ((), ())
    return {
        "snapshot": snapshot,
        "loss": {
            "x": [round(float(step), 1) for step in x],
            # JSON has no NaN: the curve has a gap there.
            "y": [float(f"{v:.4g}") if abs(v) < float("inf") else None for v in map(float, y)],
        },
    }
