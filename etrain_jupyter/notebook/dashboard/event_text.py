"""Text of each event in the event list and in the log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import singledispatch

from etrain_jupyter.display.numbers import counted, number, seconds, size
from etrain_jupyter.log.events import (
    BestReached,
    CheckpointCommitted,
    CheckpointFailed,
    CheckpointIntervalChosen,
    CostUpdated,
    EarlyStopped,
    EvalCompleted,
    EvalScored,
    Event,
    ExhibitsRemoved,
    ExhibitStored,
    FaultInjected,
    GenerationFormed,
    GenerationReady,
    JobPlanned,
    JobRestored,
    JobResumed,
    JobStatusChanged,
    JobSubmitted,
    LogLine,
    LossNotFinite,
    PreemptionNoticed,
    RankTimed,
    RebalanceRecommended,
    SchedulerRestarted,
    StepCompleted,
    StepUndone,
    UnknownEvent,
    UserErrorRaised,
    WarmUpReached,
    WeightsHashed,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
    WorkersScaled,
    WorkersSized,
    WorkerWarmed,
)


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the event list."""

    text: str
    level: str = "info"
    """``info``, ``good``, ``warning`` or ``error``."""


@singledispatch
def describe(event: Event) -> Line | None:
    """Return the line of an event; None for an event that the list omits."""
    # This version has no text for the event: show the event's name instead.
    return Line(text=event.kind)


@describe.register
def _describe_nothing(
    event: StepCompleted
    | WeightsHashed
    | GenerationReady
    | RankTimed
    | CostUpdated
    | ExhibitStored
    | ExhibitsRemoved,
) -> Line | None:
    return None  # too many for the list: the charts, the exhibits and the audit show them


@describe.register
def _describe_job_submitted(event: JobSubmitted) -> Line:
    bounds = span(event.min_workers, event.max_workers)
    return Line(text=f"Submitted to pool {event.pool} for {bounds}")


@describe.register
def _describe_job_resumed(event: JobResumed) -> Line:
    bounds = span(event.min_workers, event.max_workers)
    differs = f"; differences: {', '.join(event.differs)}" if event.differs else ""
    place = f"on pool {event.pool} for {bounds}"
    return Line(text=f"Resumed {place}, {event.step:,} steps in the log{differs}", level="good")


@describe.register
def _describe_scheduler_restarted(event: SchedulerRestarted) -> Line:
    trainers = "its trainer" if len(event.workers) == 1 else "their trainers"
    kept = f"{workers(len(event.workers))} kept {trainers}"
    lost = f"; lost meanwhile: {', '.join(event.lost)}" if event.lost else ""
    return Line(
        text=f"The scheduler died and restarted after {seconds(event.away_s)}; {kept}{lost}",
        level="warning",
    )


@describe.register
def _describe_job_planned(event: JobPlanned) -> Line:
    parameters = f", {event.model_size}" if event.model_size else ""
    # With batch.per_worker, the number of steps depends on the number of workers, but the number of
    # samples does not.
    each = event.per_worker_batch_size
    size = f"{each} per worker and step" if each else f"{event.global_batch_size} per step"
    length = f"{event.total_samples:,} samples" if each else f"{event.total_steps:,} steps"
    return Line(
        text=f"Planned {length} over {event.num_train_samples:,} samples, {size}{parameters}"
    )


@describe.register
def _describe_job_status_changed(event: JobStatusChanged) -> Line:
    text = event.status.capitalize() + (f": {event.reason}" if event.reason else "")
    level = _STATUS_LEVELS.get(event.status, "info")
    if level == "info" and event.reason and not event.seq:
        # This event is not in the log: with it, this kernel reports a problem with its connection
        # to the job.
        level = "warning"
    return Line(text=text, level=level)


_STATUS_LEVELS = {"failed": "error", "waiting": "warning", "finished": "good"}


@describe.register
def _describe_workers_scaled(event: WorkersScaled) -> Line:
    return Line(text=f"Scaled to {span(event.min_workers, event.max_workers)}")


@describe.register
def _describe_workers_sized(event: WorkersSized) -> Line:
    return Line(text=f"Sized by goodput to {event.reason}")


@describe.register
def _describe_worker_joined(event: WorkerJoined) -> Line:
    return Line(text=f"{event.worker} joined the job; its trainer is starting")


@describe.register
def _describe_warm_up(event: WarmUpReached) -> Line:
    doing = {
        "build": "has imported torch; it builds the model and the data sets",
        "trial": "runs a trial pass",
        "compile": "compiles the model",
    }
    return Line(text=f"{event.worker} {doing.get(event.phase, event.phase)}")


@describe.register
def _describe_worker_warmed(event: WorkerWarmed) -> Line:
    return Line(text=f"{event.worker} is warm after {seconds(event.warm_s)}")


@describe.register
def _describe_generation_formed(event: GenerationFormed) -> Line:
    stall = f" after a stall of {seconds(event.stall_s)}" if event.stall_s else ""
    continues = "continues" if event.world_size == 1 else "continue"
    return Line(
        text=f"Generation {event.generation} ({event.why}): "
        f"{workers(event.world_size)} {continues} from step {event.step:,}{stall}",
        level="good",
    )


@describe.register
def _describe_step_undone(event: StepUndone) -> Line:
    survivors = counted(len(event.workers), "survivor")
    return Line(
        text=f"Step {event.step:,} undone on {survivors}; it will be trained again",
        level="warning",
    )


@describe.register
def _describe_job_restored(event: JobRestored) -> Line:
    return Line(text=restored_text(event), level="warning")


@describe.register
def _describe_eval_completed(event: EvalCompleted) -> Line:
    values = "".join(f", {name} {number(value)}" for name, value in event.metrics.items())
    return Line(
        text=f"Evaluated step {event.step:,} on {event.samples:,} samples: "
        f"loss {number(event.loss)}{values}"
    )


@describe.register
def _describe_eval_scored(event: EvalScored) -> Line:
    values = ", ".join(f"{name} {number(value)}" for name, value in event.scores.items())
    text = f"Scored the evaluation of step {event.step:,}"
    return Line(text=f"{text}: {values}" if values else text)


@describe.register
def _describe_best_reached(event: BestReached) -> Line:
    return Line(
        text=f"Best so far: {event.metric} {number(event.value)} at step {event.step:,}",
        level="good",
    )


@describe.register
def _describe_early_stopped(event: EarlyStopped) -> Line:
    return Line(text=f"{event.reason[:1].upper()}{event.reason[1:]}", level="good")


@describe.register
def _describe_loss_not_finite(event: LossNotFinite) -> Line:
    where = f" on {', '.join(event.workers)}" if event.workers else ""
    return Line(
        text=f"The loss of step {event.step:,} is {event.loss}{where}: no worker updated its "
        "weights",
        level="error",
    )


@describe.register
def _describe_preemption_noticed(event: PreemptionNoticed) -> Line:
    left = seconds(max(0.0, event.deadline - event.time))
    return Line(text=f"{event.worker} will be preempted in {left}", level="warning")


@describe.register
def _describe_rebalance_recommended(event: RebalanceRecommended) -> Line:
    return Line(
        text=f"{event.worker} is likely to be preempted; it keeps training, and a checkpoint is "
        "saved",
        level="warning",
    )


@describe.register
def _describe_worker_left(event: WorkerLeft) -> Line:
    return Line(text=f"{event.worker} left ({event.reason}); nothing was lost")


@describe.register
def _describe_worker_lost(event: WorkerLost) -> Line:
    detected = f", detected after {seconds(event.detected_s)}" if event.detected_s else ""
    return Line(text=f"{event.worker} lost ({event.cause}){detected}", level="error")


@describe.register
def _describe_fault_injected(event: FaultInjected) -> Line:
    return Line(text=f"Fault {event.fault} injected into {event.worker}", level="warning")


@describe.register
def _describe_checkpoint_committed(event: CheckpointCommitted) -> Line:
    return Line(
        text=f"Checkpoint of step {event.step:,}: {size(event.size_bytes)} "
        f"in {seconds(event.duration_s)}, training stalled for {seconds(event.stall_s)}"
    )


@describe.register
def _describe_checkpoint_interval_chosen(event: CheckpointIntervalChosen) -> Line:
    return Line(text=f"Checkpoints {event.reason}")


@describe.register
def _describe_checkpoint_failed(event: CheckpointFailed) -> Line:
    return Line(text=f"Checkpoint of step {event.step:,} failed: {event.error}", level="error")


@describe.register
def _describe_user_error_raised(event: UserErrorRaised) -> Line:
    where = ", ".join(event.workers)
    what = f"Your code raised on {where}" if event.traceback else "Failed"
    return Line(text=f"{what}: {event.error}", level="error")


@describe.register
def _describe_log_line(event: LogLine) -> Line:
    level = event.level if event.level in ("warning", "error") else "info"
    return Line(text=f"{event.worker}: {event.text}" if event.worker else event.text, level=level)


@describe.register
def _describe_unknown_event(event: UnknownEvent) -> Line:
    return Line(text=f"{event.name} (written by a newer version)")


def first_step_line(stages: Mapping[str, float]) -> Line:
    """Return how long each stage of the start-up took, for the event list."""
    parts = ", ".join(f"{name} {seconds(took_s)}" for name, took_s in stages.items())
    total = seconds(sum(stages.values()))
    return Line(text=f"First step after {total}: {parts}", level="good")


def restored_text(event: JobRestored) -> str:
    """Describe the effect of a restore, for the event list and the marker."""
    undone = counted(event.num_undone, "step")
    again = f", {undone} will be trained again" if event.num_undone else ""
    return f"Restored the state of step {event.step:,}{again}"


def describe_times(event: RankTimed) -> str:
    """Return the step times that a worker reports, as a log line."""
    whole = max(event.elapsed_s, 1e-9)
    parts = {
        "data": event.data_s,
        "forward and backward": event.compute_s,
        "communication": event.communication_s,
        "optimizer": event.optimizer_s,
    }
    other = {"evaluation": event.evaluation_s, "checkpoints": event.checkpoint_s}
    extra = [f"{name} {seconds(spent)}" for name, spent in other.items() if spent >= 0.001]
    # The rank only evaluated or saved since its last report, so there are no shares.
    if not event.num_steps:
        return f"after step {event.step:,}: {', '.join(extra)}"
    shares = ", ".join(f"{name} {spent / whole:.0%}" for name, spent in parts.items())
    text = (
        f"{counted(event.num_steps, 'step')} to {event.step:,} at "
        f"{event.samples / whole:,.0f} samples/s: {shares}"
    )
    return "; ".join([text, *extra])


def workers(count: int) -> str:
    """Return ``1 worker``, ``3 workers``."""
    return counted(count, "worker")


def span(least: int, most: int) -> str:
    """Return ``2 workers``, ``1 to 4 workers``."""
    return workers(most) if least == most else f"{least} to {workers(most)}"
