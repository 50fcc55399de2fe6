"""Elastic data-parallel training from a notebook cell.

Use ``%load_ext etrain_jupyter``, then ``%%etrain distributed``; from Python,
``etrain_jupyter.distributed({...})``. The names below are loaded on first use, so importing the
package does not load torch, IPython, distributed, boto3 or anywidget.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from etrain_jupyter.config.schema import TrainConfig
    from etrain_jupyter.errors import (
        BundleError,
        CellError,
        CheckpointError,
        ConfigError,
        EtrainError,
        JobFailedError,
        JobLostError,
        JobNotFoundError,
        PoolError,
    )
    from etrain_jupyter.launch import (
        attach,
        attach_study,
        compare,
        diagnose,
        distributed,
        jobs,
        plan,
        search,
        studies,
    )
    from etrain_jupyter.notebook.job.training_job import TrainingJob
    from etrain_jupyter.notebook.study.study import Study
    from etrain_jupyter.pools.tasks import open_task_workers

__version__ = "0.1.0"

__all__ = [
    "BundleError",
    "CellError",
    "CheckpointError",
    "ConfigError",
    "EtrainError",
    "JobFailedError",
    "JobLostError",
    "JobNotFoundError",
    "PoolError",
    "Study",
    "TrainConfig",
    "TrainingJob",
    "__version__",
    "attach",
    "attach_study",
    "compare",
    "diagnose",
    "distributed",
    "jobs",
    "load_ipython_extension",
    "open_task_workers",
    "plan",
    "search",
    "studies",
    "unload_ipython_extension",
]

_HOMES = {
    "Study": "etrain_jupyter.notebook.study.study",
    "TrainConfig": "etrain_jupyter.config.schema",
    "TrainingJob": "etrain_jupyter.notebook.job.training_job",
    "attach": "etrain_jupyter.launch",
    "attach_study": "etrain_jupyter.launch",
    "compare": "etrain_jupyter.launch",
    "diagnose": "etrain_jupyter.launch",
    "distributed": "etrain_jupyter.launch",
    "jobs": "etrain_jupyter.launch",
    "open_task_workers": "etrain_jupyter.pools.tasks",
    "plan": "etrain_jupyter.launch",
    "search": "etrain_jupyter.launch",
    "studies": "etrain_jupyter.launch",
} | {name: "etrain_jupyter.errors" for name in __all__ if name.endswith("Error")}


def load_ipython_extension(ipython: InteractiveShell) -> None:
    """Register ``%%etrain`` and ``%etrain``."""
    from etrain_jupyter import magics

    magics.load(ipython)


def unload_ipython_extension(ipython: InteractiveShell) -> None:
    """Remove the magics; jobs continue."""
    from etrain_jupyter import magics

    magics.unload(ipython)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
