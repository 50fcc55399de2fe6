"""A job in the coordinator: its state, its log, and the reports of its trainers."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etrain_jupyter.head.coordinator import clock
from etrain_jupyter.head.coordinator.defects import Defects
from etrain_jupyter.head.jobs.job_log import JobLog
from etrain_jupyter.head.jobs.job_records import PendingRequests
from etrain_jupyter.head.jobs.job_spec import JobSpec, TrainerFacts
from etrain_jupyter.head.jobs.mirrored_log import MirroredLog, OpenedRun
from etrain_jupyter.head.jobs.planned_faults import PlannedFaults
from etrain_jupyter.head.jobs.reports import Consequence, Relay, TrainerMessages
from etrain_jupyter.head.jobs.steps import StepClock
from etrain_jupyter.head.jobs.take_over import (
    find_trainers,
    past_from,
    read_past,
    state_after,
    state_of_recalled,
)
from etrain_jupyter.log import events
from etrain_jupyter.log.event_log import read_events
from etrain_jupyter.log.tensorboard import follow_elsewhere
from etrain_jupyter.rules.membership import commands as c
from etrain_jupyter.rules.membership import stimuli as s
from etrain_jupyter.rules.membership.membership import JobState
from etrain_jupyter.rules.membership.state_machine import handle
from etrain_jupyter.rules.policy.checkpoint_interval import words_of
from etrain_jupyter.rules.policy.job_costs import RunningCost
from etrain_jupyter.rules.replay.checkpoint_evidence import Evidence
from etrain_jupyter.rules.replay.recalled_workers import RecalledWorkers, recall
from etrain_jupyter.rules.replay.replay import Past
from etrain_jupyter.wire import messages as m

Send = Callable[[str, m.ToSupervisor | m.ToTrainer], None]
"""Sends a message to a worker's supervisor, by worker name."""


@dataclass(kw_only=True)
class HostedJob:
    """Own a job's state; turn messages into stimuli, and carry out commands."""

    order: JobSpec
    send_to: Send
    describe_worker: Callable[[str], dict[str, Any]] = lambda worker: {}
    """Returns the facts of a worker's machine, as ``WorkerJoined`` has them."""
    before_end: Callable[[HostedJob], None] = lambda job: None
    """Called before the log gets the job's end: no event can follow that."""
    defects: Defects = field(default_factory=Defects)
    """Logs the exceptions of our own code."""
    hang_s: float = 30.0
    """Minimum time without progress after which ranks count as hung."""
    opened: OpenedRun | None = None
    """This process as the writer of the log of a job that is stored in a bucket."""
    recalls: PendingRequests | None = None
    """The requests to a job whose scheduler died, so that its trainers may be alive; None for one
    that is submitted."""
    recalled: RecalledWorkers | None = field(default=None, init=False)
    """The workers in its log, until its trainers were found; None for one that is submitted."""
    state: JobState = field(init=False)
    said: TrainerMessages = field(init=False)
    """What its trainers have reported."""
    evidence: Evidence = field(default_factory=Evidence, init=False)
    """What ``checkpoint.every: auto`` follows from."""
    cost_before: RunningCost = field(default_factory=RunningCost, init=False)
    """The earlier cost of a job that was resumed, or whose scheduler died."""
    is_let_go: bool = field(default=False, init=False)
    """Whether what an ended job does not need any more was freed."""
    is_recorded: bool = field(default=True, init=False)
    """Whether the next scheduler would find its record."""

    def __post_init__(self) -> None:
        order = self.order
        self.state = JobState(
            job_id=order.job_id,
            min_workers=order.min_workers,
            max_workers=order.max_workers,
            hang_s=self.hang_s,
            pauses_on_nan=order.config.get("on_nan_loss") == "pause",
            backend=order.config.get("backend") or "auto",
        )
        self.said = TrainerMessages(order)
        self._log = self._open_log()
        try:
            if self.recalls is None or not self._log.last_seq:
                self._begin()
                self._log.check()
            else:
                self._recall(self.recalls)
        except BaseException:
            self._log.abandon()  # another process may open it
            raise

    def _open_log(self) -> JobLog:
        if not self.order.place:
            return JobLog(self.order.log_path)
        return MirroredLog(self.order, self.opened, lambda: self.handle(s.StopAsked(now=True)))

    def _begin(self) -> None:
        """Tell the log that the job begins, or goes on from what it has."""
        order = self.order
        asked: dict[str, Any] = {
            "min_workers": order.min_workers,
            "max_workers": order.max_workers,
            "pool": order.pool,
            "config": order.config,
        }
        past = read_past(order, order.log_path) if order.resumes else Past()
        if past.num_events:
            self._go_on_from(past)
            told = {"from_status": past.status, "step": past.step, "differs": order.differs}
            self.log(events.JobResumed, **asked, **told)
        else:
            self.log(events.JobSubmitted, name=order.name, **asked)
        self.log(events.JobStatusChanged, status="submitted")
        self._follow_with_tensorboard()

    def _go_on_from(self, past: Past) -> None:
        self.state = state_after(past, self.state)
        self.said.starts, self.said.num_samples_before = past.starts, past.num_train_samples
        self.evidence, self.cost_before = past.evidence, past.cost
        self.evidence.shift(clock.from_wall(0.0))
        self.said.evaluated_step, self.said.best = past.evaluated_step, past.best
        self.step_clock.logged_step = past.step

    def _recall(self, wishes: PendingRequests) -> None:
        """Stand where the coordinator stood that died; the trainers are looked for later."""
        log = read_events(self.order.log_path)
        past, self.recalled = past_from(log, self.order), recall(log)
        if self.recalled.last_step_at:
            self.recalled.last_step_at = clock.from_wall(self.recalled.last_step_at)
        self._go_on_from(past)
        self.state = state_of_recalled(self.state, self.recalled, wishes, past=past)
        self.said.plan, self.step_clock.step_s = self.recalled.plan, self.recalled.step_s
        self.said.ended_early_in = self.recalled.ended_early_in
        if wishes.faults is not None:
            left = [fault for fault in self.order.faults if fault["id"] in wishes.faults]
            self.said.planned = PlannedFaults(left)
        if self.recalled.is_ended:
            self.state = self.state.replace(phase="ended")
            self._log.close()
            return
        self._follow_with_tensorboard()

    def adopt(self, summaries: Mapping[str, m.TrainerSummary], *, away_s: float) -> None:
        """Continue with those trainers of a recalled job that are alive.

        Args:
            summaries: The supervisors' summaries of their trainers, by name.
            away_s: Seconds without a scheduler.
        """
        recalled, self.recalled = self.recalled, None
        assert recalled is not None
        pairs = list(find_trainers(recalled, self.state, summaries))
        self.said.trainers = {found.trainer: facts for found, facts in pairs}
        workers = [found.worker for found, _ in pairs]
        lost = tuple(worker for worker in recalled.trainers if worker not in workers)
        self.step_clock.ranks = tuple(recalled.trainers.get(w, "") for w in recalled.ranks)
        step = self.step_clock.logged_step
        told = {"workers": workers, "lost": list(lost)}
        self.log(events.SchedulerRestarted, step=step, away_s=away_s, **told)
        self.handle(
            s.TrainersFound(
                found=tuple(found for found, _ in pairs),
                lost=lost,
                world_size=len(recalled.ranks),
                is_ready=recalled.is_ready,
                backend=recalled.backend,
            )
        )
        for found, _ in pairs:
            left = summaries[found.trainer].left
            if left is not None:
                self.take_report(dataclasses.replace(left, trainer=found.trainer))

    @property
    def trainers(self) -> dict[str, TrainerFacts]:
        """Its trainers by name, with what they reported of themselves."""
        return self.said.trainers

    @property
    def step_clock(self) -> StepClock:
        """Which steps the log has."""
        return self.said.step_clock

    @property
    def planned(self) -> PlannedFaults:
        """Its planned faults that have not fired."""
        return self.said.planned

    @property
    def wishes(self) -> PendingRequests:
        """What somebody has asked for that the log does not tell yet."""
        state = self.state
        return PendingRequests(
            paused=state.paused,
            pause_reason=state.pause_reason,
            is_stopping=state.outcome == "stopped",
            faults=self.planned.left,
        )

    def _follow_with_tensorboard(self) -> None:
        if self.order.tensorboard is not None:
            self._write_tensorboard(self.order.log_path, self.order.tensorboard)

    def _write_tensorboard(self, log_path: Path, folder: Path) -> None:
        loop = asyncio.get_running_loop()

        def tell(why: str) -> None:
            loop.call_soon_threadsafe(self._remark, f"TensorBoard's files are not written: {why}")

        follow_elsewhere(log_path, folder, tell)

    def _remark(self, text: str) -> None:
        if not self.state.is_ended:  # its log is closed then
            self.log(events.LogLine, level="warning", worker="", text=text)

    # --- the log ---

    def log(self, kind: type[events.Event], **values: Any) -> None:
        """Append one fact that happened now, unless it brings its own ``time``."""
        common = {"time": time.time(), "generation": self.state.generation}
        self._append([kind(job_id=self.order.job_id, **{**common, **values})])

    def log_all(self, facts: Sequence[events.Event]) -> None:
        """Append facts that bring their own time and generation."""
        self._append(list(facts))

    def _append(self, facts: list[events.Event]) -> None:
        self._log.append(facts)
        for event in facts:
            self.evidence.fold(event, clock.now())
        if any(isinstance(event, events.CheckpointCommitted) for event in facts):
            self.review_pace()  # it has shown what one costs

    def review_pace(self) -> None:
        """Choose the interval of ``checkpoint.every: auto`` again; send all ranks a new one."""
        if not self.order.is_paced or self.state.outcome:
            return
        choice = self.evidence.review(clock.now())
        if choice is None:
            return
        told = dataclasses.asdict(choice)
        self.log(events.CheckpointIntervalChosen, **told, reason=words_of(choice))
        for member in self.state.in_phase("ranked"):
            pace = m.PaceUpdate(interval_s=choice.interval_s)
            self.send(m.SetPace(trainer=member.trainer, pace=pace))

    def _pace(self, *, restore: bool) -> m.PaceUpdate | None:
        """Return how often the next generation saves, and the age of the newest checkpoint."""
        choice = self.evidence.choice
        if choice is None:
            return None
        age_s = 0.0 if restore else self.evidence.age_s(clock.now())
        return m.PaceUpdate(interval_s=choice.interval_s, age_s=age_s)

    def events_since(self, seq: int, limit: int) -> list[dict[str, Any]]:
        """Return at most ``limit`` events after ``seq``, in order."""
        return self._log.since(seq, limit)

    @property
    def last_seq(self) -> int:
        """Sequence number of the newest event."""
        return self._log.last_seq

    @property
    def has_told_its_end(self) -> bool:
        """Whether it has ended, and listeners may know: a bucket may get the end first."""
        return self.state.is_ended and self._log.is_told

    @property
    def is_uploading(self) -> bool:
        """Whether a bucket does not have the whole log yet, and may get it."""
        return self.state.is_ended and self._log.is_uploading

    @property
    def is_log_behind(self) -> bool:
        """Whether events are only in memory, because the disk does not accept them."""
        return self._log.is_behind

    @property
    def log_trouble(self) -> str:
        """Why events are only in memory, and what to do about it; empty if none are."""
        return self._log.trouble

    def retry_log(self) -> None:
        """Write the events that the disk did not accept before."""
        self._log.retry()

    def abandon_log(self) -> None:
        """Close the log without them: the process ends."""
        self._log.abandon()

    def let_go(self) -> None:
        """Free what an ended job does not need any more."""
        self.is_let_go = True
        self.trainers.clear()

    @property
    def changed(self) -> asyncio.Event:
        """Set with the next event."""
        return self._log.changed

    # --- the state machine ---

    def handle(self, stimulus: s.Stimulus) -> None:
        """Let the state machine decide, and do what it says.

        The state is the new one before its commands are carried out, so each of them is, also if
        one before it raises.
        """
        was_ended = self.state.is_ended
        with self.defects.watch(self, f"deciding on {type(stimulus).__name__}"):
            self.state, commands = handle(self.state, stimulus, clock.now(), wall=time.time())
            for command in commands:
                with self.defects.watch(self, f"carrying out {type(command).__name__}"):
                    _CARRY_OUT[type(command)](self, command)
        if self.state.is_ended and not was_ended:
            self._log.close()

    def _start(self, command: c.StartTrainer) -> None:
        self.trainers[command.trainer] = TrainerFacts(command.worker, clock.now())
        order = self.order
        facts = self.describe_worker(command.worker)
        self.log(events.WorkerJoined, worker=command.worker, **facts)
        self.send(
            m.LaunchTrainer(
                trainer=command.trainer,
                config=order.config,
                bundle=m.BundleRef(
                    digest=order.bundle_digest,
                    size=order.bundle_size,
                    path=str(order.bundle_path),
                ),
                cwd=order.cwd,
                checkpoints=order.checkpoints,
                faults=tuple(self.planned.of_newcomer(command.trainer, among=self.state.members)),
            )
        )

    def send(self, message: m.AboutTrainer) -> None:
        """Send a message to the supervisor of the trainer that it names."""
        self.send_to(self.trainers[message.trainer].worker, message)

    def _announce(self, command: c.AnnounceChange) -> None:
        for trainer in command.trainers:
            self.send(m.LeaveGeneration(trainer=trainer, generation=command.generation))

    def _abort(self, command: c.AbortGeneration) -> None:
        for trainer in command.trainers:
            self.send(m.BreakGeneration(trainer=trainer, generation=command.generation))

    def _form(self, command: c.FormGeneration) -> None:
        self.step_clock.ranks = command.trainers
        world_size = len(command.trainers)
        for rank, trainer in enumerate(command.trainers):
            self.send(
                m.JoinGeneration(
                    trainer=trainer,
                    generation=command.generation,
                    rank=rank,
                    world_size=world_size,
                    is_guarded=command.is_guarded,
                    behind=command.behind,
                    restore=command.restore,
                    logged_step=min(self.step_clock.logged_step, command.step),
                    log_end=self.step_clock.logged_step,
                    backend=command.backend,
                    faults=tuple(self.planned.of_rank(rank, world_size)),
                    starts=tuple(self.said.starts),
                    pace=self._pace(restore=command.restore),
                )
            )

    def _save(self, command: c.SaveCheckpoint) -> None:
        self.send(
            m.SaveState(
                trainer=command.trainer,
                generation=self.state.generation,
                logged_step=self.step_clock.logged_step,
                starts=tuple(self.said.starts),
            )
        )

    def _ask_for_checkpoint(self, command: c.AskForCheckpoint) -> None:
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
        if isinstance(event, events.GenerationFormed):
            by_worker = {facts.worker: facts.pid for facts in self.trainers.values()}
            pids = [by_worker.get(worker, 0) for worker in event.ranks]
            event = dataclasses.replace(event, trainer_pids=pids)
        if isinstance(event, events.JobStatusChanged) and event.status in events.TERMINAL_STATUSES:
            with self.defects.watch(self, "logging what must precede its end"):
                self.before_end(self)
                self._carry_on(list(self.said.dropped_lines(is_last=True)))
        self._append([event])
        if isinstance(event, events.GenerationFormed):
            self.review_pace()
            if self.said.begin_generation(event, is_restoring=self.state.is_restoring):
                self._carry_on([self.said.go_back(event.step)])

    # --- reports of trainers ---

    def take_report(self, report: m.AnyReport) -> None:
        """Handle one report of a trainer of this job."""
        self._carry_on(self.said.take(report, self.state))

    def _carry_on(self, consequences: Sequence[Consequence]) -> None:
        """Append events, relay entries and decide on stimuli, in order.

        Events that follow each other are appended together: a report of a fast job has hundreds.
        """
        facts: list[events.Event] = []
        for item in consequences:
            if isinstance(item, events.Event):
                facts.append(self.said.complete(item, self.state))
                continue
            if facts:
                self._append(facts)
                facts = []
            if isinstance(item, Relay):
                for trainer in item.trainers:
                    self.send(dataclasses.replace(item.entry, trainer=trainer, number=0))
            else:
                self.handle(item)
        if facts:
            self._append(facts)

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

    # --- what others want to know ---

    def ranks(self) -> list[str]:
        """Return the workers that train in the living generation, in rank order."""
        ranked = {m.trainer: m.worker for m in self.state.in_phase("ranked")}
        return [ranked[name] for name in self.step_clock.ranks if name in ranked]

    def summary(self) -> dict[str, Any]:
        """Return one line of the list of jobs."""
        state = self.state
        return {
            "job_id": state.job_id,
            "name": self.order.name,
            "status": state.status,
            "step": state.step,
            "total_steps": self.said.plan.get("total_steps", 0),
            "world_size": len(state.in_phase("ranked", "reported")),
            "generation": state.generation,
            "run_dir": str(self.order.run_dir),
        }

    def members(self) -> list[dict[str, Any]]:
        """Return a record a member: worker, rank, state, device, trainer_pid."""
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


_CARRY_OUT: dict[type, Callable[[HostedJob, Any], None]] = {
    c.StartTrainer: HostedJob._start,
    c.AnnounceChange: HostedJob._announce,
    c.AbortGeneration: HostedJob._abort,
    c.FormGeneration: HostedJob._form,
    c.SaveCheckpoint: HostedJob._save,
    c.AskForCheckpoint: HostedJob._ask_for_checkpoint,
    c.ReleaseTrainer: HostedJob._release,
    c.KillTrainer: HostedJob._kill,
    c.DumpStacks: HostedJob._dump_stacks,
    c.Publish: HostedJob._publish,
}
