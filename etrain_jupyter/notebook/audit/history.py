"""Follow the generations in a log: which steps remain, and which state each trainer held.

The log shows that a trainer holds a step if the trainer's generation committed that step or became
ready at it. The trainer holds the step until it undoes the step or starts to receive another
trainer's state. The log alone therefore shows whether a survivor held a newer state when a job
returned to an older step.
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
    """The steps that led to the newest weights."""

    start: int = 0
    """The step at which the log begins."""
    steps: list[StepCompleted] = field(default_factory=list)
    """The steps that were not discarded, in the order of the log."""
    num_rolled_back: int = 0
    """Committed steps that were discarded."""
    formed: dict[int, GenerationFormed] = field(default_factory=dict)
    """Every generation by its number."""
    problems: list[str] = field(default_factory=list)


def follow_history(log: Sequence[Event]) -> WeightHistory:
    """Separate the steps that led to the newest weights from those that were discarded."""
    return _AttemptFollower(log).history


class _AttemptFollower:
    """Process a whole log in one pass."""

    # Example with two possible continuations:
    #   log                                   newest step held
    #   GenerationFormed 1, step 0, [a, b]
    #   GenerationReady 1                     a 0, b 0
    #   StepCompleted 1, 2, 3 by 1            a 3, b 3
    #   GenerationFormed 2, step 2, [c, d]    no problem: neither c nor d held a newer state
    #   GenerationFormed 2, step 2, [a, c]    problem: a held step 3

    def __init__(self, log: Sequence[Event]) -> None:
        self.history = WeightHistory()
        self._current: GenerationFormed | None = None
        self._base = 0
        """The step from which the current generation continues."""
        self._held: dict[Trainer, int] = defaultdict(lambda: -1)
        """The newest step that a trainer is known to hold."""
        self._receiving: set[Trainer] = set()
        self._is_cut_due = False
        """True if the first step of the current generation discards all newer steps."""
        # If the generation restored a checkpoint, rank 0 reports the step of that checkpoint. The
        # reported step takes precedence over the step that the coordinator expected when it formed
        # the generation.
        self._restored = {e.generation for e in log if isinstance(e, JobRestored)}
        # The survivors' state was incomplete, because some parts were lost with other workers.
        self._incomplete = {e.generation for e in log if isinstance(e, JobRestored) and e.reason}
        for event in log:
            if isinstance(event, StepCompleted):
                self._take_step(event)
            elif isinstance(event, StepUndone):
                formed = self.history.formed.get(event.generation)
                for trainer in _trainers_of(formed) if formed else ():
                    if trainer[0] in event.workers:
                        self._held[trainer] = min(self._held[trainer], event.step - 1)
            elif isinstance(event, GenerationFormed):
                self._take_formed(event)
            elif isinstance(event, GenerationReady):
                self._prove(event.generation, self._base)
            elif isinstance(event, JobRestored):
                self._go_back(event.step)
            elif isinstance(event, JobResumed):
                # The trainers of the previous attempt have ended, but their process ids may be
                # reused.
                self._held.clear()
                self._receiving.clear()

    def _report(self, problem: str) -> None:
        self.history.problems.append(problem)

    def _take_step(self, event: StepCompleted) -> None:
        formed, current = self.history.formed.get(event.generation), self._current
        if self._is_cut_due and formed is current:
            self._go_back(self._base)
        self.history.steps.append(event)
        if formed is None:
            self._report(
                f"step {event.step} was committed by generation {event.generation}, "
                "which had not been formed"
            )
            return
        assert current is not None
        if formed.world_size != event.world_size:
            self._report(
                f"step {event.step} was committed by {event.world_size} ranks, "
                f"generation {event.generation} had {formed.world_size}"
            )
        # A new rank 0 resends the records that the previous one could not send. These records cover
        # steps up to the one from which the generation continues, never later steps.
        if event.generation < current.generation and event.step > self._base:
            self._report(
                f"step {event.step} was committed by generation {event.generation} although "
                f"generation {current.generation} had continued from step {self._base}"
            )
        self._prove(event.generation, event.step)

    def _prove(self, generation: int, step: int) -> None:
        """Note that the members of a generation hold a step."""
        formed = self.history.formed.get(generation)
        if formed is None:
            return
        # The generation is ready or has committed a step, so each member has received the state.
        if formed is self._current:
            self._receiving -= set(_trainers_of(formed))
        # Ignore a late record from an earlier generation if the current generation overwrites the
        # trainer's state.
        for trainer in _trainers_of(formed):
            if trainer not in self._receiving:
                self._held[trainer] = max(self._held[trainer], step)

    def _take_formed(self, event: GenerationFormed) -> None:
        if self._current is None and not self.history.steps:
            self.history.start = event.step
        elif self._current is not None and event.generation <= self._current.generation:
            self._report(
                f"generation {event.generation} was formed "
                f"after generation {self._current.generation}"
            )
        members = _trainers_of(event)
        if event.generation in self._incomplete:
            self._held.update(dict.fromkeys(members, -1))
        better = sorted(worker for worker, pid in members if self._held[worker, pid] > event.step)
        if better:
            newest = max(self._held[trainer] for trainer in members)
            self._report(
                f"generation {event.generation} went back from step {newest} to {event.step} "
                f"although {', '.join(better)} had survived"
            )
        # These ranks discard their state as soon as they begin to receive. Until the generation is
        # ready, they have no state to continue from.
        for rank in event.behind:
            if 0 <= rank < len(members):
                self._receiving.add(members[rank])
                self._held[members[rank]] = -1
        self._current, self._base = event, event.step
        self.history.formed[event.generation] = event
        # Discard newer steps at the first step of this generation, not now. The generation may end
        # before its first step, and the next generation may still continue from a later step.
        self._is_cut_due = event.generation not in self._restored

    def _go_back(self, step: int) -> None:
        """Discard the steps after this one, because they are repeated."""
        self._base, self._is_cut_due = step, False
        history = self.history
        kept = [done for done in history.steps if done.step <= step]
        history.num_rolled_back += len(history.steps) - len(kept)
        history.steps = kept


def _trainers_of(formed: GenerationFormed) -> list[Trainer]:
    return list(zip(formed.ranks, formed.trainer_pids, strict=False))
