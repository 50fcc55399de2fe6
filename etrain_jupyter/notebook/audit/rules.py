"""Audit a job: prove from the durable log alone that it trained on every sample exactly once.

The ledger contains the samples that each step had to train on. The checksums in the log show which
samples the ranks trained on. If the two differ, a sample was lost or repeated. The proof depends on
the checksum: ranks must compute it from the indices of the batches in their forward and backward
passes, never from the plan; otherwise the ledger would be compared with itself.

The log also proves, as far as possible, that all ranks had equal weights. In each step, every rank
computes a fingerprint of a part of its weights, and the step's record contains whether they were
equal. At the end of each epoch and of the job, every rank reports a SHA-256 of all its weights. A
single rank has nothing to compare with.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from etrain_jupyter.log.events import (
    TERMINAL_STATUSES,
    CheckpointCommitted,
    EarlyStopped,
    Event,
    FaultInjected,
    GenerationFormed,
    JobStatusChanged,
    StepCompleted,
    StepUndone,
    UserErrorRaised,
    WeightsHashed,
    WorkerLost,
)
from etrain_jupyter.log.job_record import JobRecord
from etrain_jupyter.notebook.audit.attempts import (
    Attempt,
    attempts_of,
    check_attempts,
    find_missing_evaluations,
)
from etrain_jupyter.notebook.audit.history import WeightHistory, follow_history
from etrain_jupyter.notebook.audit.report import AuditReport
from etrain_jupyter.rules.samples.ledger import StepRange

MAX_NAMED = 8
"""Maximum number of steps without an evaluation that are named."""


def audit_log(events: Iterable[Event]) -> AuditReport:
    """Check the events of a finished or running job against the work that was due.

    Args:
        events: All events, in order, for example from ``log.event_log.read_events``.

    Returns:
        The report; ``ok`` is True if it has no problems, even if nothing has been trained yet.
    """
    log = list(events)
    history = follow_history(log)
    attempts = attempts_of(log)
    record = JobRecord().apply_all(log)
    num_kinds = Counter(event.kind for event in log)
    steps, start = history.steps, history.start
    epochs, sample_problems = check_attempts(attempts, steps, start)
    weights = compare_weights(log, history)
    return AuditReport(
        problems=(
            *_check_log(log),
            *_check_plan(attempts, steps),
            *_check_evaluations(attempts, steps, record),
            *history.problems,
            *_check_steps(start, steps),
            *sample_problems,
            *_check_losses(log, history),
            *weights.problems,
            *_check_end(log, record, start, steps, num_attempts=len(attempts)),
        ),
        epochs=epochs,
        status=record.status if num_kinds["JobStatusChanged"] else "",
        steps_committed=len(steps),
        steps_undone=len({(e.generation, e.step) for e in log if isinstance(e, StepUndone)}),
        steps_rolled_back=history.num_rolled_back,
        steps_compared=weights.num_compared,
        steps_alone=weights.num_alone,
        digests_compared=weights.num_digests,
        last_step=max((step.step for step in steps), default=start),
        saved_step=max((e.step for e in log if isinstance(e, CheckpointCommitted)), default=0),
        digest_step=weights.newest_step,
        newest_digest=weights.newest,
        num_evals=num_kinds["EvalCompleted"],
        num_kinds=dict(num_kinds),
    )


def _check_log(log: Sequence[Event]) -> Iterator[str]:
    """Report gaps in the log, and events from another job."""
    expected = 1
    for event in log:
        # Sequence numbers start at 1; an event with number 0 has not been numbered yet.
        if event.seq and event.seq != expected:
            yield f"the log has event {event.seq} where {expected} was expected"
        expected = event.seq + 1 if event.seq else expected + 1
    job_ids = sorted({event.job_id for event in log})
    if len(job_ids) > 1:
        yield f"the log has events of {len(job_ids)} jobs: {', '.join(job_ids)}"


def _check_plan(attempts: Sequence[Attempt], steps: Sequence[StepCompleted]) -> Iterator[str]:
    if all(attempt.planned is None for attempt in attempts):
        if steps:
            yield (
                f"{len(steps)} steps were committed, but the log has no plan of the samples "
                "to train"
            )
        return
    for attempt in attempts:
        length = attempt.planned.num_eval_samples if attempt.planned is not None else None
        for done in attempt.evals:
            if length is not None and done.samples != length:
                yield (
                    f"the evaluation at step {done.step} used {done.samples} samples, "
                    f"the set has {length}"
                )


def _check_evaluations(
    attempts: Sequence[Attempt], steps: Sequence[StepCompleted], record: JobRecord
) -> Iterator[str]:
    missing = find_missing_evaluations(
        attempts,
        steps,
        evaluated=record.evaluated_steps,
        is_finished=record.status == "finished",
    )
    if missing:
        every = attempts[-1].evaluates
        names = ", ".join(map(str, missing[:MAX_NAMED]))
        more = f" and {len(missing) - MAX_NAMED} more" if len(missing) > MAX_NAMED else ""
        steps_text = "step" if len(missing) == 1 else "steps"
        yield f"no evaluation at {steps_text} {names}{more}, although eval.every is {every}"


def _check_steps(start: int, steps: Sequence[StepCompleted]) -> Iterator[str]:
    """Check that steps were committed in order, without gaps, by the newest generation."""
    newest, generation = start, 0
    for step in steps:
        if step.step <= newest:
            yield f"step {step.step} was committed again after step {newest}"
        elif step.step > newest + 1:
            first, last = newest + 1, step.step - 1
            missing = f"step {first} is" if first == last else f"steps {first} to {last} are"
            yield f"{missing} missing before step {step.step}"
        if step.generation < generation:
            yield (
                f"step {step.step} was committed by generation {step.generation} "
                f"after generation {generation} had continued"
            )
        newest, generation = max(newest, step.step), max(generation, step.generation)


def _check_losses(log: Sequence[Event], history: WeightHistory) -> Iterator[str]:
    """Check that planned changes undo no step, and that losing a worker undoes at most one step.

    Lost workers are counted by generation, not by position in the log, because a step that was
    committed before a worker was lost may be logged afterwards. Only lost ranks count, because
    losing a worker that is still joining costs no step.
    """
    undone: dict[int, set[int]] = defaultdict(set)
    losses: dict[int, set[str]] = defaultdict(set)
    for event in log:
        if isinstance(event, StepUndone):
            undone[event.generation].add(event.step)
        elif isinstance(event, WorkerLost | FaultInjected):
            # If the log lacks the generation, it does not show whether the worker was a rank. Count
            # the worker anyway, so that an incomplete log causes no false alarm.
            formed = history.formed.get(event.generation)
            if formed is None or event.worker in formed.ranks:
                losses[event.generation].add(event.worker)
        # If the job ends during a step, that step may be undone although no worker was lost.
        elif isinstance(event, UserErrorRaised) or (
            isinstance(event, JobStatusChanged) and event.status in TERMINAL_STATUSES
        ):
            losses[event.generation].add("")
        # A fault that cost no worker ended the previous generation.
        elif isinstance(event, GenerationFormed) and _follows_broken_connections(event):
            losses[event.generation - 1].add("")
    for generation, steps in undone.items():
        if len(steps) > len(losses[generation]):
            yield _name_waste(steps, len(losses[generation]))


def _follows_broken_connections(event: GenerationFormed) -> bool:
    """Return True if a network or scheduler fault ended the previous generation.

    A planned change alone does not excuse broken connections, so "broken" counts only as the sole
    reason.
    """
    whys = set(event.why.split("+"))
    return bool(whys & {"stalled", "restart"}) or whys == {"broken"}


def _name_waste(undone: set[int], num_losses: int) -> str:
    steps = sorted(undone)
    names = f"step {steps[0]} was" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]} were"
    if num_losses == 0:
        return f"{names} undone although no worker had been lost"
    return f"{names} undone for {num_losses} lost workers"


def _check_end(
    log: Sequence[Event],
    record: JobRecord,
    start: int,
    steps: Sequence[StepCompleted],
    *,
    num_attempts: int,
) -> Iterator[str]:
    # Only a finished job must have trained everything; a stopped or failed one may resume.
    planned = record.plan
    if planned is None or record.status != "finished":
        return
    reached = max((step.step for step in steps), default=start)
    # A decision to stop early is void once a later generation has continued from an older state.
    newest = max((step.generation for step in steps), default=0)
    decided = [e.step for e in log if isinstance(e, EarlyStopped) and e.generation >= newest]
    if decided:
        if decided[-1] != reached:
            yield f"the job finished at step {reached}, but was to stop early at step {decided[-1]}"
        return
    # A resume with another batch size changes the number of steps, but not the number of samples.
    # The same holds for a per-worker batch, whose global size changes with the number of workers.
    if planned.per_worker_batch_size or num_attempts > 1:
        last = max(steps, key=lambda step: step.step, default=None)
        trained = 0
        if last is not None:
            done = StepRange(last.epoch, last.first, last.samples)
            trained = done.position(planned.num_train_samples) + done.samples
        if trained != planned.total_samples:
            yield f"the job finished after {trained} of {planned.total_samples} samples"
    elif reached != planned.total_steps:
        yield f"the job finished at step {reached} of {planned.total_steps}"


@dataclass(frozen=True, kw_only=True)
class WeightsProof:
    """The evidence in the log about the ranks' weights."""

    problems: tuple[str, ...]
    num_compared: int
    """Committed steps of several ranks with equal fingerprints."""
    num_alone: int
    """Committed steps of a single rank."""
    num_digests: int
    """Digests that were compared with another rank's digest at the same step."""
    newest_step: int
    """The newest step with a digest; 0 if there is none."""
    newest: str
    """The newest digest and its step, for comparison with another job; empty if there is none."""


def compare_weights(log: Sequence[Event], history: WeightHistory) -> WeightsProof:
    """Compare the ranks' fingerprints and digests in the steps that led to the newest weights."""
    groups = _digests_by_step(log, history)
    shared = [step for step in history.steps if step.world_size > 1]
    agreed = [step for step in shared if step.ranks_agree]
    return WeightsProof(
        problems=(*_check_fingerprints(shared, history), *_check_digests(groups, history)),
        num_compared=len(agreed),
        num_alone=len(history.steps) - len(shared),
        num_digests=sum(len(group) for group in groups.values() if len(group) > 1),
        newest_step=max(groups, default=0),
        newest=f"{groups[max(groups)][0].digest} at step {max(groups)}" if groups else "",
    )


def _check_fingerprints(steps: Sequence[StepCompleted], history: WeightHistory) -> Iterator[str]:
    """Report each generation's first step in which ranks differ; later ones follow from it."""
    reported: set[int] = set()
    for step in steps:
        if not step.ranks_agree and step.generation not in reported:
            reported.add(step.generation)
            formed = history.formed.get(step.generation)
            names = ", ".join(formed.ranks) if formed else f"generation {step.generation}"
            yield f"at step {step.step} the ranks ({names}) had different fingerprints"


def _digests_by_step(
    log: Sequence[Event], history: WeightHistory
) -> dict[int, list[WeightsHashed]]:
    """Return the digests of the steps in ``history``; undone steps have different digests."""
    # Undone steps are excluded, so a step that was trained twice has the generation of its second
    # run.
    committed_by = {step.step: step.generation for step in history.steps}
    groups: dict[int, list[WeightsHashed]] = defaultdict(list)
    for event in log:
        if isinstance(event, WeightsHashed) and committed_by.get(event.step) == event.generation:
            groups[event.step].append(event)
    return groups


def _check_digests(groups: dict[int, list[WeightsHashed]], history: WeightHistory) -> Iterator[str]:
    for step, hashed in sorted(groups.items()):
        by_digest: dict[str, list[str]] = defaultdict(list)
        for event in hashed:
            by_digest[event.digest].append(f"rank {event.rank} on {event.worker}")
            formed = history.formed.get(event.generation)
            if formed is not None and event.worker not in formed.ranks:
                yield (
                    f"at step {step} {event.worker} reported its weights as a rank of generation "
                    f"{event.generation}, which it was not in"
                )
        if len(by_digest) > 1:
            # The larger group comes first, because the minority is more likely to be wrong.
            sides = sorted(by_digest.items(), key=lambda side: -len(side[1]))
            found = "; ".join(f"{digest[:12]} on {', '.join(who)}" for digest, who in sides)
            yield f"at step {step} the ranks had different weights: {found}"
