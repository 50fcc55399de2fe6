"""The lives of a job: what each resume had it train from there on.

An ordinary resume changes nothing of that, and its steps are checked as if nobody had died. Where
somebody has forced another seed, batch or data on it, each life is checked by its own rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from etrain_jupyter.log.events import (
    EvalCompleted,
    Event,
    JobPlanned,
    JobResumed,
    JobSubmitted,
    StepCompleted,
)
from etrain_jupyter.notebook.audit.report import EpochCoverage
from etrain_jupyter.notebook.audit.samples import Work, check_samples
from etrain_jupyter.rules.samples.ledger import StepRange


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What the log says between two resumes."""

    after: int
    """The last generation before it."""
    seed: int
    planned: JobPlanned | None
    """None if no trainer came to tell."""
    evals: tuple[EvalCompleted, ...]


def lives_of(log: Sequence[Event]) -> list[Attempt]:
    """Cut a log at its resumes."""
    parts: list[list[Event]] = [[]]
    for event in log:
        if isinstance(event, JobResumed):
            parts.append([])
        parts[-1].append(event)
    return [_life_of(part) for part in parts]


def _life_of(part: Sequence[Event]) -> Attempt:
    asked = next((e for e in part if isinstance(e, JobSubmitted | JobResumed)), None)
    return Attempt(
        after=asked.generation if isinstance(asked, JobResumed) else 0,
        seed=int(asked.config.get("seed") or 0) if asked else 0,
        planned=next((e for e in part if isinstance(e, JobPlanned)), None),
        evals=tuple(e for e in part if isinstance(e, EvalCompleted)),
    )


def check_lives(
    lives: Sequence[Attempt], steps: Sequence[StepCompleted], start: int
) -> tuple[tuple[EpochCoverage, ...], list[str]]:
    """Compare what the steps trained with what the ledger orders, life by life.

    Args:
        lives: Of the log.
        steps: The committed ones.
        start: The step that the log begins at.

    Returns:
        A row for each epoch that was begun, twice if the rules changed within it; and problems in
        words.
    """
    rows: list[EpochCoverage] = []
    problems: list[str] = []
    for work, own in _works(lives, steps):
        first = work.base_step or start
        found = check_samples(own, first, work)
        rows += found[0]
        problems += found[1]
    return tuple(rows), problems


def _works(
    lives: Sequence[Attempt], steps: Sequence[StepCompleted]
) -> list[tuple[Work, list[StepCompleted]]]:
    """Return what was to be trained, and the steps that did; equal rules in a row make one."""
    planned = [life for life in lives if life.planned is not None]
    groups: list[tuple[Work, list[StepCompleted]]] = []
    for number, life in enumerate(planned):
        assert life.planned is not None
        end = planned[number + 1].after if number + 1 < len(planned) else None
        begin = life.after if number else 0
        own = [s for s in steps if s.generation > begin and (end is None or s.generation <= end)]
        work = Work(
            seed=life.seed,
            num_samples=life.planned.num_train_samples,
            global_batch_size=life.planned.global_batch_size,
            per_worker_batch_size=life.planned.per_worker_batch_size,
            total_samples=life.planned.total_samples,
        )
        if not groups:
            groups.append((work, own))
        elif _is_same(groups[-1][0], work):
            known, before = groups[-1]
            groups[-1] = (replace(known, total_samples=work.total_samples), before + own)
        elif own:
            last = max((s for _, some in groups for s in some), key=lambda s: s.step, default=None)
            if last is not None:
                length = _owner(groups, last).num_samples
                position = StepRange(last.epoch, last.first, last.samples).position(length)
                position += last.samples
                work = replace(work, base_step=last.step, base_position=position)
            groups.append((work, own))
    return groups


def _is_same(one: Work, other: Work) -> bool:
    """Whether both say the same of every step; where a batch grows, its end bounds the last."""
    ends_alike = not one.per_worker_batch_size or one.total_samples == other.total_samples
    rules = [
        (work.seed, work.num_samples, work.global_batch_size, work.per_worker_batch_size)
        for work in (one, other)
    ]
    return ends_alike and rules[0] == rules[1]


def _owner(groups: Sequence[tuple[Work, list[StepCompleted]]], step: StepCompleted) -> Work:
    return next(work for work, some in groups if step in some)
