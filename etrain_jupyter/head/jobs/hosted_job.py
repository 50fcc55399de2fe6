"""One job inside the coordinator: its state, its log and its record."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, assert_never, cast

from etrain_jupyter.head.coordinator import clock
from etrain_jupyter.head.coordinator.defects import Defects
from etrain_jupyter.head.coordinator.nodes import JobProgress
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
from etrain_jupyter.head.jobs.steps import StepClock
from etrain_jupyter.head.jobs.take_over import (
    find_trainers,
    read_record,
    recovered_state,
    resumed_state,
)
from etrain_jupyter.log import events
from etrain_jupyter.log.job_record import JobRecord
from etrain_jupyter.log.loggers.process import follow_elsewhere as start_logger
from etrain_jupyter.log.tensorboard import follow_elsewhere
from etrain_jupyter.rules.membership import commands as c
from etrain_jupyter.rules.membership import stimuli as s
from etrain_jupyter.rules.membership.membership import JobState
from etrain_jupyter.rules.membership.state_machine import handle
from etrain_jupyter.rules.policy.checkpoint_interval import describe_choice
from etrain_jupyter.rules.policy.goodput import Limit, Size, choose_size, describe_size, is_material
from etrain_jupyter.rules.policy.step_time import exchange_of
from etrain_jupyter.rules.policy.type_rates import rates_by_type
from etrain_jupyter.rules.replay.checkpoint_evidence import Evidence
from etrain_jupyter.rules.replay.speed_evidence import SizingView, SpeedEvidence
from etrain_jupyter.wire import messages as m

SECRET_BYTES = 16
"""Length of a generation's secret in bytes."""

Send = Callable[[str, m.ToSupervisor | m.ToTrainer], None]
"""Sends a message to a worker's supervisor, given the worker's name."""


SendAll = Callable[[m.ToTrainer, Sequence[tuple[str, Mapping[str, Any]]]], None]
"""Sends a message to several workers, given each one's name and the fields in which it differs."""


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
    evidence: Evidence = field(default_factory=Evidence, init=False)
    """Input to ``checkpoint.every: auto``: the same events, timed by this process's clock."""
    speeds: SpeedEvidence = field(default_factory=SpeedEvidence, init=False)
    """Input to ``workers.target: goodput``, from the same events."""
    size: Size | None = field(default=None, init=False)
    """The newest size; None until it is reviewed, and without ``target: goodput``."""
    is_disposed: bool = field(default=False, init=False)
    """True once the resources of the ended job are freed."""
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
            if spec.resumes or (self.replays is not None and has_log):
                self._read_log()
            self.messages = TrainerMessages(spec, self.record)
            self._exhibits = ExhibitFolder(spec, self.record)
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
        ranks = tuple(member.trainer for member in self.state.in_phase("ranked"))
        self._ask_for_checkpoint(c.RequestBackgroundCheckpoint(trainers=ranks))

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
        self._start_loggers()

    def _read_log(self) -> None:
        self.record, self.evidence, self.speeds = read_record(self.spec, self.spec.log_path)
        # Events carry wall time. Convert the evidence to the coordinator's clock, which is never
        # adjusted.
        self.evidence.shift(clock.from_wall(0.0))

    def _replay(self, pending: PendingRequests) -> None:
        """Recover the dead coordinator's state; the trainers are adopted later."""
        # The same object as ``record``. Until ``adopt``, events that would change its trainers or
        # ranks are not appended.
        self.replayed = self.record
        self.state = recovered_state(self.record, self.state, pending)
        self.step_clock.step_s = self.record.step_s
        if pending.faults is not None:
            left = [fault for fault in self.spec.faults if fault["id"] in pending.faults]
            self.messages.planned = PlannedFaults(left)
        if self.state.is_ended:
            # The scheduler died after it logged the end, but before it removed the record.
            self.job_log.close()
            return
        self._start_loggers()

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
        self.step_clock.ranks = tuple(replayed.trainers.get(w, "") for w in replayed.ranks)
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
        # resend it. Its effects on the state were lost: repeat them.
        for found, _ in pairs:
            left = summaries[found.trainer].left
            if left is not None:
                self.take_report(dataclasses.replace(left, trainer=found.trainer))

    @property
    def trainers(self) -> dict[str, TrainerFacts]:
        """Its trainers by name, with the facts they reported."""
        return self.messages.trainers

    @property
    def step_clock(self) -> StepClock:
        """Filters repeated step records."""
        return self.messages.step_clock

    @property
    def planned(self) -> PlannedFaults:
        """Its planned faults that have not fired."""
        return self.messages.planned

    @property
    def pending_requests(self) -> PendingRequests:
        """User requests that are not in the log yet."""
        state = self.state
        return PendingRequests(
            paused=state.pause is not None,
            pause_reason=state.pause.reason if state.pause else "",
            is_stopping=state.outcome == "stopped",
            faults=self.planned.left,
        )

    def _start_loggers(self) -> None:
        if self.spec.tensorboard is not None:
            self._write_tensorboard(self.spec.log_path, self.spec.tensorboard)
        for name, options in self.spec.loggers.items():
            self._start_logger(name, options)

    def _start_logger(self, name: str, options: Mapping[str, Any]) -> None:
        loop = asyncio.get_running_loop()

        def warn(why: str) -> None:  # called in the thread that waits for the logger's process
            text = f"Values are not logged to {name}: {why} Training continues. "
            repeat = f"If they are missing afterwards: %etrain track {self.spec.job_id} --to {name}"
            loop.call_soon_threadsafe(self._warn, text + repeat)

        start_logger(name, options, self.spec.log_path, warn)

    def _write_tensorboard(self, log_path: Path, folder: Path) -> None:
        loop = asyncio.get_running_loop()

        def warn(why: str) -> None:  # called in the thread that waits for the writer process
            loop.call_soon_threadsafe(self._warn, f"TensorBoard files are not written: {why}")

        follow_elsewhere(log_path, folder, warn)

    def _warn(self, text: str) -> None:
        if not self.state.is_ended:  # the log of an ended job is closed
            self.log(events.LogLine, level="warning", worker="", text=text)

    # --- the log ---

    def log(self, kind: type[events.Event], **values: Any) -> None:
        """Append one event with the current time, unless ``values`` contains a ``time``."""
        common = {"time": time.time(), "generation": self.state.generation}
        self._append([kind(job_id=self.spec.job_id, **{**common, **values})])

    def _append(self, new: list[events.Event]) -> None:
        # Append to the log first: it raises for an event that cannot be encoded, and such an event
        # must not enter the record.
        self.job_log.append(new)
        for event in new:
            self.record.apply(event)
            self.evidence.fold(event, clock.now())
            if self.spec.is_sized:
                self.speeds.fold(event)
        if any(isinstance(event, events.CheckpointCommitted) for event in new):
            self.review_pace()  # the checkpoint's cost is now known
        for event in new:
            if isinstance(event, events.JobRestored):
                undone = self._exhibits.steps_after(event.step)
                self._remove_exhibits(undone, f"the job returned to step {event.step:,}")
        self.on_events(self.spec.job_id, new)

    def review_pace(self) -> None:
        """Update the interval of ``checkpoint.every: auto``; notify the ranks if it changes."""
        if not self.spec.is_paced or self.state.outcome:
            return
        choice = self.evidence.review(clock.now())
        if choice is None:
            return
        values = dataclasses.asdict(choice)
        self.log(events.CheckpointIntervalChosen, **values, reason=describe_choice(choice))
        # Ranks in later generations receive it in JoinGeneration, see _pace.
        for member in self.state.in_phase("ranked"):
            pace = m.PaceUpdate(interval_s=choice.interval_s)
            self.send(m.SetPace(trainer=member.trainer, pace=pace))

    def review_size(self, view: SizingView) -> bool:
        """Choose again how many workers to use; return True if the shares of the jobs may change.

        Args:
            view: Facts about the pool; its bounds are those of the job.
        """
        if not self.spec.is_sized or self.state.outcome:
            return False
        terms, sized = self.speeds.terms(view), self.record.sized
        old = self.size
        if old is None and sized is not None:  # chosen by the previous scheduler
            limit = cast("Limit", sized.limit)
            old = Size(workers=sized.workers, limit=limit, goodputs=tuple(sized.goodputs))
        new = choose_size(terms, current=old.workers if old else 0)
        self.size = new
        if is_material(new, old):
            self.log(
                events.WorkersSized,
                workers=new.workers,
                offered=terms.max_workers,
                limit=new.limit,
                goodputs=list(new.goodputs),
                measured=sorted(terms.measured),
                reason=describe_size(terms, new),
            )
        return old is None or new != old

    @property
    def wanted_workers(self) -> int:
        """Number of workers that it takes if the pool has them."""
        state, size = self.state, self.size
        if not self.spec.is_sized:
            return state.max_workers
        wanted = size.workers if size is not None else state.min_workers
        return min(max(wanted, state.min_workers), state.max_workers)

    def _pace(self, *, restore: bool) -> m.PaceUpdate | None:
        """Return the next generation's checkpoint interval and the age of the newest checkpoint."""
        choice = self.evidence.choice
        if choice is None:
            return None
        # A restored state equals the newest checkpoint: nothing has been trained since.
        age_s = 0.0 if restore else self.evidence.age_s(clock.now())
        return m.PaceUpdate(interval_s=choice.interval_s, age_s=age_s)

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
                    match command:
                        case c.StartTrainer():
                            self._start(command)
                        case c.AnnounceChange():
                            self._announce(command)
                        case c.AbortGeneration():
                            self._abort(command)
                        case c.FormGeneration():
                            self._form(command)
                        case c.SaveCheckpoint():
                            self._save(command)
                        case c.RequestBackgroundCheckpoint():
                            self._ask_for_checkpoint(command)
                        case c.ReleaseTrainer():
                            self._release(command)
                        case c.KillTrainer():
                            self._kill(command)
                        case c.DumpStacks():
                            self._dump_stacks(command)
                        case c.Publish():
                            self._publish(command)
                        case _:
                            assert_never(command)
        if self.state.is_ended and not was_ended:
            self.job_log.close()

    def _start(self, command: c.StartTrainer) -> None:
        self.trainers[command.trainer] = TrainerFacts(command.worker, clock.now())
        spec = self.spec
        facts = self.describe_worker(command.worker)
        self.log(events.WorkerJoined, worker=command.worker, **facts)
        self.send(
            m.LaunchTrainer(
                trainer=command.trainer,
                config=spec.config,
                bundle=m.BundleRef(
                    digest=spec.bundle_digest,
                    size=spec.bundle_size,
                    path=str(spec.bundle_path),
                ),
                cwd=spec.cwd,
                checkpoints=spec.checkpoints,
                faults=tuple(self.planned.of_newcomer(command.trainer, among=self.state.members)),
            )
        )

    def send(self, message: m.AboutTrainer) -> None:
        """Send a message to a trainer, through its supervisor."""
        self.send_to(self.trainers[message.trainer].worker, message)

    def _send_all(
        self,
        message: m.ForwardedMessage,
        trainers: Iterable[str],
        own: Callable[[str], dict[str, Any]] = lambda trainer: {},
    ) -> None:
        """Send a message to several trainers; ``own`` returns the fields in which they differ."""
        recipients = [
            (self.trainers[trainer].worker, {"trainer": trainer, **own(trainer)})
            for trainer in trainers
        ]
        self.send_all(message, recipients)

    def _announce(self, command: c.AnnounceChange) -> None:
        self._send_all(m.LeaveGeneration(generation=command.generation), command.trainers)

    def _abort(self, command: c.AbortGeneration) -> None:
        self._send_all(m.BreakGeneration(generation=command.generation), command.trainers)

    def _form(self, command: c.FormGeneration) -> None:
        # Rank 0 sends the records of steps after ``logged_step``. With ``restore``, steps after the
        # checkpoint are repeated, so ``logged_step`` must not exceed the step at which the
        # generation begins:
        #
        #     log    ... 38 39 40    generation begins at 35    logged_step = 35, log_end = 40
        self.step_clock.ranks = command.trainers
        world_size, starts = len(command.trainers), tuple(self.record.starts)
        ranks = {trainer: rank for rank, trainer in enumerate(command.trainers)}
        message = m.JoinGeneration(
            generation=command.generation,
            rank=0,
            world_size=world_size,
            behind=command.behind,
            restore=command.restore,
            logged_step=min(self.record.logged_step, command.step),
            log_end=self.record.logged_step,
            backend=command.backend,
            secret=secrets.token_bytes(SECRET_BYTES),
            pace=self._pace(restore=command.restore),
            saves=command.saves,
        )

        def own(trainer: str) -> dict[str, Any]:
            rank, num_starts = ranks[trainer], self.trainers[trainer].num_starts
            return {
                "rank": rank,
                "faults": tuple(self.planned.of_rank(rank, world_size)),
                "starts": starts[num_starts:],
                "num_starts": num_starts,
            }

        self._send_all(message, command.trainers, own)

    def _save(self, command: c.SaveCheckpoint) -> None:
        self.send(
            m.SaveState(
                trainer=command.trainer,
                generation=self.state.generation,
                logged_step=self.record.logged_step,
                starts=tuple(self.record.starts),
            )
        )

    def _ask_for_checkpoint(self, command: c.RequestBackgroundCheckpoint) -> None:
        for trainer in command.trainers:
            self.send(m.RequestCheckpoint(trainer=trainer))

    def _release(self, command: c.ReleaseTrainer) -> None:
        self.send(m.ShutDownTrainer(trainer=command.trainer))

    def _kill(self, command: c.KillTrainer) -> None:
        self.send(
            m.TerminateTrainer(
                trainer=command.trainer, why=command.why, dumps_stacks=command.stacks
            )
        )

    def _dump_stacks(self, command: c.DumpStacks) -> None:
        self.send(m.LogStacks(trainer=command.trainer))

    def _publish(self, command: c.Publish) -> None:
        event = command.event
        # Add data that the state machine lacks: the process ids and, before the end, the totals.
        if isinstance(event, events.GenerationFormed):
            by_worker = {facts.worker: facts.pid for facts in self.trainers.values()}
            pids = [by_worker.get(worker, 0) for worker in event.ranks]
            event = dataclasses.replace(event, trainer_pids=pids)
        if isinstance(event, events.JobStatusChanged) and event.status in events.TERMINAL_STATUSES:
            # Readers stop at the terminal status: costs and dropped lines must be logged before it.
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
        # ``consequences`` is a generator that reads the record and the state. Do not make it
        # a list: an item may depend on the events and decisions of the items before it.
        for item in consequences:
            match item:
                case Relay():
                    self._send_all(item.message, item.trainers)
                case KeepExhibit():
                    self._keep_exhibit(item)
                case events.Event():
                    self._append([self.messages.complete(item, self.state)])
                case list():
                    self._append(item)
                case _:
                    self.handle(item)

    def log_restored(self, step: int) -> None:
        """Log that the steps after ``step`` will be repeated."""
        self._follow_up([self.messages.restored_to(step)])

    def _keep_exhibit(self, item: KeepExhibit) -> None:
        self._append([self._exhibits.store(item.report, item.worker)])
        surplus = self._exhibits.surplus()
        self._remove_exhibits(surplus, "the job has too many; the first and the newest are kept")

    def _remove_exhibits(self, steps: Iterable[int], reason: str) -> None:
        for step in steps:
            # Log first: a file that no event names does no harm, but an event without a file would
            # show as an error.
            files = self._exhibits.files_of(step)
            self.log(events.ExhibitsRemoved, step=step, files=files, reason=reason)
            self._exhibits.remove(files)

    # --- queries ---

    def workers(self) -> list[str]:
        """Return the workers of all its trainers."""
        return [member.worker for member in self.state.members.values()]

    def ranks(self) -> list[str]:
        """Return the workers of the current generation, in rank order."""
        ranked = {m.trainer: m.worker for m in self.state.in_phase("ranked")}
        return [ranked[name] for name in self.step_clock.ranks if name in ranked]

    def summary(self) -> dict[str, Any]:
        """Return the job's row in the list of jobs."""
        state = self.state
        plan = self.record.plan if self.record.is_planned else None
        return {
            "job_id": state.job_id,
            "name": self.spec.name,
            "status": state.status,
            "step": state.step,
            "total_steps": plan.total_steps if plan is not None else 0,
            "world_size": state.members.num_in("ranked", "reported"),
            "generation": state.generation,
            "run_dir": str(self.spec.run_dir),
        }

    def progress(self) -> JobProgress:
        """Return the job's progress, for a pool that plans for deadlines."""
        record, state = self.record, self.state
        return JobProgress(
            job_id=state.job_id,
            attempt_at=record.attempt_at,
            first_step=record.attempt_step,
            step=record.step,
            total_steps=record.total_steps if record.is_planned else 0,
            num_workers=state.members.num_in("ranked") if state.status == "running" else 0,
            min_workers=state.min_workers,
            max_workers=self.wanted_workers,
            is_paused=state.status == "paused",
            gradient_bytes=self._gradient_bytes(),
            steps_per_s=1 / record.step_s if record.step_s else 0.0,
            type_rates=rates_by_type(record.work) if self.spec.splits_by_speed else {},
        )

    def _gradient_bytes(self) -> float:
        plan, compression = self.record.plan, str(self.spec.config.get("compression") or "none")
        if plan is None or not plan.num_parameters:
            return 0.0
        exchange = exchange_of(
            num_parameters=plan.trained_parameters, compression=compression, passes=1
        )
        return exchange.num_bytes

    def members(self) -> list[dict[str, Any]]:
        """Return one record per member: worker, rank, state, device, trainer_pid."""
        records = []
        ranks = {name: rank for rank, name in enumerate(self.step_clock.ranks)}
        for member in self.state.in_phase("ranked", "reported", "warm", "starting"):
            facts = self.trainers[member.trainer]
            is_ranked = member.phase == "ranked"
            records.append(
                {
                    "worker": member.worker,
                    "rank": ranks.get(member.trainer) if is_ranked else None,
                    "state": "training" if is_ranked else member.phase,
                    "device": facts.device,
                    "trainer_pid": facts.pid,
                    "leaving": member.leaving,
                }
            )
        return records
