"""One job inside the coordinator: its state, its log, and what its trainers said."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from etrain_jupyter.bundle.restore import read_cells
from etrain_jupyter.cluster.deliberate import FATAL, PlannedFaults
from etrain_jupyter.cluster.job_log import JobLog
from etrain_jupyter.cluster.last_words import last_words
from etrain_jupyter.cluster.order import Order, TrainerFacts
from etrain_jupyter.cluster.steps import StepClock
from etrain_jupyter.elastic import commands as c
from etrain_jupyter.elastic import stimuli as s
from etrain_jupyter.elastic.backend import choose_backend
from etrain_jupyter.elastic.membership import JobState
from etrain_jupyter.elastic.state_machine import handle
from etrain_jupyter.events import types as events

Message = dict[str, Any]
Tell = Callable[[str, Message], None]
"""Sends an order to a worker's supervisor, by worker name."""

FENCED = frozenset({"store", "formed", "report", "steps", "eval", "weights"})
"""What a rank says as a rank of its generation: nothing of it counts once that is over."""

FROM_ANYBODY = frozenset({"log", "checkpoint_committed", "checkpoint_failed"})
"""What counts whoever says it: a checkpoint is there, though its writer was released meanwhile."""


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
    _restoring: int = field(default=0, init=False)
    """The generation that begins with a checkpoint, until a rank has told which; 0 if none does."""

    def __post_init__(self) -> None:
        order = self.order
        self.state = JobState(
            job_id=order.job_id,
            min_workers=order.min_workers,
            max_workers=order.max_workers,
            hang_s=self.hang_s,
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
                "faults": self.planned.of_trainers(),
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
                    "faults": self.planned.of_trainers(),
                },
            )

    def _save(self, command: c.SaveCheckpoint) -> None:
        logged_step = self.step_clock.logged_step
        order = {"op": "save", "generation": self.state.generation, "logged_step": logged_step}
        self.send(command.trainer, order)

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
                self._restoring = event.generation
            elif is_older:
                self._go_back(event.step)

    # --- what trainers say ---

    def take_report(self, trainer: str, message: Message) -> None:
        """Take one message of a trainer of this job."""
        facts = self.trainers.get(trainer)
        take = _TAKE.get(message["op"])
        if facts is None or take is None or self.state.is_ended:
            return
        op, generation = message["op"], message.get("generation") or 0
        if op not in FROM_ANYBODY and trainer not in self.state.members:
            return  # it was lost, or let go: it has no say any more
        is_over = generation != self.state.generation
        if is_over and (op in FENCED or (op == "user_error" and generation)):
            return
        take(self, trainer, facts, message)

    def take_progress(self, trainer: str, page: Mapping[str, Any]) -> None:
        """Take what a supervisor read on a trainer's progress page."""
        if trainer not in self.state.members:
            return
        names = ("generation", "collectives", "beats", "phase", "alive_age_s", "process")
        self.handle(s.ProgressSeen(trainer=trainer, **{name: page[name] for name in names}))

    def _on_started(self, _: str, facts: TrainerFacts, message: Message) -> None:
        facts.pid = message["pid"] or facts.pid

    def _on_hello(self, trainer: str, facts: TrainerFacts, message: Message) -> None:
        facts.pid, facts.device = message["pid"], message["device"]
        facts.gpu = message.get("gpu", "")
        if not self.plan:
            self.plan = message["plan"]
            self.log(events.JobPlanned, **self.plan)
        elif self._lengths(message["plan"]) != self._lengths(self.plan):
            text = (
                f"data of different length on the workers: {self._lengths(message['plan'])} "
                "samples on "
                f"{facts.worker}, {self._lengths(self.plan)} on the first. data.train and "
                "data.eval must give the same "
                f"samples everywhere."
            )
            self._fail(trainer, text)
            return
        warm_s = time.time() - facts.started_at
        self.log(events.WorkerWarmed, worker=facts.worker, trainer_pid=facts.pid, warm_s=warm_s)
        self.handle(s.TrainerWarm(trainer=trainer, warm_s=message["warm_s"]))

    @staticmethod
    def _lengths(plan: Mapping[str, Any]) -> tuple[int, int]:
        return plan["num_train_samples"], plan["num_eval_samples"]

    def _fail(self, trainer: str, text: str) -> None:
        error = s.UserErrorSeen(
            trainer=trainer, generation=0, progress=s.NO_PROGRESS, error=text, traceback=""
        )
        self.handle(error)

    def _on_store(self, trainer: str, _: TrainerFacts, message: Message) -> None:
        for member in self.state.in_phase("ranked"):
            if member.trainer != trainer:
                told = {k: message[k] for k in ("op", "generation", "key", "value")}
                self.send(member.trainer, told)

    def _on_formed(self, trainer: str, _: TrainerFacts, message: Message) -> None:
        times = {name: message.get(name, 0.0) for name in ("connect_s", "sync_s", "wrap_s")}
        generation = message["generation"]
        if generation == self._restoring:
            self._restoring = 0
            self._go_back(message["step"])
        self.handle(s.TrainerFormed(trainer=trainer, generation=generation, **times))

    def _on_report(self, trainer: str, _: TrainerFacts, message: Message) -> None:
        step, evals = message["progress"]
        self.handle(
            s.TrainerReported(
                trainer=trainer,
                generation=message["generation"],
                progress=(step, evals),
                why=message["why"],
                undone=message["undone"],
            )
        )

    def _on_steps(self, _: str, __: TrainerFacts, message: Message) -> None:
        records = self.step_clock.take(message["records"])
        self._log.append([events.StepCompleted(job_id=self.order.job_id, **r) for r in records])
        if records:
            clock = self.step_clock
            self.handle(s.StepsCommitted(step=clock.logged_step, step_s=clock.step_s))

    def _on_eval(self, _: str, __: TrainerFacts, message: Message) -> None:
        self.log(events.EvalCompleted, **message["record"])

    def _on_weights(self, _: str, facts: TrainerFacts, message: Message) -> None:
        values = {key: message[key] for key in ("step", "rank", "digest")}
        self.log(events.WeightsHashed, worker=facts.worker, **values)

    def _go_back(self, step: int) -> None:
        """Log that what comes after ``step`` is trained again.

        A checkpoint may be ahead of the log; then the ranks have the records that are missing.
        """
        undone = max(0, self.step_clock.logged_step - step)
        self.step_clock.logged_step -= undone
        self.log(events.JobRestored, step=step, num_undone=undone)

    def _on_committed(self, _: str, __: TrainerFacts, message: Message) -> None:
        self.log(events.CheckpointCommitted, **message["record"])
        step = message["record"]["step"]
        if step <= self.state.step:  # a trainer that was given up may be ahead of the job
            self.handle(s.CheckpointSaved(step=step))

    def _on_checkpoint_failed(self, _: str, __: TrainerFacts, message: Message) -> None:
        self.log(events.CheckpointFailed, step=message["step"], error=message["error"])
        self.handle(s.CheckpointSaved(step=message["step"], ok=False))

    def _on_user_error(self, trainer: str, _: TrainerFacts, message: Message) -> None:
        step, evals = message["progress"]
        self.handle(
            s.UserErrorSeen(
                trainer=trainer,
                generation=message["generation"],
                progress=(step, evals),
                error=message["error"],
                traceback=message["traceback"],
            )
        )

    def _on_log(self, _: str, facts: TrainerFacts, message: Message) -> None:
        facts.last_lines.append(message["text"])
        self.log(events.LogLine, level=message["level"], worker=facts.worker, text=message["text"])

    def _on_exited(self, trainer: str, facts: TrainerFacts, message: Message) -> None:
        words = last_words(facts.worker, facts.last_lines, read_cells(self.order.bundle))
        lost = s.TrainerLost(
            trainer=trainer,
            cause=message["cause"],
            last_words=words,
            injected=facts.is_injected,
        )
        self.handle(lost)

    def _on_fault_fired(self, _: str, facts: TrainerFacts, message: Message) -> None:
        fault = self.planned.fire(message["id"])
        if fault is None:
            return
        facts.is_injected = facts.is_injected or fault["kind"] in FATAL
        self.log(
            events.FaultInjected, worker=facts.worker, fault=fault["kind"], step=self.state.step
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
    c.ReleaseTrainer: HostedJob._release,
    c.KillTrainer: HostedJob._kill,
    c.DumpStacks: HostedJob._dump_stacks,
    c.Publish: HostedJob._publish,
}

_TAKE: dict[str, Callable[[HostedJob, str, TrainerFacts, Message], None]] = {
    "started": HostedJob._on_started,
    "hello": HostedJob._on_hello,
    "store": HostedJob._on_store,
    "formed": HostedJob._on_formed,
    "report": HostedJob._on_report,
    "steps": HostedJob._on_steps,
    "eval": HostedJob._on_eval,
    "weights": HostedJob._on_weights,
    "checkpoint_committed": HostedJob._on_committed,
    "checkpoint_failed": HostedJob._on_checkpoint_failed,
    "user_error": HostedJob._on_user_error,
    "log": HostedJob._on_log,
    "exited": HostedJob._on_exited,
    "fault_fired": HostedJob._on_fault_fired,
}
