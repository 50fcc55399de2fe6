"""One job inside the coordinator: its state, its log and its record."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from etrain_jupyter.head.coordinator import clock
from etrain_jupyter.head.coordinator.defects import Defects
from etrain_jupyter.head.jobs.exhibits import ExhibitFolder
from etrain_jupyter.head.jobs.job_log import JobLog
from etrain_jupyter.head.jobs.job_records import PendingRequests
from etrain_jupyter.head.jobs.job_spec import JobSpec, TrainerFacts
from etrain_jupyter.head.jobs.mirrored_log import MirroredLog, OpenedRun
from etrain_jupyter.head.jobs.planned_faults import PlannedFaults
from etrain_jupyter.head.jobs.reports import (
    Consequence,
    KeepExhibit,
    Relay,
    TrainerMessages,
)
from etrain_jupyter.head.jobs.take_over import (
    find_trainers,
    recovered_state,
    replay_log,
    resumed_state,
)
from etrain_jupyter.head.jobs.trainer_commands import Send, SendAll, TrainerCommands
from etrain_jupyter.head.jobs.tuning import Tuning
from etrain_jupyter.log import events
from etrain_jupyter.log.job_record import JobRecord
from etrain_jupyter.log.loggers.process import follow_elsewhere
from etrain_jupyter.rules.membership import commands as c
from etrain_jupyter.rules.membership import stimuli as s
from etrain_jupyter.rules.membership.membership import JobState
from etrain_jupyter.rules.membership.state_machine import handle
from etrain_jupyter.wire import messages as m


@dataclass(kw_only=True)
class HostedJob:
    """Own a job's state; turn messages into stimuli, and carry out commands.

    ::

        report ── TrainerMessages.take ──▶ event    ──▶ log, then fold into record and evidence
                                           stimulus ──▶ rules.handle ──▶ new state, commands
                                                        command ──▶ message, or event (Publish)
    """

    spec: JobSpec
    send_to: Send
    send_all: SendAll
    describe_worker: Callable[[str], dict[str, Any]] = lambda worker: {}
    """Returns the facts about a worker's machine, as fields of ``WorkerJoined``."""
    before_end: Callable[[HostedJob], None] = lambda job: None
    """Called before the job's end is logged, because no event can follow the end."""
    on_events: Callable[[str, Sequence[events.Event]], None] = lambda job_id, new: None
    """Called with the job's id after each append to the log."""
    defects: Defects = field(default_factory=Defects)
    """Logs exceptions in our own code."""
    hang_s: float = 30.0
    """Minimum time in seconds without progress after which ranks count as stalled."""
    opened: OpenedRun | None = None
    """The log of a job in a bucket, opened for writing by this process; None for other jobs."""
    replays: PendingRequests | None = None
    """The pending requests of a job whose scheduler died; None for a newly submitted job."""
    replayed: JobRecord | None = field(default=None, init=False)
    """Record of a job whose scheduler died, until its trainers are adopted; otherwise None."""
    state: JobState = field(init=False)
    record: JobRecord = field(default_factory=JobRecord, init=False)
    """Fold of the job's log, including the events that this object appends."""
    messages: TrainerMessages = field(init=False)
    """Reports from its trainers, and their consequences."""
    tuning: Tuning = field(init=False)
    """Settings that follow from the same events."""
    commands: TrainerCommands = field(init=False)
    """Messages to its trainers."""
    is_disposed: bool = field(default=False, init=False)
    """True once the ended job's resources have been freed."""
    is_recorded: bool = field(default=True, init=False)
    """True while its record exists for the next scheduler."""

    def __post_init__(self) -> None:
        spec = self.spec
        self.state = JobState(
            job_id=spec.job_id,
            min_workers=spec.min_workers,
            max_workers=spec.max_workers,
            hang_s=self.hang_s,
            pauses_on_nan=spec.config.get("on_nan_loss") == "pause",
            backend=spec.config.get("backend") or "auto",
            is_sharded=spec.config.get("shard", "none") != "none",
        )
        #     case                        replays   log      what happens
        #     submitted                   None      empty    begin
        #     resumed by the user         None      events   read it, begin another attempt
        #     the scheduler died          set       events   read it, wait for the trainers (adopt)
        #     it died while submitting    set       empty    begin: the kernel has no reply yet
        self.job_log = self._open_log()
        """The durable log of its events."""
        try:
            has_log = self.job_log.last_seq > 0
            past: list[events.Event] = []
            if spec.resumes or (self.replays is not None and has_log):
                self.record, past = replay_log(spec)
            self.tuning = Tuning(spec, self.record, past, self.log)
            self.messages = TrainerMessages(spec, self.record)
            self.commands = TrainerCommands(
                spec=spec,
                record=self.record,
                messages=self.messages,
                tuning=self.tuning,
                send_to=self.send_to,
                send_to_all=self.send_all,
            )
            self._exhibits = ExhibitFolder(spec, self.record, self.log)
            if self.replays is not None and has_log:
                self._replay(self.replays)
            else:
                self._begin()
                self.job_log.check()
        except BaseException:
            self.job_log.abandon()  # release its lock, so that the user can retry the job
            raise

    def _open_log(self) -> JobLog:
        if not self.spec.place:
            files = [self.spec.run_dir / "job.json", self.spec.bundle_path]
            return JobLog(self.spec.log_path, files=files, on_restored=self._save_again)
        return MirroredLog(self.spec, self.opened, lambda: self.handle(s.StopRequested(now=True)))

    def _save_again(self) -> None:
        """Request a checkpoint, because the previous ones were deleted with the run folder."""
        for member in self.state.in_phase("ranked"):
            self.commands.send(m.RequestCheckpoint(trainer=member.trainer))

    def _begin(self) -> None:
        """Log that the job starts, or resumes from its log."""
        spec = self.spec
        asked: dict[str, Any] = {
            "min_workers": spec.min_workers,
            "max_workers": spec.max_workers,
            "pool": spec.pool,
            "config": spec.config,
            "pool_s": spec.pool_s,
        }
        before = self.record
        if before.num_events:
            self.state = resumed_state(before, self.state)
            self.log(
                events.JobResumed,
                **asked,
                from_status=before.status,
                step=before.logged_step,
                differs=spec.differs,
            )
        else:
            self.log(events.JobSubmitted, name=spec.name, **asked)
            for text in spec.notes:
                self.log(events.LogLine, level="info", worker="", text=text)
        self.log(events.JobStatusChanged, status="submitted")
        _start_loggers(spec, self._warn)

    def _replay(self, pending: PendingRequests) -> None:
        """Recover the dead coordinator's state; the trainers are adopted later."""
        # This is the same object as ``record``. Until ``adopt``, events that would change its
        # trainers or ranks are not appended.
        self.replayed = self.record
        self.state = recovered_state(self.record, self.state, pending)
        self.messages.step_clock.step_s = self.record.step_s
        if pending.faults is not None:
            left = [fault for fault in self.spec.faults if fault["id"] in pending.faults]
            self.messages.planned = PlannedFaults(left)
        if self.state.is_ended:
            # The scheduler died after it logged the end, but before it removed the record.
            self.job_log.close()
            return
        _start_loggers(self.spec, self._warn)

    def adopt(self, summaries: Mapping[str, m.TrainerSummary], *, away_s: float) -> None:
        """Adopt the surviving trainers of a recovered job.

        Args:
            summaries: The supervisors' summaries of their trainers, by trainer name.
            away_s: Seconds without a scheduler.
        """
        replayed, self.replayed = self.replayed, None
        assert replayed is not None
        # ::
        #
        #     scheduler 1   step 40 is logged, dies
        #     ranks         train on: 41, 42 ...; their reports wait in the supervisors' outboxes
        #     scheduler 2     recovers the state at step 40    hellos of w1, w2; w3 is lost: adopt,
        #                                                      then handle the waiting reports
        pairs = list(find_trainers(replayed, self.state, summaries))
        self.messages.trainers = {found.trainer: facts for found, facts in pairs}
        workers = [found.worker for found, _ in pairs]
        lost = tuple(worker for worker in replayed.trainers if worker not in workers)
        self.messages.step_clock.ranks = tuple(replayed.trainers.get(w, "") for w in replayed.ranks)
        step = replayed.logged_step
        told = {"workers": workers, "lost": list(lost)}
        self.log(events.SchedulerRestarted, step=step, away_s=away_s, **told)
        self.handle(
            s.TrainersFound(
                found=tuple(found for found, _ in pairs),
                lost=lost,
                world_size=len(replayed.ranks),
                is_ready=replayed.is_ready,
                backend=replayed.backend,
            )
        )
        # If the previous scheduler handled the report of a rank's departure, the outbox does not
        # resend it. The report's effects on the state were lost, so repeat them.
        for found, _ in pairs:
            left = summaries[found.trainer].left
            if left is not None:
                self.take_report(dataclasses.replace(left, trainer=found.trainer))

    @property
    def trainers(self) -> dict[str, TrainerFacts]:
        """Its trainers by name, with the facts they reported."""
        return self.messages.trainers

    @property
    def pending_requests(self) -> PendingRequests:
        """User requests that are not in the log yet."""
        state = self.state
        return PendingRequests(
            paused=state.pause is not None,
            pause_reason=state.pause.reason if state.pause else "",
            is_stopping=state.outcome == "stopped",
            faults=self.messages.planned.left,
        )

    def _warn(self, text: str) -> None:
        if not self.state.is_ended:  # the log of an ended job is closed
            self.log(events.LogLine, level="warning", worker="", text=text)

    # --- the log ---

    def log(self, kind: type[events.Event], **values: Any) -> None:
        """Append one event with the current time, unless ``values`` contains a ``time``."""
        common = {"time": time.time(), "generation": self.state.generation}
        self._append([kind(job_id=self.spec.job_id, **{**common, **values})])

    def _append(self, new: list[events.Event]) -> None:
        # Append to the log first, because it raises for an event that cannot be encoded, and such
        # an event must not enter the record.
        self.job_log.append(new)
        for event in new:
            self.record.apply(event)
            self.tuning.fold(event)
        if any(isinstance(event, events.CheckpointCommitted) for event in new):
            self.review_pace()  # the checkpoint's cost is now known
        for event in new:
            if isinstance(event, events.JobRestored):
                self._exhibits.remove_after(event.step)
        self.on_events(self.spec.job_id, new)

    def review_pace(self) -> None:
        """Update the interval of ``checkpoint.every: auto``; notify the ranks if it changes."""
        # Ranks in later generations receive it in JoinGeneration.
        if (pace := self.tuning.review_pace(self.state)) is not None:
            for member in self.state.in_phase("ranked"):
                self.commands.send(m.SetPace(trainer=member.trainer, pace=pace))

    @property
    def has_reported_end(self) -> bool:
        """True if it has ended and listeners may receive its end (see ``MirroredLog``)."""
        return self.state.is_ended and self.job_log.is_reported

    @property
    def is_uploading(self) -> bool:
        """True if the log of the ended job is still being uploaded to a bucket."""
        return self.state.is_ended and self.job_log.is_uploading

    def dispose(self) -> None:
        """Free the resources of an ended job."""
        self.is_disposed = True
        self.trainers.clear()

    # --- the state machine ---

    def handle(self, stimulus: s.Stimulus) -> None:
        """Pass a stimulus to the state machine and carry out its commands."""
        # The new state is set before the first command, since events and messages read the
        # generation from it. Each command is carried out even if an earlier one raises, because the
        # state already reflects all of them.
        was_ended = self.state.is_ended
        with self.defects.watch(self, f"deciding on {type(stimulus).__name__}"):
            self.state, commands = handle(self.state, stimulus, clock.now(), wall=time.time())
            for command in commands:
                with self.defects.watch(self, f"carrying out {type(command).__name__}"):
                    if isinstance(command, c.Publish):
                        self._publish(command)
                        continue
                    if isinstance(command, c.StartTrainer):
                        worker = command.worker
                        self.trainers[command.trainer] = TrainerFacts(worker, clock.now())
                        facts = self.describe_worker(worker)
                        self.log(events.WorkerJoined, worker=worker, **facts)
                    self.commands.carry_out(command, self.state)
        if self.state.is_ended and not was_ended:
            self.job_log.close()

    def _publish(self, command: c.Publish) -> None:
        event = command.event
        # Add data that the state machine lacks: the process ids and, before the end, the totals.
        if isinstance(event, events.GenerationFormed):
            by_worker = {facts.worker: facts.pid for facts in self.trainers.values()}
            pids = [by_worker.get(worker, 0) for worker in event.ranks]
            event = dataclasses.replace(event, trainer_pids=pids)
        if isinstance(event, events.JobStatusChanged) and event.status in events.TERMINAL_STATUSES:
            # Readers stop at the terminal status, so costs and dropped lines must be logged before
            # it.
            with self.defects.watch(self, "logging the totals"):
                self.before_end(self)
                self._follow_up(self.messages.dropped_lines(is_last=True))
        self._append([event])
        if isinstance(event, events.GenerationFormed):
            self.review_pace()
            if self.state.current.is_restoring:
                return  # the first rank to join reports the checkpoint's step
            self.record.started_from(event.step)
            if event.step < self.record.logged_step:
                self.log_restored(event.step)

    # --- reports from trainers ---

    def take_report(self, report: m.AnyReport) -> None:
        """Handle one report from a trainer of this job, unless the report is fenced."""
        facts = self.trainers.get(report.trainer)
        is_member = report.trainer in self.state.members
        if facts is None or self.state.is_ended:
            return
        if m.is_current(report, generation=self.state.generation, is_member=is_member):
            self._follow_up(self.messages.take(report, facts, self.state))

    def take_progress(self, trainer: str, page: m.PageCopy) -> None:
        """Handle a copy of a trainer's progress page."""
        if trainer in self.state.members:
            self.handle(
                s.ProgressSeen(
                    trainer=trainer,
                    generation=page.generation,
                    collectives=page.collectives,
                    beats=page.beats,
                    phase=page.phase,
                    alive_age_s=page.alive_age_s,
                    process=page.process,
                )
            )

    def _follow_up(self, consequences: Iterable[Consequence]) -> None:
        """Append events, relay entries and pass stimuli to the state machine, one by one."""
        # ``consequences`` is a generator that reads the record and the state. Do not make it a
        # list, because an item may depend on the events and decisions of the items before it.
        for item in consequences:
            match item:
                case Relay():
                    self.commands.send_all(item.message, item.trainers)
                case KeepExhibit():
                    self._exhibits.store(item.report, item.worker)
                case events.Event():
                    self._append([self.messages.complete(item, self.state)])
                case list():
                    self._append(item)
                case _:
                    self.handle(item)

    def log_restored(self, step: int) -> None:
        """Log that the steps after ``step`` will be repeated."""
        self._follow_up([self.messages.restored_to(step)])

    # --- queries ---

    def workers(self) -> list[str]:
        """Return the workers of all its trainers."""
        return [member.worker for member in self.state.members.values()]

    def ranks(self) -> list[str]:
        """Return the workers of the current generation, in rank order."""
        ranked = {m.trainer: m.worker for m in self.state.in_phase("ranked")}
        return [ranked[name] for name in self.messages.step_clock.ranks if name in ranked]


def _start_loggers(spec: JobSpec, warn: Callable[[str], None]) -> None:
    """Start one process for each logger; ``warn`` gets the failures, on the event loop."""
    loop = asyncio.get_running_loop()

    def warner(name: str) -> Callable[[str], None]:
        def warn_later(why: str) -> None:  # called in the thread that waits for the process
            text = (
                f"Values are not logged to {name}: {why} Training continues. If they are missing "
                f"afterwards: %etrain track {spec.job_id} --to {name}"
            )
            loop.call_soon_threadsafe(warn, text)

        return warn_later

    for name, options in spec.loggers.items():
        follow_elsewhere(name, options, spec.log_path, warner(name))
