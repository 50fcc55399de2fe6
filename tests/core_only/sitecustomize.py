"""Hide the plug-ins of this package and their libraries from each interpreter of a test run.

``make test`` puts this folder first in ``PYTHONPATH`` for the tests of the core, which therefore
show that it works without plug-ins. Those of other packages are still found.
"""

from __future__ import annotations

import importlib.metadata
import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

HIDDEN = ("etrain_jupyter.plugins", "dask_jobqueue", "mlflow", "optuna", "plotly", "wandb")


class CoreFinder(PathFinder):
    """Finds modules in ``sys.path``, except the hidden ones."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return None if fullname in HIDDEN else super().find_spec(fullname, path, target)


def visible_entry_points(**params: Any) -> Any:
    points = _entry_points(**params)
    if params.get("group") != "etrain_jupyter.plugins":
        return points
    return [point for point in points if not point.value.startswith("etrain_jupyter.plugins.")]


_entry_points = importlib.metadata.entry_points
importlib.metadata.entry_points = visible_entry_points
sys.meta_path[:] = [CoreFinder if finder is PathFinder else finder for finder in sys.meta_path]
