"""Derive the records of a job from its events: each value once, in order, without undone steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from etrain_jupyter.log.events import (
    EarlyStopped,
    EvalCompleted,
    EvalScored,
    Event,
    ExhibitStored,
    JobRestored,
    JobResumed,
    SchedulerRestarted,
    StepCompleted,
    UserErrorRaised,
)
from etrain_jupyter.log.exhibits import Content
from etrain_jupyter.log.loggers.base import Exhibit, Note, Record, Values
from etrain_jupyter.untrusted import plain_line

ReadExhibit = Callable[[ExhibitStored], Content | None]
"""Returns the checked content of an exhibit; None if it does not exist any more."""

PHASES = ("data_s", "compute_s", "communication_s", "optimizer_s")


@dataclass(frozen=True, kw_only=True)
class Rewind:
    """The job returned to an older step: all records after it are undone."""

    seq: int
    """``seq`` of the event."""
    step: int
    time: float


class Timeline:
    """Fold events into records, and into rewinds where written records are undone.

    ::

        log                   1  2  3  4  R2  3' 4' R3  4''
        without rewinds       1  2  3  4  R2  3' 4' R3  4''     follows the log as it grows
        rewinds=(R2, R3)      1  2            3'        4''     replays it: no record is undone

    Args:
        read_exhibit: Reads the content of exhibits.
        rewinds: The rewinds in the log so far, from ``find_rewinds``. Records that they undo are
            left out.
    """

    def __init__(self, read_exhibit: ReadExhibit, rewinds: Sequence[Rewind] = ()) -> None:
        self._read_exhibit = read_exhibit
        self._limits = _limits_of(rewinds)  # in reverse order of seq
        self._newest = 0  # the newest step that is not undone
        self._number = 0
        self._num_notes = 0
        # An evaluation may be repeated after a restore or a resume, with the same weights.
        self._evaluated: set[tuple[str, int]] = set()

    def fold(self, event: Event) -> Iterator[Record | Rewind]:
        """Yield the records of the next event, after a rewind if it undoes earlier records."""
        while self._limits and self._limits[-1][0] <= event.seq:
            self._limits.pop()
        target = _target_of(event, self._newest)
        if target is not None and target < self._newest:
            self._newest = target
            self._evaluated = {one for one in self._evaluated if one[1] <= target}
            yield Rewind(seq=event.seq, step=target, time=event.time)
        record = self._record_of(event)
        if record is not None:
            self._number += 1
            yield record

    @property
    def _limit(self) -> float:
        """Newest step that no later rewind undoes."""
        return self._limits[-1][1] if self._limits else math.inf

    def _record_of(self, event: Event) -> Record | None:
        match event:
            case StepCompleted():
                if event.step > self._limit:
                    return None
                self._newest = event.step
                return self._values(event)
            case EvalCompleted() | EvalScored():
                key = event.kind, event.step
                if event.step > self._limit or key in self._evaluated:
                    return None
                self._evaluated.add(key)
                return self._values(event)
            case ExhibitStored():
                if event.step > self._limit:
                    return None
                return Exhibit(
                    number=self._number,
                    step=event.step,
                    time=event.time,
                    name=event.name,
                    format=event.format,
                    size_bytes=event.size_bytes,
                    load=lambda: self._read_exhibit(event),
                )
        text = note_on(event)
        if not text:
            return None
        self._num_notes += 1
        return Note(
            number=self._number,
            step=self._newest,
            time=event.time,
            index=self._num_notes - 1,
            text=plain_line(text, 500),
        )

    def _values(self, event: StepCompleted | EvalCompleted | EvalScored) -> Values:
        values = scalars_of(event)
        return Values(number=self._number, step=event.step, time=event.time, values=values)


def find_rewinds(events: Iterable[Event]) -> list[Rewind]:
    """Return the rewinds in a log."""
    timeline = Timeline(lambda _: None)
    folded = (item for event in events for item in timeline.fold(event))
    return [item for item in folded if isinstance(item, Rewind)]


def scalars_of(event: StepCompleted | EvalCompleted | EvalScored) -> dict[str, float]:
    """Return the scalars of an event, by tag."""
    if isinstance(event, EvalCompleted | EvalScored):
        return {f"eval/{name}": value for name, value in event.values.items()}
    return {
        "train/loss": event.loss,
        "train/lr": event.lr,
        **{f"train/{name}": value for name, value in event.metrics.items()},
        "throughput/samples_per_s": event.samples_per_s,
        "workers/world_size": event.world_size,
        **{f"time/{name}": getattr(event, name) for name in PHASES},
    }


def note_on(event: Event) -> str:
    """Return a sentence on an interruption of the job; empty for other events."""
    match event:
        case JobResumed():
            changes = f" ({'; '.join(event.differs)})" if event.differs else ""
            return f"Resumed at step {event.step:,}{changes}."
        case SchedulerRestarted():
            return f"The scheduler restarted at step {event.step:,} after {event.away_s:.1f} s."
        case JobRestored():
            repeated = f"; {event.num_undone:,} steps are repeated" if event.num_undone else ""
            return f"Returned to step {event.step:,}{repeated}."
        case EarlyStopped():
            return f"Stopped early at step {event.step:,}: {event.reason}"
        case UserErrorRaised():
            return f"Failed at step {event.step:,}: {event.error}"
    return ""


def _target_of(event: Event, newest: int) -> int | None:
    """Return the step to which an event returns the job; None if it does not."""
    if isinstance(event, JobRestored):
        return event.step
    # The log went back without a restore.
    if isinstance(event, StepCompleted) and event.step <= newest:
        return event.step - 1
    return None


def _limits_of(rewinds: Sequence[Rewind]) -> list[tuple[int, int]]:
    """Return (seq, newest step that is kept) for the events before each rewind.

    >>> one, two = Rewind(seq=5, step=8, time=0.0), Rewind(seq=9, step=3, time=0.0)
    >>> _limits_of([one, two])  # the second rewind undoes more than the first one
    [(9, 3), (5, 3)]
    """
    limits: list[tuple[int, int]] = []
    for rewind in reversed(rewinds):
        kept = min(rewind.step, limits[-1][1]) if limits else rewind.step
        limits.append((rewind.seq, kept))
    return limits
