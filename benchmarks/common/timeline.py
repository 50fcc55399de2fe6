"""Split recoveries and membership changes of an etrain-jupyter job into phases, from its events."""

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
"""Phases of a recovery, in order:

- detect: from the kill until the coordinator has noticed it.
- abort: until all survivors have aborted their collectives and the next generation is ordered.
- form: until the process group is connected.
- sync: until all ranks have the same state.
- first_step: until the first committed step.
"""

E = TypeVar("E", bound=Event)


def recovery(
    events: Sequence[Event], *, generation: int, killed_at: float, step_s: float
) -> dict[str, float]:
    """Split one recovery into its phases, in seconds.

    Args:
        events: Events of the job, up to the first step after the recovery.
        generation: Generation of the killed rank.
        killed_at: Time of the signal.
        step_s: Duration of an ordinary step.
    """
    lost = first_of(events, WorkerLost, lambda event: event.time >= killed_at)
    step = first_of(events, StepCompleted, lambda event: event.generation > generation)
    # Skip generations that failed while forming: they have no step.
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
    """Return the first event of a kind for which ``holds`` is true."""
    return next(event for event in events if isinstance(event, kind) and holds(event))


@dataclass(frozen=True, kw_only=True)
class Stall:
    """Time without a committed step because of a planned membership change."""

    why: str
    """``join`` or ``leave``: the reason of the new generation."""
    before: int
    """World size of the previous generation."""
    after: int
    gap_s: float
    """Seconds from the last step of the previous generation to the first of the next one."""
    ordinary_s: float
    """Median step of the previous or the new generation, whichever is shorter.

    A worker that starts up slows down the steps of the other ranks, so the steps of the previous
    generation alone may be too long.
    """

    @property
    def beyond_step_s(self) -> float:
        """The gap minus the one step that the job would have made in it anyway."""
        return self.gap_s - self.ordinary_s


def stalls(events: Sequence[Event], *, least_steps: int, first: int = 0) -> list[Stall]:
    """Return the stall between each generation with enough steps and the next one with a step.

    Args:
        events: Events of the job, from its beginning.
        least_steps: Minimum number of steps to determine an ordinary step.
        first: First generation to consider.
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
    """Return the median time between consecutive steps."""
    return statistics.median(b - a for a, b in itertools.pairwise(times))
