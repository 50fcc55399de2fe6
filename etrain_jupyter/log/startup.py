"""Stages of a job's start-up, from the start of its scheduler to its first step, with durations.

::

    scheduler      the pool starts its scheduler                until the job is submitted
    workers        until the first worker joins the job
    torch          its trainer process imports torch            until it opens the bundle
    code and data  it builds model, optimizer and data sets
    trial pass     it runs a pass and undoes it
    compile        it compiles the model                        only with ``compile: true``
    first step     other workers, connections, the step itself

A stage ends when the next one begins. The first worker that begins a stage counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from etrain_jupyter.log.events import (
    TERMINAL_STATUSES,
    Event,
    JobResumed,
    JobStatusChanged,
    JobSubmitted,
    StepCompleted,
    WarmUpPhase,
    WarmUpReached,
    WorkerJoined,
    WorkerWarmed,
)

FIRST_STEP = "first step"
STAGE_OF_PHASE: dict[WarmUpPhase, str] = {
    "build": "code and data",
    "trial": "trial pass",
    "compile": "compile",
}
"""The stage that each phase of a trainer's warm-up begins."""


@dataclass(frozen=True, kw_only=True)
class StartupStage:
    """One stage of the start-up."""

    name: str
    since: float | None = None
    """When it began, in seconds since the epoch; None if it has not begun."""
    took_s: float | None = None
    """Its duration; None until it has ended."""


@dataclass(kw_only=True)
class Startup:
    """Fold of the first events of an attempt; a resumed job starts up again."""

    _began: dict[str, float] = field(default_factory=dict)  # by stage, in order
    _expected: tuple[str, ...] = ()
    _ended_at: float | None = None

    def apply(self, event: Event) -> None:
        """Add the next event of the log."""
        match event:
            case JobSubmitted() | JobResumed():
                self._begin(event)
            case _ if self._ended_at is not None:
                pass
            case WorkerJoined():
                self._reach("torch", event)
            case WarmUpReached(phase=phase) if phase in STAGE_OF_PHASE:
                self._reach(STAGE_OF_PHASE[phase], event)
            case WorkerWarmed():
                self._reach(FIRST_STEP, event)
            case StepCompleted():
                self._ended_at = event.time
            case JobStatusChanged(status=status) if status in TERMINAL_STATUSES:
                self._ended_at = event.time

    @property
    def is_over(self) -> bool:
        """True once the first step is committed, or the job has ended before it."""
        return self._ended_at is not None

    def is_new(self, phase: WarmUpPhase) -> bool:
        """Return True if no trainer of this attempt has begun this phase before the first step."""
        return self._ended_at is None and STAGE_OF_PHASE[phase] not in self._began

    def stages(self) -> Iterator[StartupStage]:
        """Yield the stages in the order in which they began, then those that have not begun."""
        # Copied, because another thread may add events.
        began = [*self._began.items(), ("", self._ended_at)]
        for (name, since), (_, end) in pairwise(began):
            took_s = None if end is None or since is None else max(0.0, end - since)
            yield StartupStage(name=name, since=since, took_s=took_s)
        if self._ended_at is None:
            known = dict(began)
            yield from (StartupStage(name=name) for name in self._expected if name not in known)

    def _begin(self, event: JobSubmitted | JobResumed) -> None:
        compiles = ("compile",) if event.config.get("compile") else ()
        self._expected = (
            *("workers", "torch", "code and data", "trial pass"),
            *compiles,
            FIRST_STEP,
        )
        scheduler = {"scheduler": event.time - event.pool_s} if event.pool_s else {}
        self._began, self._ended_at = {**scheduler, "workers": event.time}, None

    def _reach(self, stage: str, event: Event) -> None:
        self._began.setdefault(stage, event.time)
