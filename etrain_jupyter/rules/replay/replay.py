"""What the log of a job tells whoever takes the job over: all that its coordinator had known.

A coordinator keeps nothing that the log does not have. So the one that resumes a job, after its end
or after the death of the other one, stands where that one stood when all its trainers had died.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import singledispatchmethod
from typing import Any

from etrain_jupyter.log.events import (
    BestReached,
    CheckpointCommitted,
    CostUpdated,
    EvalCompleted,
    Event,
    GenerationFormed,
    GenerationReady,
    JobPlanned,
    JobRestored,
    JobStatusChanged,
    RankTimed,
    StepCompleted,
    WeightsHashed,
    WorkerJoined,
)
from etrain_jupyter.rules.membership.lineage import NOT_BEGUN
from etrain_jupyter.rules.membership.saving import KEEP_SAVED
from etrain_jupyter.rules.policy.job_costs import RunningCost
from etrain_jupyter.rules.replay.checkpoint_evidence import Evidence


@dataclass(kw_only=True)
class Past:
    """What has happened to a job so far, folded from its log."""

    num_events: int = 0
    status: str = "submitted"
    """The newest one in the log; of a job whose coordinator died it is not terminal."""
    generation: int = 0
    """The newest one that was formed."""
    starts: list[int] = field(default_factory=list)
    """The step at which each generation began, see ``lineage``."""
    step: int = 0
    """The newest step in the log that no restore has undone."""
    saved_steps: tuple[int, ...] = ()
    """Steps of the newest durable checkpoints that the log knows of, oldest first."""
    evaluated_step: int = -1
    """Step of the newest evaluation that holds."""
    best: dict[str, Any] | None = None
    """The newest ``BestReached`` that holds, as a trainer tells it."""
    num_started: int = 0
    """Trainers started so far."""
    num_train_samples: int = 0
    """Of the newest plan; 0 if there was none."""
    evidence: Evidence = field(default_factory=Evidence)
    """What its checkpoints cost, and how often it was interrupted."""
    cost: RunningCost = field(default_factory=RunningCost)
    """What it has cost so far, as the log was told last."""

    @singledispatchmethod
    def _fold(self, event: Event) -> None:
        """Most events leave nothing behind that matters."""

    @_fold.register
    def _(self, event: JobStatusChanged) -> None:
        self.status = event.status

    @_fold.register
    def _(self, event: JobPlanned) -> None:
        self.num_train_samples = event.num_train_samples

    @_fold.register
    def _(self, event: WorkerJoined) -> None:
        self.num_started += 1

    @_fold.register
    def _(self, event: GenerationFormed) -> None:
        self.generation = event.generation
        # Where it began is known once it has done something: it may have died over a checkpoint.
        missing = event.generation - len(self.starts)
        self.starts += [NOT_BEGUN] * missing
        self._planned_start = event.step
        self._go_back(event.step, is_told=False)

    @_fold.register
    def _(self, event: JobRestored) -> None:
        self._begin(event.generation, event.step)
        self._go_back(event.step, is_told=True)

    @_fold.register
    def _(self, event: StepCompleted) -> None:
        self.step = event.step
        self._begin(event.generation, self._planned_start)

    @_fold.register
    def _(self, event: EvalCompleted) -> None:
        self.evaluated_step = event.step
        self._begin(event.generation, self._planned_start)

    @_fold.register
    def _(self, event: GenerationReady | WeightsHashed | RankTimed) -> None:
        self._begin(event.generation, self._planned_start)

    @_fold.register
    def _(self, event: BestReached) -> None:
        self.best = {"step": event.step, "metric": event.metric, "value": event.value}

    @_fold.register
    def _(self, event: CostUpdated) -> None:
        self.cost = RunningCost(
            spent_usd=event.spent_usd,
            on_demand_usd=event.on_demand_usd,
            wasted_usd=event.wasted_usd,
        )

    @_fold.register
    def _(self, event: CheckpointCommitted) -> None:
        self.saved_steps = tuple(sorted({*self.saved_steps, event.step})[-KEEP_SAVED:])

    _planned_start = 0
    """Where the newest generation was meant to begin."""

    def _begin(self, generation: int, step: int) -> None:
        """Take in where a generation has begun; only the newest one's start may be unknown."""
        if generation == self.generation and self.starts and self.starts[-1] == NOT_BEGUN:
            self.starts[-1] = step

    def _go_back(self, step: int, *, is_told: bool) -> None:
        self.saved_steps = tuple(saved for saved in self.saved_steps if saved <= step)
        if is_told:
            self.step = min(self.step, step)
            self.evaluated_step = -1 if self.evaluated_step > step else self.evaluated_step
            if self.best is not None and self.best["step"] > step:
                self.best = None


def past_of(events: Iterable[Event]) -> Past:
    """Fold a log, from its first event on."""
    past = Past()
    for event in events:
        past.num_events += 1
        past._fold(event)
        past.evidence.fold(event)
    return past
