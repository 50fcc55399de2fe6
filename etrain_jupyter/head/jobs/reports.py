"""What trainers say, through their supervisors: each message becomes a fact or a stimulus."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from etrain_jupyter.bundle.restore import read_cells
from etrain_jupyter.bundle.sources import CellSource
from etrain_jupyter.errors import BundleError
from etrain_jupyter.head.coordinator import clock
from etrain_jupyter.head.coordinator.fault_injection import FATAL
from etrain_jupyter.head.jobs.crash_output import last_words
from etrain_jupyter.head.jobs.job_spec import TrainerFacts
from etrain_jupyter.log import events
from etrain_jupyter.rules.membership import stimuli as s
from etrain_jupyter.rules.membership.lineage import is_of_job

if TYPE_CHECKING:
    from etrain_jupyter.head.jobs.hosted_job import HostedJob

Message = dict[str, Any]

FENCED = frozenset({"store", "formed", "report", "steps", "eval", "best", "weights"})
"""What a rank says as a rank of its generation: nothing of it counts once that is over."""

FROM_ANYBODY = frozenset({"log", "checkpoint_committed", "checkpoint_failed"})
"""What counts whoever says it: a checkpoint is there, though its writer was released meanwhile."""

MAX_DELAY_S = 1.0
"""How long a message may have been under way, else the clocks of two machines differ."""


def take_report(job: HostedJob, trainer: str, message: Message) -> None:
    """Take one message of a trainer of this job."""
    facts = job.trainers.get(trainer)
    take = _TAKE.get(message["op"])
    if facts is None or take is None or job.state.is_ended:
        return
    op, generation = message["op"], message.get("generation") or 0
    if op not in FROM_ANYBODY and trainer not in job.state.members:
        return  # it was lost, or let go: it has no say any more
    is_over = generation != job.state.generation
    if is_over and (op in FENCED or (op == "user_error" and generation)):
        return
    take(job, trainer, facts, message)


def _on_started(job: HostedJob, _: str, facts: TrainerFacts, message: Message) -> None:
    facts.pid = message["pid"] or facts.pid


def _on_hello(job: HostedJob, trainer: str, facts: TrainerFacts, message: Message) -> None:
    facts.pid, facts.device = message["pid"], message["device"]
    facts.gpu = message.get("gpu", "")
    before, now = job.record.num_samples_before, message["plan"]["num_train_samples"]
    plan = job.record.plan if job.record.is_planned else None
    if before not in (0, now) and not job.order.is_forced:
        text = (
            f"data.train has {now} samples, and had {before} when the job was trained before: the "
            "rest of its epoch would be another one. Nothing was trained, and every checkpoint is "
            "there. Give it the same data, or resume with --force."
        )
        _fail(job, trainer, text)
        return
    if plan is None:
        job.log(events.JobPlanned, **message["plan"])
    elif _lengths(message["plan"]) != (plan.num_train_samples, plan.num_eval_samples):
        text = (
            f"data of different length on the workers: {_lengths(message['plan'])} samples on "
            f"{facts.worker}, {plan.num_train_samples, plan.num_eval_samples} on the first. "
            "data.train and data.eval must give the same samples everywhere."
        )
        _fail(job, trainer, text)
        return
    warm_s = clock.now() - facts.started_at
    job.log(events.WorkerWarmed, worker=facts.worker, trainer_pid=facts.pid, warm_s=warm_s)
    job.handle(
        s.TrainerWarm(trainer=trainer, warm_s=message["warm_s"], device=facts.device, gpu=facts.gpu)
    )


def _lengths(plan: Mapping[str, Any]) -> tuple[int, int]:
    return plan["num_train_samples"], plan["num_eval_samples"]


def _fail(job: HostedJob, trainer: str, text: str) -> None:
    error = s.UserErrorSeen(
        trainer=trainer, generation=0, progress=s.NO_PROGRESS, error=text, traceback=""
    )
    job.handle(error)


def _on_store(job: HostedJob, trainer: str, _: TrainerFacts, message: Message) -> None:
    for member in job.state.in_phase("ranked"):
        if member.trainer != trainer:
            told = {k: message[k] for k in ("op", "generation", "key", "value")}
            job.send(member.trainer, told)


def _on_formed(job: HostedJob, trainer: str, _: TrainerFacts, message: Message) -> None:
    times = {name: message.get(name, 0.0) for name in ("connect_s", "sync_s", "wrap_s")}
    generation = message["generation"]
    if job.state.current.is_restoring and job.record.restored_in != generation:
        job.log_restored(message["step"])
    step = message.get("step", 0)
    job.handle(s.TrainerFormed(trainer=trainer, generation=generation, step=step, **times))


def _on_report(job: HostedJob, trainer: str, _: TrainerFacts, message: Message) -> None:
    step, evals = message["progress"]
    generation = message["generation"]
    if message["why"] == "nan":
        job.handle(
            s.NonFiniteLoss(
                trainer=trainer,
                generation=generation,
                rank=job.step_clock.ranks.index(trainer),
                progress=(step, evals),
                loss=message["loss"],
                is_source=message["is_source"],
            )
        )
        return
    ended_early = message.get("ended_early")
    if ended_early and job.record.early_stop_generation != generation:
        # All ranks report the same: the first report is logged.
        job.log(events.EarlyStopped, **ended_early)
    job.handle(
        s.TrainerReported(
            trainer=trainer,
            generation=generation,
            progress=(step, evals),
            why=message["why"],
            undone=message["undone"],
            ending=ended_early["reason"] if ended_early else "",
            error=message.get("error", ""),
            backend=message.get("backend", ""),
            is_excused=message.get("is_excused", False),
        )
    )


def _on_steps(job: HostedJob, _: str, __: TrainerFacts, message: Message) -> None:
    records = job.step_clock.take(message["records"], after=job.record.logged_step)
    job.log_all([events.StepCompleted(job_id=job.order.job_id, **r) for r in records])
    if records:
        job.handle(
            s.StepsCommitted(
                step=job.record.logged_step,
                step_s=job.step_clock.step_s,
                committed_at=_here(records[-1]["time"]),
            )
        )


def _here(told_at: float) -> float:
    """Return an instant by the coordinator's clock; now if the other machine's seems to differ."""
    age_s = time.time() - told_at
    return clock.now() - (age_s if 0 <= age_s < MAX_DELAY_S else 0.0)


def _on_eval(job: HostedJob, _: str, __: TrainerFacts, message: Message) -> None:
    record = message["record"]
    if record["step"] == job.record.evaluated_step:
        return  # a new rank 0 repeats what the previous one may not have sent
    job.log(events.EvalCompleted, **record)
    if not math.isfinite(record["loss"]):
        what = f"the loss of the evaluation is {record['loss']}; training goes on"
        text = f"step {record['step']}: {what}"
        job.log(events.LogLine, level="warning", worker="", text=text)


def _on_best(job: HostedJob, _: str, __: TrainerFacts, message: Message) -> None:
    # Every generation's rank 0 repeats it: the one that found it may have died before it sent it.
    known, record = job.record.best_told, message["record"]
    if known is None or any(getattr(known, name) != value for name, value in record.items()):
        job.log(events.BestReached, **record)


def _on_weights(job: HostedJob, _: str, facts: TrainerFacts, message: Message) -> None:
    values = {key: message[key] for key in ("step", "rank", "digest")}
    job.log(events.WeightsHashed, worker=facts.worker, **values)


def _on_rank_times(job: HostedJob, _: str, facts: TrainerFacts, message: Message) -> None:
    job.log(events.RankTimed, worker=facts.worker, **message["record"])


def _on_committed(job: HostedJob, trainer: str, _: TrainerFacts, message: Message) -> None:
    step, generation = message["record"]["step"], message["generation"]
    is_ahead = trainer not in job.state.members and step > job.state.step
    if is_ahead or not is_of_job(generation=generation, step=step, starts=job.record.starts):
        return  # it was given up and has gone on alone: the job never had these steps
    job.log(events.CheckpointCommitted, **message["record"])
    job.review_pace()
    if step <= job.state.step:
        duration_s = message["record"].get("duration_s", 0.0)
        job.handle(s.CheckpointSaved(step=step, trainer=trainer, duration_s=duration_s))


def _on_checkpoint_failed(job: HostedJob, trainer: str, _: TrainerFacts, message: Message) -> None:
    told = {"step": message["step"], "error": message["error"]}
    job.log(events.CheckpointFailed, **told)
    job.handle(s.CheckpointSaved(ok=False, trainer=trainer, **told))


def _on_user_error(job: HostedJob, trainer: str, _: TrainerFacts, message: Message) -> None:
    step, evals = message["progress"]
    job.handle(
        s.UserErrorSeen(
            trainer=trainer,
            generation=message["generation"],
            progress=(step, evals),
            error=message["error"],
            traceback=message["traceback"],
        )
    )


def _on_log(job: HostedJob, _: str, facts: TrainerFacts, message: Message) -> None:
    facts.last_lines.append(message["text"])
    if message.get("is_printed") and not job.printed.take(clock.now()):
        return
    job.report_dropped_lines()
    job.log(events.LogLine, level=message["level"], worker=facts.worker, text=message["text"])


def _on_exited(job: HostedJob, trainer: str, facts: TrainerFacts, message: Message) -> None:
    words = last_words(facts.worker, facts.last_lines, _cells_of(job))
    lost = s.TrainerLost(
        trainer=trainer,
        cause=message["cause"],
        last_words=words,
        injected=facts.is_injected,
    )
    job.handle(lost)


def _cells_of(job: HostedJob) -> dict[str, CellSource]:
    """Return the notebook's cells; none if its objects cannot be read any more."""
    try:
        return read_cells(job.order.bundle_path)
    except (OSError, BundleError):
        return {}


def _on_fault_fired(job: HostedJob, _: str, facts: TrainerFacts, message: Message) -> None:
    fault = job.planned.fire(message["id"])
    if fault is None:
        return
    facts.is_injected = facts.is_injected or fault["kind"] in FATAL
    job.log(events.FaultInjected, worker=facts.worker, fault=fault["kind"], step=job.state.step)


_TAKE: dict[str, Callable[[HostedJob, str, TrainerFacts, Message], None]] = {
    "started": _on_started,
    "hello": _on_hello,
    "store": _on_store,
    "formed": _on_formed,
    "report": _on_report,
    "steps": _on_steps,
    "eval": _on_eval,
    "best": _on_best,
    "weights": _on_weights,
    "rank_times": _on_rank_times,
    "checkpoint_committed": _on_committed,
    "checkpoint_failed": _on_checkpoint_failed,
    "user_error": _on_user_error,
    "log": _on_log,
    "exited": _on_exited,
    "fault_fired": _on_fault_fired,
}
