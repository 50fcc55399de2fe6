"""Recognize the objects of other libraries by name, without importing these libraries."""

from __future__ import annotations

import sys
from typing import Any

_FRAMES = {
    ("pandas", "DataFrame"),
    ("polars", "DataFrame"),
    ("pyarrow", "Table"),
    ("pyarrow", "RecordBatch"),
}


def is_frame(value: Any) -> bool:
    """Return True for a pandas, Polars or Arrow table in memory."""
    return any(
        (kind.__module__.partition(".")[0], kind.__name__) in _FRAMES
        for kind in type(value).__mro__
    )


def is_polars(value: Any) -> bool:
    """Return True for an object of Polars."""
    return any(kind.__module__.partition(".")[0] == "polars" for kind in type(value).__mro__)


def is_hugging_face(value: Any) -> bool:
    """Return True for a map-style ``Dataset`` of Hugging Face."""
    # The full module name, because a file next to the notebook may be called datasets.py.
    module = sys.modules.get("datasets.arrow_dataset")
    return module is not None and isinstance(value, getattr(module, "Dataset", ()))
