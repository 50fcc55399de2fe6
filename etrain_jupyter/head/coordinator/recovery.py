"""The time after the death of a scheduler until its workers are back, or known not to come."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from etrain_jupyter.head.jobs.hosted_job import HostedJob
from etrain_jupyter.head.jobs.reports import Message

RETURN_S = 30.0
"""How long a worker is waited for whose process lives, or of which nobody knows."""


class Returning:
    """Collects who comes back and what they say meanwhile; nothing is decided before.

    Args:
        died_at: When the scheduler before died, in seconds since the epoch.
        jobs: Its jobs that have not ended.
    """

    def __init__(self, died_at: float, jobs: Sequence[HostedJob]) -> None:
        self.died_at = died_at
        self.jobs = tuple(jobs)
        self.by_worker: dict[str, Mapping[str, Any]] = {}
        """What each supervisor that is back says of its trainers, by their names."""
        self.held: list[tuple[Message, str]] = []
        """Messages that have come meanwhile, in order, and the addresses of their workers."""
        recalled = [job.recalled for job in jobs if job.recalled is not None]
        self.notices = {w: at for known in recalled for w, at in known.notices.items()}
        """Workers whose machines will be taken, and when."""
        self.at_risk = {worker for known in recalled for worker in known.at_risk}
        """Workers whose machines are likely to be taken."""
        self._expected = {worker for known in recalled for worker in known.trainers}
        self._deadline = time.monotonic() + RETURN_S

    @property
    def standings(self) -> dict[str, Any]:
        """What is said of all trainers."""
        return {name: known for part in self.by_worker.values() for name, known in part.items()}

    def greet(self, worker: str, standings: Mapping[str, Any]) -> None:
        """Take in that a worker is back."""
        self.by_worker[worker] = standings

    def forget(self, worker: str) -> None:
        """Take in that a worker is gone again; it will not come back."""
        self.by_worker.pop(worker, None)
        self._expected.discard(worker)

    def hold(self, message: Message, worker: str) -> None:
        """Keep a message for later."""
        self.held.append((message, worker))

    def is_over(self, alive: Collection[str] | None) -> bool:
        """Whether nobody is to be waited for any more.

        Args:
            alive: The workers whose processes live; None if nobody knows.
        """
        if time.monotonic() >= self._deadline:
            return True
        expected = self._expected if alive is None else self._expected & set(alive)
        return expected <= self.by_worker.keys()
