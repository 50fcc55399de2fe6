"""Turn reports from a job's trainers into events for its log and stimuli for its state machine.

Nothing is carried out here: ``TrainerMessages.take`` yields the consequences of a report, in order.
``HostedJob`` appends the events, relays the entries and passes on the stimuli.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, assert_never

from etrain_jupyter.bundle.restore import read_cells
from etrain_jupyter.bundle.sources import CellSource
from etrain_jupyter.errors import BundleError
from etrain_jupyter.head.coordinator import clock
from etrain_jupyter.head.jobs.job_spec import JobSpec, TrainerFacts
from etrain_jupyter.head.jobs.planned_faults import FATAL, PlannedFaults
from etrain_jupyter.head.jobs.rendezvous import Rendezvous
from etrain_jupyter.head.jobs.trainer_output import BURST, PER_S, PrintedLines, last_words
from etrain_jupyter.log import events
from etrain_jupyter.log.job_record import JobRecord
from etrain_jupyter.rules.membership import stimuli as s
from etrain_jupyter.rules.membership.lineage import is_of_job
from etrain_jupyter.rules.membership.membership import JobState
from etrain_jupyter.wire import messages as m

MAX_DELAY_S = 1.0
"""Maximum age of a report in seconds. If it appears to be older, the machines' clocks differ."""


@dataclass
class StepClock:
    """Accept each step record once and in order, even if a new rank 0 resends some."""

    step_s: float = 0.0
    """Duration of a step in seconds, smoothed over about ten steps; 0 before the first."""
    ranks: tuple[str, ...] = field(default=())
    """Trainers of the current generation in rank order."""

    def take(self, records: Sequence[dict[str, Any]], *, after: int) -> list[dict[str, Any]]:
        """Return the new records. A gap before them is not an error here; the audit reports it.

        Args:
            records: Step records, oldest first.
            after: The newest step in the log.
        """
        fresh = []
        for record in records:
            if record["step"] <= after:
                continue
            after = record["step"]
            duration_s = record["samples"] / max(record["samples_per_s"], 1e-9)
            # Exponential moving average, initialized by the first step.
            self.step_s = 0.9 * self.step_s + 0.1 * duration_s if self.step_s else duration_s
            fresh.append(record)
        return fresh


@dataclass(frozen=True, kw_only=True)
class Relay:
    """Send the same message to several ranks."""

    message: m.StoreEntry | m.RankKeys
    trainers: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class KeepExhibit:
    """Check and store an exhibit."""

    report: m.ExhibitFound
    worker: str


Consequence = events.Event | list[events.Event] | s.Stimulus | Relay | KeepExhibit
"""One action for ``HostedJob``. A list of events is appended in one write, because a report may
contain hundreds of steps."""


class TrainerMessages:
    """Keep the facts that a job's trainers report, and derive the consequences of each report.

    Args:
        spec: The job.
        record: Fold of the job's log; ``HostedJob`` adds each event to it.
    """

    def __init__(self, spec: JobSpec, record: JobRecord) -> None:
        self._spec, self._record = spec, record
        self.trainers: dict[str, TrainerFacts] = {}
        """All launched trainers by name, including those that have left."""
        self.step_clock = StepClock()
        self.planned = PlannedFaults(spec.faults)
        self.printed = PrintedLines()
        self._rendezvous = Rendezvous()

    @staticmethod
    def complete(event: events.Event, state: JobState) -> events.Event:
        """Return an event with the current generation, unless it has its own."""
        # Set it now, not when the consequence was created, because a stimulus in between may have
        # formed the next generation.
        if event.generation == _CURRENT:
            return replace(event, generation=state.generation)
        return event

    def take(
        self, report: m.AnyReport, facts: TrainerFacts, state: JobState
    ) -> Iterator[Consequence]:
        """Yield the consequences of a trainer's report, in order; the report is not fenced.

        Carry out each one before requesting the next, which may depend on the updated record.
        """
        match report:
            case m.TrainerStarted():
                facts.pid = report.pid or facts.pid  # needed in messages; the hello repeats it
            case m.WarmUpBegun() | m.TrainerHello():
                yield from self._on_warm_up(report, facts)
            case m.StoreEntry() | m.RankKey():
                yield from self._relay(report, state)
            case m.GenerationJoined():
                yield from self._on_joined(report, facts, state)
            case m.GenerationLeft():
                yield from self._on_left(report)
            case m.StepsTrained():
                yield from self._on_steps(report)
            case m.EvalFinished():
                yield from self._on_eval(report.record)
            case m.EvalScoreFound() | m.EvalScoreLost():
                yield from self._on_scores(report)
            case m.ExhibitFound():
                yield KeepExhibit(report=report, worker=facts.worker)
            case m.BestFound():
                yield from self._on_best(report.record)
            case m.WeightsFingerprinted():
                values = {"step": report.step, "rank": report.rank, "digest": report.digest}
                yield self._event(events.WeightsHashed, worker=facts.worker, **values)
            case m.RankTimesMeasured():
                yield self._event(events.RankTimed, worker=facts.worker, **report.record)
            case m.CheckpointWritten():
                yield from self._on_checkpoint(report, state)
            case m.CheckpointNotWritten(step=step, error=error):
                yield self._event(events.CheckpointFailed, step=step, error=error)
                yield s.CheckpointSaved(ok=False, trainer=report.trainer, step=step, error=error)
            case m.UserCodeFailed():
                yield s.UserErrorSeen(
                    trainer=report.trainer,
                    generation=report.generation,
                    progress=report.progress,
                    error=report.error,
                    traceback=report.traceback,
                )
            case m.TextLogged():
                yield from self._on_text(report, facts)
            case m.TrainerExited():
                # The supervisor has read its last lines before reporting the exit.
                yield s.TrainerLost(
                    trainer=report.trainer,
                    cause=report.cause,
                    last_words=last_words(facts.worker, facts.last_lines, self._cells()),
                    injected=facts.is_injected,
                )
            case m.FaultFired():
                yield from self._on_fault(report, facts, state)
            case _:
                assert_never(report)

    def _event(self, kind: type[events.Event], **values: Any) -> events.Event:
        # Use the current time and generation, unless ``values`` contains others.
        common = {"time": time.time(), "generation": _CURRENT}
        return kind(job_id=self._spec.job_id, **{**common, **values})

    # --- one method per kind of report ---

    def _relay(self, report: m.StoreEntry | m.RankKey, state: JobState) -> Iterator[Relay]:
        # Only the current generation needs it, because older reports were fenced.
        if isinstance(report, m.RankKey):
            ranks = self.step_clock.ranks
            if (keys := self._rendezvous.take(report, ranks)) is not None:
                yield Relay(message=keys, trainers=ranks)
            return
        others = (member.trainer for member in state.in_phase("ranked"))
        # Use number 0, because numbers count the sender's reports, not these messages.
        entry = replace(report, number=0)
        yield Relay(message=entry, trainers=tuple(t for t in others if t != report.trainer))

    def _on_warm_up(
        self, report: m.WarmUpBegun | m.TrainerHello, facts: TrainerFacts
    ) -> Iterator[Consequence]:
        if isinstance(report, m.TrainerHello):
            yield from self._on_hello(report, facts)
        elif self._record.startup.is_new(report.phase):
            yield self._event(events.WarmUpReached, worker=facts.worker, phase=report.phase)

    def _on_hello(self, report: m.TrainerHello, facts: TrainerFacts) -> Iterator[Consequence]:
        # The first case that applies:
        #
        #     resumed, data.train differs in length      user error, unless the resume was forced
        #     resumed, data.train is in other shards     user error, unless the resume was forced
        #     the attempt has no plan yet                log this trainer's plan; it is warm
        #     its data differ from the plan              user error
        #     otherwise                                  it is warm
        facts.pid, facts.device, facts.gpu = report.pid, report.device, report.gpu
        before, now = self._record.num_samples_before, report.plan["num_train_samples"]
        plan = self._record.plan if self._record.is_planned else None
        if before not in (0, now) and not self._spec.is_forced:
            yield _user_error(
                report.trainer,
                f"data.train has {now} samples, but had {before} when the job was last trained, so "
                "the rest of its epoch would have other samples. Nothing was trained, and all "
                "checkpoints are kept. Use the same data, or resume with --force.",
            )
            return
        is_other = before and self._record.shards_before != _shards(report.plan)
        if is_other and not self._spec.is_forced:
            yield _user_error(report.trainer, _OTHER_SHARDS)
            return
        if plan is None:
            yield self._event(events.JobPlanned, **report.plan)
        elif _lengths(report.plan) != (plan.num_train_samples, plan.num_eval_samples):
            yield _user_error(
                report.trainer,
                f"the workers have data of different lengths: {_lengths(report.plan)} samples on "
                f"{facts.worker}, {plan.num_train_samples, plan.num_eval_samples} on the first. "
                "data.train and data.eval must give the same samples on all workers.",
            )
            return
        elif _shards(report.plan) != (plan.train_layout, plan.train_digest):
            yield _user_error(
                report.trainer,
                f"the shards of data.train on {facts.worker} differ from those on the first worker "
                "in content or in the sizes of their blocks. Copy the same files to all workers, "
                "or put them into a bucket.",
            )
            return
        yield self._event(
            events.WorkerWarmed,
            worker=facts.worker,
            trainer_pid=facts.pid,
            warm_s=clock.now() - facts.started_at,
        )
        yield s.TrainerWarm(
            trainer=report.trainer, warm_s=report.warm_s, device=facts.device, gpu=facts.gpu
        )

    def _on_joined(
        self, report: m.GenerationJoined, facts: TrainerFacts, state: JobState
    ) -> Iterator[Consequence]:
        # From now on, the trainer knows where all earlier generations began.
        facts.num_starts = report.generation - 1
        if state.current.is_restoring and self._record.restored_in != report.generation:
            # Only the generation's first report; ``restored_in`` is set by the event below.
            #
            #     log            ... 38 39 40                     40 was the newest step
            #     checkpoint     ... 35                           rank 0 restored this one
            #     first to join  "generation 4 begins at 35": steps 36 to 40 are undone
            yield self.restored_to(report.step, state.current.why_restored)
        yield s.TrainerFormed(
            trainer=report.trainer,
            generation=report.generation,
            step=report.step,
            connect_s=report.connect_s,
            sync_s=report.sync_s,
            wrap_s=report.wrap_s,
        )

    def _on_left(self, report: m.GenerationLeft) -> Iterator[Consequence]:
        if report.why == "nan":
            yield s.NonFiniteLossSeen(
                trainer=report.trainer,
                generation=report.generation,
                rank=self.step_clock.ranks.index(report.trainer),
                progress=report.progress,
                loss=report.loss if report.loss is not None else math.nan,
                is_source=report.is_source,
            )
            return
        ended_early = report.ended_early
        if ended_early and self._record.early_stop_generation != report.generation:
            # All ranks send the same report, so only the first one is logged.
            yield self._event(events.EarlyStopped, **ended_early)
        yield s.TrainerReported(
            trainer=report.trainer,
            generation=report.generation,
            progress=report.progress,
            why=report.why,
            undone=report.undone,
            ending=ended_early["reason"] if ended_early else "",
            error=report.error,
            backend=report.backend,
            is_excused=report.is_excused,
        )

    def _on_steps(self, report: m.StepsTrained) -> Iterator[Consequence]:
        # When the generator continues after the first ``yield``, the steps are in the log and the
        # record, so the stimulus carries the committed step.
        job_id, steps = self._spec.job_id, self.step_clock
        records = steps.take(report.records, after=self._record.logged_step)
        if records:
            yield [events.StepCompleted(job_id=job_id, **record) for record in records]
            yield s.StepsCommitted(
                step=self._record.logged_step,
                step_s=steps.step_s,
                committed_at=_local_instant(records[-1]["time"]),
            )

    def _on_eval(self, record: Mapping[str, Any]) -> Iterator[Consequence]:
        if record["step"] in self._record.evaluated_steps:
            return  # repeated by rank 0 of a new generation, in case it is not in the log
        yield self._event(events.EvalCompleted, **record)
        if not math.isfinite(record["loss"]):
            what = f"the loss of the evaluation is {record['loss']}; training continues"
            text = f"step {record['step']}: {what}"
            yield self._event(events.LogLine, level="warning", worker="", text=text)

    def _on_scores(self, report: m.EvalScoreFound | m.EvalScoreLost) -> Iterator[Consequence]:
        # Each generation repeats the newest scores, in case their report was lost. It also does so
        # if it restored a checkpoint from before these scores.
        if isinstance(report, m.EvalScoreFound):
            if report.record["step"] not in self._record.scored_steps:
                yield self._event(events.EvalScored, **report.record)
        elif report.step not in self._record.scored_steps:
            text = (
                f"the evaluation of step {report.step} has no scores: its records were lost with "
                "the workers that held them. Training continues, and later evaluations are scored."
            )
            yield self._event(events.LogLine, level="warning", worker="", text=text)

    def _on_best(self, record: Mapping[str, Any]) -> Iterator[Consequence]:
        # Rank 0 of each generation reports the best result again, because the rank that found it
        # may have died before its report arrived.
        known = self._record.best_reported
        if known is None or any(getattr(known, name) != record[name] for name in record):
            yield self._event(events.BestReached, **record)

    def _on_checkpoint(self, report: m.CheckpointWritten, state: JobState) -> Iterator[Consequence]:
        # A checkpoint from a history other than the job's is rejected. Otherwise:
        #
        #     by a member                                   accepted
        #     by a former member, up to the job's step      accepted: it may have been released
        #                                                   while it was writing
        #     by a former member, after the job's step      rejected: it was evicted, and trained on
        #     alone behind a network partition
        step = report.record["step"]
        is_ahead = report.trainer not in state.members and step > state.step
        starts = self._record.starts
        if is_ahead or not is_of_job(generation=report.generation, step=step, starts=starts):
            return
        yield self._event(events.CheckpointCommitted, **report.record)
        # A member may report a checkpoint before rank 0's report of that step arrives.
        if step <= state.step:
            duration_s = report.record["duration_s"]
            yield s.CheckpointSaved(step=step, trainer=report.trainer, duration_s=duration_s)

    def _on_text(self, report: m.TextLogged, facts: TrainerFacts) -> Iterator[Consequence]:
        facts.last_lines.append(report.text)  # all, because a crash report needs them
        if report.is_printed and not self.printed.take(clock.now()):
            return
        yield from self.dropped_lines()
        yield self._event(events.LogLine, level=report.level, worker=facts.worker, text=report.text)

    def _on_fault(
        self, report: m.FaultFired, facts: TrainerFacts, state: JobState
    ) -> Iterator[Consequence]:
        fault = self.planned.fire(report.fault_id)
        if fault is None:
            return
        facts.is_injected = facts.is_injected or fault["kind"] in FATAL
        values = {"fault": fault["kind"], "step": state.step}
        yield self._event(events.FaultInjected, worker=facts.worker, **values)

    def _cells(self) -> dict[str, CellSource]:
        # A crash report names the cells if possible, but is useful even without them.
        try:
            return read_cells(self._spec.bundle_path)
        except (OSError, BundleError):
            return {}

    # --- events for the job itself ---

    def restored_to(self, step: int, reason: str = "") -> events.Event:
        """Return the event for a restore: the steps after ``step`` will be repeated."""
        # A checkpoint may also be ahead of the log; it then contains the missing step records.
        num_undone = max(0, self._record.logged_step - step)
        return self._event(events.JobRestored, step=step, num_undone=num_undone, reason=reason)

    def dropped_lines(self, *, is_last: bool = False) -> Iterator[events.Event]:
        """Yield an event with the number of printed lines that were not logged, if one is due."""
        num = self.printed.report(clock.now(), is_last=is_last)
        if num:
            text = (
                f"... {num:,} printed {'line' if num == 1 else 'lines'} dropped: after the first "
                f"{BURST:,}, a job's log takes {PER_S:g} per second on average"
            )
            yield self._event(events.LogLine, level="warning", worker="", text=text)


# Placeholder for the job's current generation; ``complete`` fills it in.
_CURRENT = -1


_OTHER_SHARDS = (
    "data.train is not the set on which the job was last trained: the content, the sizes of the "
    "blocks or the window differ, so the rest of its epoch would have other samples. Nothing was "
    "trained, and all checkpoints are kept. Use the same shards and window, or resume with --force."
)


def _lengths(plan: Mapping[str, Any]) -> tuple[int, int]:
    return plan["num_train_samples"], plan["num_eval_samples"]


def _shards(plan: Mapping[str, Any]) -> tuple[str, str]:
    return plan.get("train_layout", ""), plan.get("train_digest", "")


def _user_error(trainer: str, text: str) -> s.UserErrorSeen:
    return s.UserErrorSeen(
        trainer=trainer, generation=0, progress=s.NO_PROGRESS, error=text, traceback=""
    )


def _local_instant(reported_at: float) -> float:
    # Convert to the coordinator's clock. Use the current time if the other machine's clock seems to
    # be wrong.
    age_s = time.time() - reported_at
    return clock.now() - (age_s if 0 <= age_s < MAX_DELAY_S else 0.0)
