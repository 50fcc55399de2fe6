"""The public names of the package. ``etrain_jupyter`` loads them on first use."""

from __future__ import annotations

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
from etrain_jupyter.launch import distributed
from etrain_jupyter.notebook.job.open_jobs import attach, compare, diagnose, jobs
from etrain_jupyter.notebook.job.training_job import TrainingJob

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
    "TrainConfig",
    "TrainingJob",
    "attach",
    "compare",
    "diagnose",
    "distributed",
    "jobs",
]
