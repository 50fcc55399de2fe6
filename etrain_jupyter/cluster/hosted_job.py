"""One job inside the coordinator: its state, its log, and what its trainers said."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from etrain_jupyter.cluster.deliberate import PlannedFaults
from etrain_jupyter.cluster.job_log import JobLog
from etrain_jupyter.cluster.order import Order, TrainerFacts
from etrain_jupyter.cluster.reports import Message, take_report
from etrain_jupyter.cluster.steps import StepClock
from etrain_jupyter.elastic import commands as c
from etrain_jupyter.elastic import stimuli as s
from etrain_jupyter.elastic.backend import choose_backend
from etrain_jupyter.elastic.lineage import NOT_BEGUN
from etrain_jupyter.elastic.membership import JobState
from etrain_jupyter.elastic.state_machine import handle
from etrain_jupyter.events import types as events

Tell = Callable[[str, Message], None]
"""Sends an order to a worker's supervisor, by worker name."""


@dataclass(kw_only=True)
class HostedJob:
    """Owns a job's state; turns messages into stimuli, and carries out commands."""

    order: Order
    tell: Tell
    hang_s: float = 30.0
    """How long ranks may stand still, at least."""
    state: JobState = field(init=False)
    plan: dict[str, Any] = field(default_factory=dict)
    step_clock: StepClock = field(default_factory=StepClock)
    trainers: dict[str, TrainerFacts] = field(default_factory=dict)
    planned: PlannedFaults = field(init=False)
    restoring: int = field(default=0, init=False)
    """The generation that begins with a checkpoint, until a rank has told which; 0 if none does."""
    starts: list[int] = field(default_factory=list, init=False)
    """The step at which each generation began; see ``elastic.lineage``."""

    evaluated_step: int = field(default=-1, init=False)
    """Step of the newest evaluation in the log that holds."""
    best_told: dict[str, Any] | None = field(default=None, init=False)
    """The newest ``BestReached`` that holds, as it was told."""
    ended_early_in: int = field(default=0, init=False)
    """The generation that has told of an early end; 0 if none has."""

    def __post_init__(self) -> None:
        order = self.order
        self.state = JobState(
            job_id=order.job_id,
            min_workers=order.min_workers,
            max_workers=order.max_workers,
            hang_s=self.hang_s,
            pauses_on_nan=order.config.get("on_nan_loss") == "pause",
        )
        self.planned = PlannedFaults(order.faults)
        self._log = JobLog(order.run_dir / "events.jsonl")
        self.log(
            events.JobSubmitted,
            name=order.name,
            min_workers=order.min_workers,
            max_workers=order.max_workers,
            pool=order.pool,
            config=order.config,
        )
        self.log(events.JobStatusChanged, status="submitted")

    # --- the log ---

    def log(self, kind: type[events.Event], **values: Any) -> None:
        """Append one fact that happened now, unless it brings its own ``time``."""
        common = {"time": time.time(), "generation": self.state.generation}
        self._log.append([kind(job_id=self.order.job_id, **{**common, **values})])

    def log_all(self, facts: Sequence[events.Event]) -> None:
        """Append facts that bring their own time and generation."""
        self._log.append(list(facts))

    def events_since(self, seq: int, limit: int) -> list[dict[str, Any]]:
        """Return at most ``limit`` events after ``seq``, in order."""
        return self._log.since(seq, limit)

    @property
    def last_seq(self) -> int:
        """Sequence number of the newest event."""
        return self._log.last_seq

    @property
    def changed(self) -> asyncio.Event:
        """Set with the next event."""
        return self._log.changed

    # --- the state machine ---

    def handle(self, stimulus: s.Stimulus) -> None:
        """Let the state machine decide, and do what it says."""
        was_ended = self.state.is_ended
        self.state, commands = handle(self.state, stimulus, time.time())
        for command in commands:
            _CARRY_OUT[type(command)](self, command)
        if self.state.is_ended and not was_ended:
            self._log.close()

    def _start(self, command: c.StartTrainer) -> None:
        self.trainers[command.trainer] = TrainerFacts(command.worker, time.time())
        order = self.order
        self.log(events.WorkerJoined, worker=command.worker)
        self.tell(
            command.worker,
            {
                "op": "start",
                "trainer": command.trainer,
                "job_id": order.job_id,
                "config": order.config,
                "bundle": order.bundle,
                "cwd": order.cwd,
                "checkpoints": order.checkpoints,
                "faults": self.planned.of_newcomer(command.trainer, among=self.state.members),
            },
        )

    def send(self, trainer: str, message: Message) -> None:
        """Tell a trainer something, through its supervisor."""
        worker = self.trainers[trainer].worker
        self.tell(worker, {"op": "tell", "trainer": trainer, "message": message})

    def _announce(self, command: c.AnnounceChange) -> None:
        for trainer in command.trainers:
            self.send(trainer, {"op": "change", "generation": command.generation})

    def _abort(self, command: c.AbortGeneration) -> None:
        for trainer in command.trainers:
            self.send(trainer, {"op": "abort", "generation": command.generation})

    def _form(self, command: c.FormGeneration) -> None:
        self.step_clock.ranks = command.trainers
        facts = [self.trainers[trainer] for trainer in command.trainers]
        backend = choose_backend([(known.device, known.gpu) for known in facts])
        for rank, trainer in enumerate(command.trainers):
            self.send(
                trainer,
                {
                    "op": "form",
                    "generation": command.generation,
                    "rank": rank,
                    "world_size": len(command.trainers),
                    "behind": list(command.behind),
                    "restore": command.restore,
                    "logged_step": min(self.step_clock.logged_step, command.step),
                    "backend": backend,
                    "faults": self.planned.of_rank(rank, len(command.trainers)),
                    "log_end": self.step_clock.logged_step,
                    "starts": list(self.starts),
                },
            )

    def _save(self, command: c.SaveCheckpoint) -> None:
        logged_step = self.step_clock.logged_step
        order = {"op": "save", "generation": self.state.generation, "logged_step": logged_step}
        self.send(command.trainer, {**order, "starts": list(self.starts)})

    def _ask_for_checkpoint(self, command: c.AskForCheckpoint) -> None:
        for trainer in command.trainers:
            self.send(trainer, {"op": "checkpoint"})

    def _release(self, command: c.ReleaseTrainer) -> None:
        self.send(command.trainer, {"op": "release"})

    def _kill(self, command: c.KillTrainer) -> None:
        worker = self.trainers[command.trainer].worker
        order = {"op": "kill", "trainer": command.trainer, "why": command.why}
        self.tell(worker, {**order, "stacks": command.stacks})

    def _dump_stacks(self, command: c.DumpStacks) -> None:
        worker = self.trainers[command.trainer].worker
        self.tell(worker, {"op": "stacks", "trainer": command.trainer})

    def _publish(self, command: c.Publish) -> None:
        event = command.event
        if isinstance(event, events.GenerationFormed):
            by_worker = {facts.worker: facts.pid for facts in self.trainers.values()}
            pids = [by_worker.get(worker, 0) for worker in event.ranks]
            event = dataclasses.replace(event, trainer_pids=pids)
        self._log.append([event])
        if isinstance(event, events.GenerationFormed):
            is_older = event.step < self.step_clock.logged_step
            if self.state.is_restoring:  # the first rank that has formed tells to which step
                self.restoring = event.generation
                self.starts.append(NOT_BEGUN)
                return
            self.starts.append(event.step)
            if is_older:
                self.go_back(event.step)

    # --- what trainers say ---

    def take_report(self, trainer: str, message: Message) -> None:
        """Take one message of a trainer of this job."""
        take_report(self, trainer, message)

    def take_progress(self, trainer: str, page: Mapping[str, Any]) -> None:
        """Take what a supervisor read on a trainer's progress page."""
        if trainer not in self.state.members:
            return
        names = ("generation", "collectives", "beats", "phase", "alive_age_s", "process")
        self.handle(s.ProgressSeen(trainer=trainer, **{name: page[name] for name in names}))

    def go_back(self, step: int) -> None:
        """Log that what comes after ``step`` is trained again.

        A checkpoint may be ahead of the log; then the ranks have the records that are missing.
        """
        undone = max(0, self.step_clock.logged_step - step)
        self.step_clock.logged_step -= undone
        self.evaluated_step = -1 if self.evaluated_step > step else self.evaluated_step
        if self.best_told is not None and self.best_told["step"] > step:
            self.best_told = None
        self.log(events.JobRestored, step=step, num_undone=undone)

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
            "total_steps": self.plan.get("total_steps", 0),
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
