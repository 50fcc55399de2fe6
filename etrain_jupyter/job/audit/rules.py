"""The audit: proof from the durable log alone that training was what it promises to be.

The ledger says which samples each step had to train; the checksum in the log says which ones the
ranks trained. Where the two differ, a sample was lost or repeated. This is worth what the checksum
is worth: ranks must sum it up over the indices that came with the batches which they put through
forward and backward, never over the plan, or the ledger would only be compared with itself.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from etrain_jupyter.events.types import (
    TERMINAL_STATUSES,
    EvalCompleted,
    Event,
    GenerationFormed,
    JobPlanned,
    JobRestored,
    JobStatusChanged,
    JobSubmitted,
    StepCompleted,
    StepUndone,
    UserErrorRaised,
    WeightsHashed,
    WorkerLost,
)
from etrain_jupyter.job.audit.report import AuditReport
from etrain_jupyter.job.audit.samples import Work, check_samples


def audit_log(events: Iterable[Event]) -> AuditReport:
    """Check a job's events, finished or not, against what the job had to do.

    Args:
        events: All of them, in order, for example from ``events.log.read_events``.

    Returns:
        The report; ``ok`` is True if there is nothing to object to, also for a job that has not
        trained yet.
    """
    log = list(events)
    start, steps, num_rolled_back, went_back = _follow_history(log)
    planned = next((e for e in log if isinstance(e, JobPlanned)), None)
    work = _work_of(log, planned)
    epochs, sample_problems = check_samples(steps, start, work) if work else ((), [])
    digest_groups = _digests_by_step(log)
    evals = [e for e in log if isinstance(e, EvalCompleted)]
    return AuditReport(
        problems=(
            *_check_log(log),
            *_check_plan(planned, steps, evals),
            *went_back,
            *_check_steps(start, steps),
            *sample_problems,
            *_check_losses(log),
            *_check_weights(digest_groups),
            *_check_end(log, planned, start, steps),
        ),
        epochs=epochs,
        status=_last_status(log),
        steps_committed=len(steps),
        steps_undone=len({(e.generation, e.step) for e in log if isinstance(e, StepUndone)}),
        steps_rolled_back=num_rolled_back,
        digests_compared=sum(len(group) for group in digest_groups.values() if len(group) > 1),
        num_evals=len(evals),
        num_kinds=dict(Counter(event.kind for event in log)),
    )


def _follow_history(log: Sequence[Event]) -> tuple[int, list[StepCompleted], int, list[str]]:
    """Tell the steps that led to the newest weights from those that a resume threw away.

    Returns:
        The step that the log begins at; the steps that count; how many were thrown away; problems.
    """
    start: int | None = None
    steps: list[StepCompleted] = []
    num_rolled_back = 0
    problems: list[str] = []
    before: GenerationFormed | None = None
    present: GenerationFormed | None = None
    undone: set[tuple[str, int]] = set()
    for event in log:
        if isinstance(event, StepCompleted):
            steps.append(event)
        elif isinstance(event, StepUndone):
            undone |= {(worker, event.step) for worker in event.workers}
        elif isinstance(event, GenerationFormed):
            start = event.step if start is None and not steps else start
            before, present = present, event
        if not isinstance(event, GenerationFormed | JobRestored):
            continue
        if steps and steps[-1].step > event.step:
            problems += _check_rollback(before, present, event.step, steps[-1].step, undone)
            kept = [step for step in steps if step.step <= event.step]
            num_rolled_back += len(steps) - len(kept)
            steps = kept
    return start or 0, steps, num_rolled_back, problems


def _check_rollback(
    before: GenerationFormed | None,
    after: GenerationFormed | None,
    to_step: int,
    from_step: int,
    undone: set[tuple[str, int]],
) -> Iterator[str]:
    """Going back is right only where no trainer survived that knew better.

    A survivor that undid the very step knew no better: only those that had seen its end are lost.
    """
    if before is None or after is None:
        return
    survivors = {
        (worker, pid)
        for worker, pid in set(_trainers_of(before)) & set(_trainers_of(after))
        if not (from_step == to_step + 1 and (worker, from_step) in undone)
    }
    if survivors:
        names = ", ".join(sorted(worker for worker, _ in survivors))
        yield (
            f"generation {after.generation} went back from step {from_step} to {to_step} "
            f"although {names} had survived"
        )


def _trainers_of(generation: GenerationFormed) -> Iterator[tuple[str, int]]:
    return zip(generation.ranks, generation.trainer_pids, strict=False)


def _work_of(log: Sequence[Event], planned: JobPlanned | None) -> Work | None:
    if planned is None:
        return None
    submitted = next((e for e in log if isinstance(e, JobSubmitted)), None)
    return Work(
        seed=int(submitted.config.get("seed") or 0) if submitted else 0,
        num_samples=planned.num_train_samples,
        global_batch_size=planned.global_batch_size,
    )


def _check_log(log: Sequence[Event]) -> Iterator[str]:
    """Look for lines that are missing from the log itself."""
    expected = 1
    for event in log:
        if event.seq and event.seq != expected:
            yield f"the log has event {event.seq} where {expected} was due"
        expected = event.seq + 1 if event.seq else expected + 1
    job_ids = sorted({event.job_id for event in log})
    if len(job_ids) > 1:
        yield f"the log has events of {len(job_ids)} jobs: {', '.join(job_ids)}"


def _check_plan(
    planned: JobPlanned | None, steps: Sequence[StepCompleted], evals: Sequence[EvalCompleted]
) -> Iterator[str]:
    if planned is None:
        if steps:
            yield f"{len(steps)} steps were committed, but no plan says what they had to train"
        return
    for done in evals:
        if done.samples != planned.num_eval_samples:
            yield (
                f"the evaluation at step {done.step} went through {done.samples} samples, "
                f"the set has {planned.num_eval_samples}"
            )


def _check_steps(start: int, steps: Sequence[StepCompleted]) -> Iterator[str]:
    """Steps must be committed one after the other, by generations that do not grow older."""
    newest, generation = start, 0
    for step in steps:
        if step.step <= newest:
            yield f"step {step.step} was committed again after step {newest}"
        elif step.step > newest + 1:
            yield f"{_name_steps(newest + 1, step.step - 1)} missing before step {step.step}"
        if step.generation < generation:
            yield (
                f"step {step.step} was committed by generation {step.generation} "
                f"after generation {generation} had gone on"
            )
        newest, generation = max(newest, step.step), max(generation, step.generation)


def _name_steps(first: int, last: int) -> str:
    return f"step {first} is" if first == last else f"steps {first} to {last} are"


def _check_losses(log: Sequence[Event]) -> Iterator[str]:
    """A planned change undoes no step, and each lost worker at most one.

    Both are told by generation: steps that were committed before a loss may be logged after it, so
    the order of the lines says nothing.
    """
    undone: dict[int, set[int]] = defaultdict(set)
    losses: Counter[int] = Counter()
    for event in log:
        if isinstance(event, StepUndone):
            undone[event.generation].add(event.step)
        elif _may_undo(event):
            losses[event.generation] += 1
    for generation, steps in undone.items():
        if len(steps) > losses[generation]:
            yield _name_waste(steps, losses[generation])


def _may_undo(event: Event) -> bool:
    """Return whether this may cost the step in flight: a loss, an error, an end at once."""
    if isinstance(event, JobStatusChanged):
        return event.status in TERMINAL_STATUSES
    return isinstance(event, WorkerLost | UserErrorRaised)


def _name_waste(undone: set[int], num_losses: int) -> str:
    steps = sorted(undone)
    names = f"step {steps[0]} was" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]} were"
    if num_losses == 0:
        return f"{names} undone although no worker had been lost"
    return f"{names} undone for {num_losses} lost workers"


def _digests_by_step(log: Sequence[Event]) -> dict[int, list[WeightsHashed]]:
    groups: dict[int, list[WeightsHashed]] = defaultdict(list)
    for event in log:
        if isinstance(event, WeightsHashed):
            groups[event.step].append(event)
        elif isinstance(event, GenerationFormed):
            # Steps that are made again may lead to other weights.
            for step in [step for step in groups if step > event.step]:
                del groups[step]
    return groups


def _check_weights(groups: dict[int, list[WeightsHashed]]) -> Iterator[str]:
    for step, hashed in sorted(groups.items()):
        by_digest: dict[str, list[str]] = defaultdict(list)
        for event in hashed:
            by_digest[event.digest].append(f"rank {event.rank} on {event.worker}")
        if len(by_digest) > 1:
            # The larger side is taken to be right, so that the culprit is named last.
            sides = sorted(by_digest.items(), key=lambda side: -len(side[1]))
            told = "; ".join(f"{digest[:12]} on {', '.join(who)}" for digest, who in sides)
            yield f"at step {step} the ranks had different weights: {told}"


def _check_end(
    log: Sequence[Event], planned: JobPlanned | None, start: int, steps: Sequence[StepCompleted]
) -> Iterator[str]:
    if planned is None or _last_status(log) != "finished":
        return
    reached = max((step.step for step in steps), default=start)
    if reached != planned.total_steps:
        yield f"the job finished at step {reached} of {planned.total_steps}"


def _last_status(log: Sequence[Event]) -> str:
    statuses = [event.status for event in log if isinstance(event, JobStatusChanged)]
    return statuses[-1] if statuses else ""
