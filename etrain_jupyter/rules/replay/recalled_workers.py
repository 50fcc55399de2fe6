"""What the log of a job tells the scheduler that takes the place of one that died.

``past`` has what is left when all trainers have died, too. Here they may live: this tells which of
them belong to the job, where they were last seen, and what they were told.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from etrain_jupyter.log import events
from etrain_jupyter.log.events import TERMINAL_STATUSES, Event

COMMON = frozenset({"job_id", "time", "generation", "seq"})


@dataclass(kw_only=True)
class RecalledWorkers:
    """What was so when the log ended."""

    job_id: str = ""
    trainers: dict[str, str] = field(default_factory=dict)
    """Worker to the name of its trainer, of those that were neither lost nor let go."""
    ranks: tuple[str, ...] = ()
    """Workers of the newest generation in rank order."""
    is_ready: bool = False
    """Whether all ranks of it have stepped."""
    backend: str = "gloo"
    """The backend that sums its gradients."""
    has_trained: bool = False
    bounds: tuple[int, int] | None = None
    """Fewest and most workers, if somebody has changed them."""
    plan: dict[str, Any] = field(default_factory=dict)
    """As a trainer tells it; empty if none has."""
    status: events.JobStatus = "submitted"
    reason: str = ""
    step_s: float = 0.0
    last_step_at: float = 0.0
    """In wall time, as all instants here; 0.0 before the first step."""
    ended_early_in: int = 0
    """The generation that has told of an early end; 0 if none has."""
    notices: dict[str, float] = field(default_factory=dict)
    """Workers whose machines will be taken, and when."""
    at_risk: set[str] = field(default_factory=set)
    """Workers whose machines are likely to be taken."""
    _num_started: int = 0

    @property
    def is_ended(self) -> bool:
        """Whether nothing is left to be done."""
        return self.status in TERMINAL_STATUSES

    def take(self, event: Event) -> None:
        """Fold one event more."""
        match event:
            case events.JobResumed():
                self._begin_anew()
            case events.JobPlanned():
                self.plan = {
                    f.name: getattr(event, f.name)
                    for f in dataclasses.fields(event)
                    if f.name not in COMMON
                }
            case events.JobStatusChanged():
                self.status, self.reason = event.status, event.reason
            case events.WorkersScaled():
                self.bounds = (event.min_workers, event.max_workers)
            case events.WorkerJoined():
                self._num_started += 1
                name = f"{event.job_id}/{event.worker}/{self._num_started}"
                self.trainers[event.worker] = name
            case events.WorkerLost() | events.WorkerLeft():
                self.trainers.pop(event.worker, None)
                self.notices.pop(event.worker, None)
                self.at_risk.discard(event.worker)
            case events.PreemptionNoticed():
                self.notices[event.worker] = event.deadline
            case events.RebalanceRecommended():
                self.at_risk.add(event.worker)
            case events.GenerationFormed():
                self.ranks, self.is_ready = tuple(event.ranks), False
                self.backend = event.backend or self.backend
            case events.GenerationReady():
                self.is_ready = self.has_trained = True
            case events.StepCompleted():
                self.last_step_at = event.time
                self.step_s = event.samples / max(event.samples_per_s, 1e-9)
            case events.EarlyStopped():
                self.ended_early_in = event.generation

    def _begin_anew(self) -> None:
        """Another life of the job: nobody of the one before is left."""
        self.trainers, self.notices, self.at_risk, self.ranks = {}, {}, set(), ()
        self.is_ready, self.bounds, self.plan, self.ended_early_in = False, None, {}, 0


def recall(log: Iterable[Event]) -> RecalledWorkers:
    """Fold a log, from its first event on."""
    recalled = RecalledWorkers()
    for event in log:
        recalled.take(event)
    return recalled
