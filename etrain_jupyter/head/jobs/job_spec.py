"""What was submitted, and what its trainers said of themselves."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etrain_jupyter.config.schema import LogConfig, TrainConfig
from etrain_jupyter.log.event_log import LOG_FILE
from etrain_jupyter.storage.bucket_log.place import spool_of
from etrain_jupyter.storage.checkpoints import place_of_job

LAST_LINES = 400
"""Printed lines kept of each trainer, in case it crashes or hangs: Python's report of one thread
has up to a hundred, and there are several threads."""


@dataclass(kw_only=True)
class JobSpec:
    """What was submitted."""

    job_id: str
    name: str
    run_dir: Path
    """Its folder; of a job that lies in a bucket, this machine's copy."""
    config: dict[str, Any]
    bundle_digest: str
    """SHA-256 of the notebook's objects, hexadecimal."""
    bundle_size: int
    """Their bytes."""
    bundle_file: str = "bundle"
    """Name of the file with them in the run folder."""
    pool: str = "local"
    cwd: str = ""
    min_workers: int = 1
    max_workers: int = 1
    resumes: bool = False
    """Whether the run folder is that of a job which has been trained before."""
    differs: list[str] = field(default_factory=list)
    """What is not as it was then, in words; for the log."""
    is_forced: bool = False
    """Whether somebody has said that it shall go on whatever differs."""
    place: str = ""
    """URL of its place in a bucket; empty for a job that lies in a folder."""
    log_end: int | None = None
    """Of a job in a bucket that goes on: its newest event when nobody was found to train it; None
    to go on whoever does."""
    fingerprint: dict[str, str] = field(default_factory=dict)
    """What is installed where the notebook runs, see ``node.fingerprint``; empty if it does not
    tell."""
    faults: list[dict[str, Any]] = field(default_factory=list)
    """Faults on purpose, see ``deliberate``."""

    @property
    def log_path(self) -> Path:
        """Its durable log, in the folder of this machine."""
        return self.run_dir / LOG_FILE

    @property
    def bundle_path(self) -> Path:
        """The file with the notebook's objects, on this machine."""
        return self.run_dir / self.bundle_file

    @property
    def checkpoints(self) -> str:
        """Where its checkpoints go: the run folder, or its own one under ``checkpoint.to``."""
        to = (self.config.get("checkpoint") or {}).get("to")
        return place_of_job(to, self.job_id) if to else self.place or str(self.run_dir)

    @property
    def is_paced(self) -> bool:
        """Whether ``checkpoint.every`` is auto: the coordinator says how often."""
        return (self.config.get("checkpoint") or {}).get("every") is None

    @property
    def tensorboard(self) -> Path | None:
        """Where TensorBoard's files go; None without ``log.tensorboard``."""
        log = LogConfig.model_validate(self.config.get("log") or {})
        return log.tensorboard_of(self.job_id, self.run_dir)

    @property
    def num_shards(self) -> int | None:
        """Into how many shards each step is cut; None without ``reproducible``."""
        if not self.config.get("reproducible"):
            return None
        return TrainConfig.model_validate(self.config).num_shards()

    @classmethod
    def from_message(cls, job: dict[str, Any]) -> JobSpec:
        """Return what a kernel sent; a job of a bucket has its folder on this machine."""
        order = cls(**{**job, "run_dir": Path(job["run_dir"])})
        if order.place:
            order.run_dir = spool_of(order.place)
        return order


@dataclass
class TrainerFacts:
    """What one trainer said of itself."""

    worker: str
    started_at: float
    """By the coordinator's clock."""
    pid: int = 0
    device: str = ""
    gpu: str = ""
    """Its GPU's identifier; empty without one."""
    is_injected: bool = False
    """Whether a fault on purpose will end it, or has."""
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    """What it printed last."""
