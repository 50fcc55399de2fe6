"""The part of the audit that follows the generations: which steps count, and who held what.

A trainer is known to hold a step once the log shows that its generation committed it or stood
ready at it, until it undoes that step or begins to receive another one's state. So the log itself
tells whether anybody who survived knew better where a job went back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from etrain_jupyter.log.events import (
    Event,
    GenerationFormed,
    GenerationReady,
    JobRestored,
    JobResumed,
    StepCompleted,
    StepUndone,
)

Trainer = tuple[str, int]
"""A worker's name and the process id of its trainer."""


@dataclass(kw_only=True)
class WeightHistory:
    """What led to the newest weights."""

    start: int = 0
    """The step that the log begins at."""
    steps: list[StepCompleted] = field(default_factory=list)
    """The steps that count, in the order of the log."""
    num_rolled_back: int = 0
    """Committed steps that were thrown away."""
    formed: dict[int, GenerationFormed] = field(default_factory=dict)
    """Every generation by its number."""
    problems: list[str] = field(default_factory=list)


def follow_history(log: Sequence[Event]) -> WeightHistory:
    """Tell the steps that led to the newest weights from those that a resume threw away."""
    return _Follower(log).history


class _Follower:
    """Goes through a log once."""

    def __init__(self, log: Sequence[Event]) -> None:
        self.history = WeightHistory()
        self._present: GenerationFormed | None = None
        self._base = 0
        """The step that the present generation goes on from."""
        self._held: dict[Trainer, int] = defaultdict(lambda: -1)
        """The newest step that a trainer is known to hold."""
        self._receiving: set[Trainer] = set()
        self._is_cut_due = False
        """Whether the present generation throws away what is newer, once it commits a step."""
        # Where rank 0 told which checkpoint it found, that counts, not what the coordinator knew.
        self._told = {e.generation for e in log if isinstance(e, JobRestored)}
        for event in log:
            if isinstance(event, StepCompleted):
                self._take_step(event)
            elif isinstance(event, StepUndone):
                self._take_undone(event)
            elif isinstance(event, GenerationFormed):
                self._take_formed(event)
            elif isinstance(event, GenerationReady):
                self._prove(event.generation, self._base)
            elif isinstance(event, JobRestored):
                self._go_back(event.step)
            elif isinstance(event, JobResumed):
                # Nobody of the life before is there any more, though numbers may come again.
                self._held.clear()
                self._receiving.clear()

    def _object(self, problem: str) -> None:
        self.history.problems.append(problem)

    def _take_step(self, event: StepCompleted) -> None:
        formed, present = self.history.formed.get(event.generation), self._present
        if self._is_cut_due and formed is present:
            self._go_back(self._base)
        self.history.steps.append(event)
        if formed is None:
            self._object(
                f"step {event.step} was committed by generation {event.generation}, "
                "which had not been formed"
            )
            return
        assert present is not None
        if formed.world_size != event.world_size:
            self._object(
                f"step {event.step} was committed by {event.world_size} ranks, "
                f"generation {event.generation} had {formed.world_size}"
            )
        # A new rank 0 brings the records that the old one did not send, but none that is newer.
        if event.generation < present.generation and event.step > self._base:
            self._object(
                f"step {event.step} was committed by generation {event.generation} although "
                f"generation {present.generation} had gone on from step {self._base}"
            )
        self._prove(event.generation, event.step)

    def _prove(self, generation: int, step: int) -> None:
        """Take in that the members of a generation hold a step."""
        formed = self.history.formed.get(generation)
        if formed is None:
            return
        if formed is self._present:
            self._receiving -= set(_trainers_of(formed))
        for trainer in _trainers_of(formed):
            if trainer not in self._receiving:
                self._held[trainer] = max(self._held[trainer], step)

    def _take_undone(self, event: StepUndone) -> None:
        formed = self.history.formed.get(event.generation)
        for trainer in _trainers_of(formed) if formed else ():
            if trainer[0] in event.workers:
                self._held[trainer] = min(self._held[trainer], event.step - 1)

    def _take_formed(self, event: GenerationFormed) -> None:
        if self._present is None and not self.history.steps:
            self.history.start = event.step
        elif self._present is not None and event.generation <= self._present.generation:
            self._object(
                f"generation {event.generation} was formed "
                f"after generation {self._present.generation}"
            )
        members = _trainers_of(event)
        better = sorted(worker for worker, pid in members if self._held[worker, pid] > event.step)
        if better:
            newest = max(self._held[trainer] for trainer in members)
            self._object(
                f"generation {event.generation} went back from step {newest} to {event.step} "
                f"although {', '.join(better)} had survived"
            )
        for rank in event.behind:
            if rank < len(members):
                self._receiving.add(members[rank])
                self._held[members[rank]] = -1
        self._present, self._base = event, event.step
        self.history.formed[event.generation] = event
        # If it dies before it knows where it begins, the next one may begin further on.
        self._is_cut_due = event.generation not in self._told

    def _go_back(self, step: int) -> None:
        """Throw away the steps after this one: they are made again."""
        self._base, self._is_cut_due = step, False
        history = self.history
        kept = [done for done in history.steps if done.step <= step]
        history.num_rolled_back += len(history.steps) - len(kept)
        history.steps = kept


def _trainers_of(formed: GenerationFormed) -> list[Trainer]:
    return list(zip(formed.ranks, formed.trainer_pids, strict=False))
