"""Split a job's log into attempts, each with its own rules, and check their samples.

An attempt lasts from a submit or resume to the next resume. An ordinary resume keeps the rules, so
the steps before and after it are checked as if there had been no interruption. If a forced resume
changes the seed, the batch or the data set, each attempt is checked by its own rules.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from etrain_jupyter.config.fields import Interval
from etrain_jupyter.log.events import (
    EvalCompleted,
    EvalScored,
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
    """The part of a log between two resumes."""

    after: int
    """The last generation of the previous attempt."""
    seed: int
    planned: JobPlanned | None
    """None if no trainer reported a plan."""
    evaluates: Interval | None
    """``eval.every``; None without an evaluation of the loss."""
    evals: tuple[EvalCompleted | EvalScored, ...]


def attempts_of(log: Sequence[Event]) -> list[Attempt]:
    """Split a log at its resumes."""
    parts: list[list[Event]] = [[]]
    for event in log:
        if isinstance(event, JobResumed):
            parts.append([])
        parts[-1].append(event)
    return [_attempt_of(part) for part in parts]


def _attempt_of(part: Sequence[Event]) -> Attempt:
    begin_event = next((e for e in part if isinstance(e, JobSubmitted | JobResumed)), None)
    planned = next((e for e in part if isinstance(e, JobPlanned)), None)
    is_evaluated = (
        planned is not None and min(planned.num_eval_samples, planned.num_train_samples) > 0
    )
    return Attempt(
        after=begin_event.generation if isinstance(begin_event, JobResumed) else 0,
        seed=int(begin_event.config.get("seed") or 0) if begin_event else 0,
        planned=planned,
        evaluates=_interval_of(begin_event.config) if begin_event and is_evaluated else None,
        evals=tuple(e for e in part if isinstance(e, EvalCompleted | EvalScored)),
    )


def _interval_of(config: Mapping[str, Any]) -> Interval | None:
    section = config.get("eval")
    if not isinstance(section, dict) or not section.get("loss", True):
        return None
    try:
        return Interval.parse(section.get("every", ""))
    except ValueError:  # not written by this package
        return None


def check_attempts(
    attempts: Sequence[Attempt], steps: Sequence[StepCompleted], start: int
) -> tuple[tuple[EpochCoverage, ...], list[str]]:
    """Compare the trained samples with the ledger, one attempt at a time.

    Returns:
        One row per epoch that was started (two if the rules changed during the epoch), and the
        problems as text.
    """
    rows: list[EpochCoverage] = []
    problems: list[str] = []
    for work, own in _group_attempts(attempts, steps):
        own_rows, own_problems = check_samples(own, work.base_step or start, work)
        rows += own_rows
        problems += own_problems
    return tuple(rows), problems


def find_missing_evaluations(
    attempts: Sequence[Attempt],
    steps: Sequence[StepCompleted],
    *,
    evaluated: Collection[int],
    is_finished: bool,
) -> list[int]:
    """Return the steps that had to be evaluated but were not.

    Args:
        attempts: All attempts in the log.
        steps: The committed steps that led to the newest weights.
        evaluated: The steps of the evaluations in the log that no restore has undone.
        is_finished: True if the job has finished, so that its last state must be evaluated, too.
    """
    missing = []
    for number, step in enumerate(steps):
        is_last = number + 1 == len(steps)
        if step.step in evaluated or (is_last and not is_finished):
            continue
        # A step is evaluated before the next one. A resume between the two may change the interval.
        follower = step if is_last else steps[number + 1]
        rules = [a for a in attempts if a.planned is not None and a.after < follower.generation]
        if not rules or rules[-1].evaluates is None or rules[-1].planned is None:
            continue
        every, num_train = rules[-1].evaluates, rules[-1].planned.num_train_samples
        begin = StepRange(step.epoch, step.first, step.samples).position(num_train)
        before, after = (
            every.num_passed(step=mark, position=position, num_train=num_train)
            for mark, position in ((step.step - 1, begin), (step.step, begin + step.samples))
        )
        if after > before or is_last:
            missing.append(step.step)
    return missing


def _group_attempts(
    attempts: Sequence[Attempt], steps: Sequence[StepCompleted]
) -> list[tuple[Work, list[StepCompleted]]]:
    """Return the required work with its steps; merge consecutive attempts with equal rules."""
    # Generation numbers continue across attempts, so they identify each step's attempt:
    #   log          Submitted   1  2  3   Resumed(generation=3)   4  5   Resumed(generation=5)   6
    #   attempt      ---- 0 < g <= 3 ---   ---- 3 < g <= 5 ------------   ------- 5 < g ----------
    # An attempt without a plan ended before its first step, so there is nothing to assign to it.
    planned = [attempt for attempt in attempts if attempt.planned is not None]
    groups: list[tuple[Work, list[StepCompleted]]] = []
    for number, attempt in enumerate(planned):
        assert attempt.planned is not None
        end = planned[number + 1].after if number + 1 < len(planned) else None
        begin = attempt.after if number else 0
        own = [s for s in steps if s.generation > begin and (end is None or s.generation <= end)]
        work = Work(
            seed=attempt.seed,
            num_samples=attempt.planned.num_train_samples,
            global_batch_size=attempt.planned.global_batch_size,
            per_worker_batch_size=attempt.planned.per_worker_batch_size,
            total_samples=attempt.planned.total_samples,
            layout=attempt.planned.train_layout,
        )
        # The first attempt starts a group. An attempt with equal rules extends the previous group;
        # different rules start a new group after the last step of the previous ones. An attempt
        # without steps needs no check.
        if not groups:
            groups.append((work, own))
        elif _is_same(groups[-1][0], work):
            known, before = groups[-1]
            groups[-1] = (replace(known, total_samples=work.total_samples), before + own)
        elif own:
            last = max((s for _, some in groups for s in some), key=lambda s: s.step, default=None)
            if last is not None:
                length = next(work for work, some in groups if last in some).num_samples
                position = StepRange(last.epoch, last.first, last.samples).position(length)
                position += last.samples
                work = replace(work, base_step=last.step, base_position=position)
            groups.append((work, own))
    return groups


def _is_same(one: Work, other: Work) -> bool:
    """Return True if both attempts require the same samples in every step."""
    # With a per-worker batch, the job ends after a given number of samples, so the length of the
    # job determines the size of its last step. Otherwise a longer job only adds steps.
    ends_alike = not one.per_worker_batch_size or one.total_samples == other.total_samples
    rules = [replace(work, total_samples=0, base_step=0, base_position=0) for work in (one, other)]
    return ends_alike and rules[0] == rules[1]
