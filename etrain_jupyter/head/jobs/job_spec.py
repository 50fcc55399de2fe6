"""Specification of a submitted job, and facts about its trainers."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etrain_jupyter.config.schema import LogConfig, TrainConfig
from etrain_jupyter.log.event_log import LOG_FILE
from etrain_jupyter.storage.bucket_log.locations import spool_of
from etrain_jupyter.storage.checkpoints import place_of_job

LAST_LINES = 400
"""Number of printed lines kept per trainer, for the report if it crashes or hangs. Python's stack
dump has up to a hundred lines per thread, and there are several threads."""


@dataclass(kw_only=True)
class JobSpec:
    """Specification of a job as submitted by a kernel."""

    job_id: str
    name: str
    run_dir: Path
    """Run folder; for a job in a bucket, this machine's copy of it."""
    config: dict[str, Any]
    bundle_digest: str
    """SHA-256 of the notebook's objects, hexadecimal."""
    bundle_size: int
    """Size of the objects in bytes."""
    bundle_file: str = "bundle"
    """Name of the file in the run folder that contains the objects."""
    pool: str = "local"
    cwd: str = ""
    min_workers: int = 1
    max_workers: int = 1
    resumes: bool = False
    """True if the job has run before, so its run folder already exists."""
    differs: list[str] = field(default_factory=list)
    """Differences from the previous attempt, as text for the log."""
    is_forced: bool = False
    """True if the user forced the resume despite the differences."""
    place: str = ""
    """URL of the job in a bucket; empty for a job in a folder."""
    log_end: int | None = None
    """For a resumed job in a bucket: ``seq`` of the newest event when the kernel found the job
    without a writer. None resumes the job regardless of other writers."""
    fingerprint: dict[str, str] = field(default_factory=dict)
    """Versions installed where the notebook runs (see ``wire.versions``); empty if unknown."""
    faults: list[dict[str, Any]] = field(default_factory=list)
    """Faults to inject; see ``head.coordinator.fault_injection``."""
    pool_s: float = 0.0
    """Seconds until the scheduler of its pool responded, which includes its start; 0 if unknown."""
    notes: list[str] = field(default_factory=list)
    """Text that the kernel printed about the cell, for the log."""

    @property
    def log_path(self) -> Path:
        """Path of its durable log on this machine."""
        return self.run_dir / LOG_FILE

    @property
    def bundle_path(self) -> Path:
        """Path of the file with the notebook's objects, on this machine."""
        return self.run_dir / self.bundle_file

    @property
    def checkpoints(self) -> str:
        """Location of its checkpoints: the run folder, or a folder in ``checkpoint.to``."""
        to = (self.config.get("checkpoint") or {}).get("to")
        return place_of_job(to, self.job_id) if to else self.place or str(self.run_dir)

    @property
    def is_sized(self) -> bool:
        """True for ``workers.target: goodput``: the coordinator then chooses how many to use."""
        return (self.config.get("workers") or {}).get("target") == "goodput"

    @property
    def splits_by_speed(self) -> bool:
        """True for ``batch.split: auto``: a worker's share of a step follows its speed."""
        return (self.config.get("batch") or {}).get("split") == "auto"

    @property
    def is_paced(self) -> bool:
        """True if ``checkpoint.every`` is auto: the coordinator then chooses the interval."""
        return (self.config.get("checkpoint") or {}).get("every") is None

    @property
    def loggers(self) -> dict[str, dict[str, Any]]:
        """Options of its loggers, by name; see ``log.loggers``."""
        return LogConfig.model_validate(self.config.get("log") or {}).loggers_of(self.run_dir)

    @property
    def num_shards(self) -> int | None:
        """Number of shards in a step; None unless ``reproducible`` is set."""
        if not self.config.get("reproducible"):
            return None
        return TrainConfig.model_validate(self.config).num_shards()

    @classmethod
    def from_message(cls, job: dict[str, Any]) -> JobSpec:
        """Build the specification from a kernel's message.

        A job in a bucket gets a run folder on this machine.
        """
        spec = cls(**{**job, "run_dir": Path(job["run_dir"])})
        if spec.place:
            spec.run_dir = spool_of(spec.place)
        return spec


@dataclass
class TrainerFacts:
    """Facts that one trainer reported about itself."""

    worker: str
    started_at: float
    """On the coordinator's clock."""
    pid: int = 0
    device: str = ""
    gpu: str = ""
    """Its GPU's identifier; empty if it has none."""
    is_injected: bool = False
    """True if an injected fault has ended it or will end it."""
    num_starts: int = 0
    """Number of generations whose first step it knows."""
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    """The last lines of its output."""
