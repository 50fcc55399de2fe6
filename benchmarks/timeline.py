"""Where the time goes when the ranks of a job of ours change, taken from its events."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from etrain_jupyter.log.events import (
    Event,
    GenerationFormed,
    GenerationReady,
    StepCompleted,
    WorkerLost,
)

PHASES = ("detect_s", "abort_s", "form_s", "sync_s", "first_step_s")
"""Kill to the coordinator's knowing; to the order to form, all survivors having let go of their
collectives; to the process group; to equal state; to the first committed step."""

E = TypeVar("E", bound=Event)


def recovery(
    events: Sequence[Event], *, generation: int, killed_at: float, step_s: float
) -> dict[str, float]:
    """Take one recovery apart, in seconds from the kill on.

    Args:
        events: The job's, up to the first step after the recovery.
        generation: The one that was hit.
        killed_at: When the signal was sent.
        step_s: An ordinary step.
    """
    lost = first_of(events, WorkerLost, lambda event: event.time >= killed_at)
    step = first_of(events, StepCompleted, lambda event: event.generation > generation)
    # A generation that broke while it formed has no step: the one that counts has.
    formed = first_of(events, GenerationFormed, lambda e: e.generation == step.generation)
    ready = first_of(events, GenerationReady, lambda e: e.generation == step.generation)
    formed_at = formed.time + ready.connect_s
    synced_at = formed_at + ready.sync_s
    return {
        "detect_s": lost.time - killed_at,
        "abort_s": formed.time - lost.time,
        "form_s": ready.connect_s,
        "sync_s": ready.sync_s,
        "first_step_s": step.time - synced_at,
        "total_s": step.time - killed_at,
        "ordinary_step_s": step_s,
        "beyond_step_s": step.time - killed_at - step_s,
    }


def first_of(events: Sequence[Event], kind: type[E], holds: Callable[[E], bool]) -> E:
    """The first event of a kind for which ``holds``."""
    return next(event for event in events if isinstance(event, kind) and holds(event))


@dataclass(frozen=True, kw_only=True)
class Stall:
    """A planned change of membership: how long no step was committed because of it."""

    why: str
    """``join`` or ``leave``, as the generation says."""
    before: int
    """World size of the generation that ended."""
    after: int
    gap_s: float
    """From its last step to the next generation's first."""
    ordinary_s: float
    """Median step of the generation that ended, or of the new one if that is less.

    While a newcomer starts up it takes time from the others, whose steps are then no measure.
    """

    @property
    def beyond_step_s(self) -> float:
        """The gap less the one step that would have been made in it anyway."""
        return self.gap_s - self.ordinary_s


def stalls(events: Sequence[Event], *, least_steps: int, first: int = 0) -> list[Stall]:
    """Every change from a generation that had made ``least_steps`` to one that makes a step.

    Args:
        events: The job's, from its begin.
        least_steps: Fewer give no ordinary step.
        first: The generation from which on changes count.
    """
    formed = {e.generation: e for e in events if isinstance(e, GenerationFormed)}
    steps: dict[int, list[StepCompleted]] = {}
    for event in events:
        if isinstance(event, StepCompleted):
            steps.setdefault(event.generation, []).append(event)
    found = []
    for old, new in itertools.pairwise(sorted(steps)):
        if old < first or len(steps[old]) < max(2, least_steps):
            continue
        found.append(
            Stall(
                why=formed[new].why,
                before=formed[old].world_size,
                after=formed[new].world_size,
                gap_s=steps[new][0].time - steps[old][-1].time,
                ordinary_s=min(
                    ordinary_step([step.time for step in steps[g]])
                    for g in (old, new)
                    if len(steps[g]) >= max(2, least_steps)
                ),
            )
        )
    return found


def ordinary_step(times: Sequence[float]) -> float:
    """Median time between neighbouring steps."""
    return statistics.median(b - a for a, b in itertools.pairwise(times))
