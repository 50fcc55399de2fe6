"""Read from the logs of a study's trials: moves of workers, and the use of the pool.

A move begins with the decision to end a trial, and ends with the first step of another trial on a
worker of the first one::

    trial 3   decided ── last step, checkpoint ── ended
    trial 7                                         granted ── warm ── formed ── first step
    part               stop                      grant       warm    form      step
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from etrain_jupyter.log import events as e

MOVE_PARTS = ("stop_s", "grant_s", "warm_s", "form_s", "step_s")
DECIDED = "The study stops it"


@dataclass(frozen=True, kw_only=True)
class Move:
    """One worker that moves from a pruned trial to another trial."""

    worker: str
    parts_s: Mapping[str, float]
    """Durations in seconds, by the names in ``MOVE_PARTS``. Their sum is that of the move."""

    @property
    def total_s(self) -> float:
        """Seconds from the decision to the first step."""
        return sum(self.parts_s.values())


@dataclass(kw_only=True)
class _Use:
    """One trainer of a trial on a worker."""

    granted_at: float
    warm_at: float = 0.0
    formed_at: float = 0.0
    generation: int = 0
    stepped_at: float = 0.0


@dataclass(kw_only=True)
class _Trial:
    uses: list[tuple[str, _Use]] = field(default_factory=list)
    ranks: tuple[str, ...] = ()
    decided_at: float = 0.0
    ended_at: float = 0.0
    left: tuple[str, ...] = ()
    """Its workers at the decision."""

    def apply(self, event: e.Event) -> None:
        match event:
            case e.WorkerJoined():
                self.uses.append((event.worker, _Use(granted_at=event.time)))
            case e.WorkerWarmed():
                self._newest(event.worker).warm_at = event.time
            case e.GenerationFormed():
                self.ranks = tuple(event.ranks)
                for worker in self.ranks:
                    use = self._newest(worker)
                    if not use.formed_at:
                        use.formed_at, use.generation = event.time, event.generation
            case e.StepCompleted():
                for worker in self.ranks:
                    use = self._newest(worker)
                    if not use.stepped_at and event.generation >= use.generation:
                        use.stepped_at = event.time
            case e.LogLine() if DECIDED in event.text:
                self.decided_at, self.left = event.time, self.ranks
            case e.JobStatusChanged() if event.status in e.TERMINAL_STATUSES:
                self.ended_at = event.time
            case _:
                pass

    def _newest(self, worker: str) -> _Use:
        return next(use for name, use in reversed(self.uses) if name == worker)


def moves_of(logs: Mapping[int, Iterable[e.Event]]) -> list[Move]:
    """Return the moves of a study, in the order of the decisions.

    Workers without another use are left out: at the end of a study, no trial needs them.

    Args:
        logs: Events of each trial, by its number.
    """
    trials = {number: _Trial() for number in logs}
    for number, log in logs.items():
        for event in log:
            trials[number].apply(event)
    moves = []
    pruned = [number for number, trial in trials.items() if trial.decided_at]
    for number in sorted(pruned, key=lambda number: trials[number].decided_at):
        trial = trials[number]
        for worker in trial.left:
            next_uses = [
                use
                for other, found in trials.items()
                for name, use in found.uses
                if other != number and name == worker and use.granted_at > trial.decided_at
            ]
            use = min(next_uses, key=lambda use: use.granted_at, default=None)
            if use is not None and use.stepped_at:
                moves.append(Move(worker=worker, parts_s=_parts(trial, use)))
    return moves


def _parts(trial: _Trial, use: _Use) -> dict[str, float]:
    times = [
        *(trial.decided_at, trial.ended_at, use.granted_at),
        *(use.warm_at, use.formed_at, use.stepped_at),
    ]
    ends = zip(MOVE_PARTS, times, times[1:], strict=False)
    return {name: after - before for name, before, after in ends}


def utilization_of(logs: Iterable[Iterable[e.Event]]) -> tuple[float, float]:
    """Return the share of the workers' time that they spent in steps, and the duration.

    Counted from the end of the study's first step to that of its last one.

    Args:
        logs: Events of each trial. The pool consists of the workers that any trial has used.

    Returns:
        The share, between 0 and 1, and the duration in seconds.
    """
    found = [event for log in logs for event in log]
    steps = [event.time for event in found if isinstance(event, e.StepCompleted)]
    used_s = sum(event.elapsed_s for event in found if isinstance(event, e.RankTimed))
    workers = {event.worker for event in found if isinstance(event, e.WorkerJoined)}
    duration_s = max(steps) - min(steps)
    return used_s / (len(workers) * duration_s), duration_s


def share_of_spans(spans: Sequence[tuple[float, float]], num_workers: int) -> tuple[float, float]:
    """Return the used share of the workers' time, and the duration in seconds.

    Args:
        spans: Begin and end of each step on one worker.
        num_workers: Workers of the pool.

    >>> share_of_spans([(0.0, 1.0), (1.0, 2.0), (1.0, 2.0)], num_workers=2)
    (0.75, 2.0)
    """
    duration_s = max(end for _, end in spans) - min(begin for begin, _ in spans)
    return sum(end - begin for begin, end in spans) / (num_workers * duration_s), duration_s
