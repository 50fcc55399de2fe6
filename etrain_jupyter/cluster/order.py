"""What was submitted, and what its trainers said of themselves."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etrain_jupyter.config.schema import TrainConfig

LAST_LINES = 400
"""Printed lines kept of each trainer, in case it crashes or hangs: Python's report of one thread
has up to a hundred, and there are several threads."""


@dataclass(kw_only=True)
class Order:
    """What was submitted."""

    job_id: str
    name: str
    run_dir: Path
    config: dict[str, Any]
    bundle: bytes
    pool: str = "local"
    cwd: str = ""
    min_workers: int = 1
    max_workers: int = 1
    faults: list[dict[str, Any]] = field(default_factory=list)
    """Faults on purpose, see ``deliberate``."""

    @property
    def checkpoints(self) -> str:
        """Where its checkpoints go: the run folder, or its own one under ``checkpoint.to``."""
        to = (self.config.get("checkpoint") or {}).get("to")
        return str(Path(to).expanduser() / self.job_id) if to else str(self.run_dir)

    @property
    def num_shards(self) -> int | None:
        """Into how many shards each step is cut; None without ``reproducible``."""
        if not self.config.get("reproducible"):
            return None
        return TrainConfig.model_validate(self.config).num_shards()


@dataclass
class TrainerFacts:
    """What one trainer said of itself."""

    worker: str
    started_at: float
    pid: int = 0
    device: str = ""
    gpu: str = ""
    """Its GPU's identifier; empty without one."""
    is_injected: bool = False
    """Whether a fault on purpose will end it, or has."""
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    """What it printed last."""
