"""Functions that run inside the scheduler and the workers of an external Dask cluster."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from etrain_jupyter import __version__
from etrain_jupyter.process.gpus import torch_has_cuda
from etrain_jupyter.worker.supervisor import Supervisor

DEVICES = Path("/dev")


def look_here(dask_scheduler: Any = None) -> dict[str, str]:
    """Return the versions installed in this process's environment, and where this process runs.

    Dask pickles this function by name. Where the import fails, Dask returns the import error. On
    the scheduler, Dask passes ``dask_scheduler``.
    """
    found = {
        "host": platform.node(),
        "python_path": sys.executable,
        "python": platform.python_version(),
        "etrain-jupyter": __version__,
        "distributed": _version_of("distributed"),
        "torch": _version_of("torch"),
    }
    if dask_scheduler is not None:
        coordinator = dask_scheduler.plugins.get("etrain-coordinator")
        found["coordinator"] = type(coordinator).__name__ if coordinator else ""
    return found


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def make_supervisor(wanted: str) -> Supervisor:
    """Return a supervisor that uses no resources until there is a job.

    Raises:
        RuntimeError: If a version other than ``wanted`` is installed here, or torch is missing.
    """
    if wanted != __version__:
        raise RuntimeError(f"etrain-jupyter {__version__} is installed there, not {wanted}")
    if not _version_of("torch"):
        raise RuntimeError("torch is not installed there")
    # `rests`: the workers are shared, so keep no spare trainer and send no heartbeats without jobs.
    return Supervisor(device=find_device(), rests=True)


def find_device() -> str:
    """Return the torch device of this worker's trainers, without importing torch.

    A trainer uses the first visible GPU, so each worker must see its own: ``dask-cuda`` and batch
    systems set ``CUDA_VISIBLE_DEVICES``.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        # Spellings of "no GPU": by users, by CUDA's convention, and by batch systems.
        has_gpu = visible.strip() not in ("", "-1", "NoDevFiles")
    else:
        has_gpu = any(DEVICES.glob("nvidia[0-9]*"))
    # Visible devices are renumbered from 0.
    return "cuda:0" if has_gpu and torch_has_cuda() else "cpu"
