"""One trial of a running study, and the coordinator as its host."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from etrain_jupyter.head.jobs.hosted_job import HostedJob
from etrain_jupyter.head.jobs.job_spec import JobSpec
from etrain_jupyter.rules.search.trial_progress import TrialProgress
from etrain_jupyter.rules.search.verdicts import TrialState


class TrialHost(Protocol):
    """The part of the coordinator that runs trials."""

    @property
    def is_ready(self) -> bool:
        """False while a restarted scheduler waits for its workers."""

    @property
    def capacity(self) -> int:
        """Number of workers that can train at the same time."""

    def find_job(self, job_id: str) -> HostedJob | None:
        """Return a job of this scheduler, also one that has ended."""

    async def host_job(self, spec: JobSpec) -> None:
        """Start or resume a job."""

    def after_change(self) -> None:
        """Share the workers again after a request to stop jobs."""


@dataclass(kw_only=True)
class Trial:
    """One trial of this study."""

    number: int
    values: dict[str, Any]
    job_id: str
    state: TrialState = "RUNNING"
    reason: str = ""
    """Why it was pruned, or failed."""
    progress: TrialProgress = field(default_factory=TrialProgress)
    is_prune_sent: bool = False
    is_started: bool = False
    retry_at: float = 0.0
    ended_as: str = ""
    """Status of its ended job."""
    latest: float | None = None
    """The newest value of the metric."""
    samples: int = 0
    """Samples of a trial that had ended before this scheduler started."""

    @property
    def num_samples(self) -> int:
        """Samples that it was trained on so far."""
        return max(self.samples, self.progress.samples)
