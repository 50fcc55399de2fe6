"""Text of each event in the event list and in the log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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


UNLISTED = (
    StepCompleted,
    WeightsHashed,
    GenerationReady,
    RankTimed,
    CostUpdated,
    ExhibitStored,
    ExhibitsRemoved,
)
"""Events too frequent for the event list; charts, exhibits and the audit show them."""
_STATUS_LEVELS = {"failed": "error", "waiting": "warning", "finished": "good"}


def describe(event: Event) -> Line | None:
    """Return the line of an event; None for an event that the list omits."""
    if isinstance(event, UNLISTED):
        return None
    line = _describe_job_event(event) or _describe_worker_event(event)
    # If this version has no text for the event, show the event's name.
    return line or _describe_training_event(event) or Line(text=event.kind)


def _describe_job_event(event: Event) -> Line | None:
    match event:
        case JobSubmitted():
            bounds = span(event.min_workers, event.max_workers)
            return Line(text=f"Submitted to pool {event.pool} for {bounds}")
        case JobResumed():
            bounds = span(event.min_workers, event.max_workers)
            differs = f"; differences: {', '.join(event.differs)}" if event.differs else ""
            where = f"on pool {event.pool} for {bounds}"
            text = f"Resumed {where}, {event.step:,} steps in the log{differs}"
            return Line(text=text, level="good")
        case SchedulerRestarted():
            trainers = "its trainer" if len(event.workers) == 1 else "their trainers"
            kept = f"{workers(len(event.workers))} kept {trainers}"
            lost = f"; lost meanwhile: {', '.join(event.lost)}" if event.lost else ""
            text = f"The scheduler died and restarted after {seconds(event.away_s)}; {kept}{lost}"
            return Line(text=text, level="warning")
        case JobPlanned():
            parameters = f", {event.model_size}" if event.model_size else ""
            # With batch.per_worker, the number of steps depends on the number of workers, but the
            # number of samples does not.
            each = event.per_worker_batch_size
            step = f"{each} per worker and step" if each else f"{event.global_batch_size} per step"
            length = f"{event.total_samples:,} samples" if each else f"{event.total_steps:,} steps"
            over = f"{event.num_train_samples:,} samples"
            return Line(text=f"Planned {length} over {over}, {step}{parameters}")
        case JobStatusChanged():
            level = _STATUS_LEVELS.get(event.status, "info")
            if level == "info" and event.reason and not event.seq:
                # This event is not in the log. With it, this kernel reports a problem with its
                # connection to the job.
                level = "warning"
            reason = f": {event.reason}" if event.reason else ""
            return Line(text=event.status.capitalize() + reason, level=level)
        case UserErrorRaised():
            where = ", ".join(event.workers)
            what = f"Your code raised on {where}" if event.traceback else "Failed"
            return Line(text=f"{what}: {event.error}", level="error")
        case LogLine():
            level = event.level if event.level in ("warning", "error") else "info"
            text = f"{event.worker}: {event.text}" if event.worker else event.text
            return Line(text=text, level=level)
        case UnknownEvent():
            return Line(text=f"{event.name} (written by a newer version)")
    return None


def _describe_worker_event(event: Event) -> Line | None:
    match event:
        case WorkersScaled():
            return Line(text=f"Scaled to {span(event.min_workers, event.max_workers)}")
        case WorkersSized():
            return Line(text=f"Sized by goodput to {event.reason}")
        case WorkerJoined():
            return Line(text=f"{event.worker} joined the job; its trainer is starting")
        case WarmUpReached():
            doing = {
                "build": "has imported torch; it builds the model and the data sets",
                "trial": "runs a trial pass",
                "compile": "compiles the model",
            }
            return Line(text=f"{event.worker} {doing.get(event.phase, event.phase)}")
        case WorkerWarmed():
            return Line(text=f"{event.worker} is warm after {seconds(event.warm_s)}")
        case GenerationFormed():
            stall = f" after a stall of {seconds(event.stall_s)}" if event.stall_s else ""
            continues = "continues" if event.world_size == 1 else "continue"
            return Line(
                text=f"Generation {event.generation} ({event.why}): "
                f"{workers(event.world_size)} {continues} from step {event.step:,}{stall}",
                level="good",
            )
        case PreemptionNoticed():
            text = f"{event.worker} will be preempted in {_seconds_left(event)}"
            return Line(text=text, level="warning")
        case RebalanceRecommended():
            return Line(
                text=f"{event.worker} is likely to be preempted; it keeps training, and a "
                "checkpoint is saved",
                level="warning",
            )
        case WorkerLeft():
            return Line(text=f"{event.worker} left ({event.reason}); nothing was lost")
        case WorkerLost():
            after = f", detected after {seconds(event.detected_s)}" if event.detected_s else ""
            return Line(text=f"{event.worker} lost ({event.cause}){after}", level="error")
        case FaultInjected():
            return Line(text=f"Fault {event.fault} injected into {event.worker}", level="warning")
    return None


def _describe_training_event(event: Event) -> Line | None:
    match event:
        case StepUndone():
            survivors = counted(len(event.workers), "survivor")
            text = f"Step {event.step:,} undone on {survivors}; it will be trained again"
            return Line(text=text, level="warning")
        case JobRestored():
            return Line(text=restored_text(event), level="warning")
        case EvalCompleted():
            values = "".join(f", {name} {number(value)}" for name, value in event.metrics.items())
            return Line(
                text=f"Evaluated step {event.step:,} on {event.samples:,} samples: "
                f"loss {number(event.loss)}{values}"
            )
        case EvalScored():
            values = ", ".join(f"{name} {number(value)}" for name, value in event.scores.items())
            text = f"Scored the evaluation of step {event.step:,}"
            return Line(text=f"{text}: {values}" if values else text)
        case BestReached():
            best = f"{event.metric} {number(event.value)} at step {event.step:,}"
            return Line(text=f"Best so far: {best}", level="good")
        case EarlyStopped():
            return Line(text=f"{event.reason[:1].upper()}{event.reason[1:]}", level="good")
        case LossNotFinite():
            where = f" on {', '.join(event.workers)}" if event.workers else ""
            return Line(
                text=f"The loss of step {event.step:,} is {event.loss}{where}: no worker updated "
                "its weights",
                level="error",
            )
        case CheckpointCommitted():
            took, stall = seconds(event.duration_s), seconds(event.stall_s)
            return Line(
                text=f"Checkpoint of step {event.step:,}: {size(event.size_bytes)} in {took}, "
                f"training stalled for {stall}"
            )
        case CheckpointIntervalChosen():
            return Line(text=f"Checkpoints {event.reason}")
        case CheckpointFailed():
            text = f"Checkpoint of step {event.step:,} failed: {event.error}"
            return Line(text=text, level="error")
    return None


def marker_of(event: Event) -> tuple[str, str] | None:
    """Return the kind and the text of an event's marker; None if the event alone has none."""
    match event:
        case JobResumed():
            return "resumed", f"Resumed on pool {event.pool}"
        case JobRestored():
            return "restored", restored_text(event)
        case PreemptionNoticed():
            return "notice", f"{event.worker} to be preempted in {_seconds_left(event)}"
        case RebalanceRecommended():
            return "notice", f"{event.worker} likely to be preempted"
        case FaultInjected():
            return "notice", f"Fault {event.fault} injected into {event.worker}"
        case CheckpointCommitted():
            return "checkpoint", f"Checkpoint of step {event.step:,}"
        case CheckpointFailed():
            return "failed", f"Checkpoint of step {event.step:,} failed"
        case UserErrorRaised():
            return "failed", event.error
    return None


def _seconds_left(event: PreemptionNoticed) -> str:
    return seconds(max(0.0, event.deadline - event.time))


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
