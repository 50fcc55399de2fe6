"""A simulated job: the coordinator's part, without processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from etrain_jupyter.head.jobs.reports import StepClock
from etrain_jupyter.log import events
from etrain_jupyter.log.job_record import JobRecord
from etrain_jupyter.rules.membership import commands as c
from etrain_jupyter.rules.membership import stimuli as s
from etrain_jupyter.rules.membership.formation import MAX_FAULTS
from etrain_jupyter.rules.membership.lineage import is_of_job
from etrain_jupyter.rules.membership.membership import JobState
from etrain_jupyter.rules.membership.state_machine import handle
from tests.unit.log.spent import PLAIN_STEP
from tests.unit.rules.simulated import promises
from tests.unit.rules.simulated.trainer import (
    BATCH,
    NUM_SAMPLES,
    SEED,
    TOTAL_STEPS,
    Copy,
    Group,
    Message,
    Trainer,
)

if TYPE_CHECKING:
    from tests.unit.rules.simulated.cluster import Cluster

RELEASE_TIMEOUT_S = 60.0
"""Seconds until a supervisor kills a released trainer."""


class Job:
    """The coordinator's state of one job, with assertions on its decisions."""

    def __init__(self, cluster: Cluster, job_id: str, *, min_workers: int, max_workers: int):
        self.cluster = cluster
        bounds = {"min_workers": min_workers, "max_workers": max_workers}
        self.state = JobState(job_id=job_id, **bounds, pauses_on_nan=min_workers % 2 == 0)
        self.trainers: dict[str, Trainer] = {}
        self.group: Group | None = None
        self.clock = StepClock()
        self.log: list[events.Event] = []
        self.store: dict[int, Copy] = {}
        """Durable checkpoints by step."""
        self.record = JobRecord()
        """What the log says, folded as the coordinator does."""
        self.saves_fail = False
        self.num_failed_saves = 0
        """Number of failed attempts to write the last checkpoint."""
        self.raised = False
        """Whether the notebook's code raised in one of its trainers."""
        self.had_nan = False
        """Whether the loss of one of its steps was not finite."""
        self.stop_asked = self.stop_now_asked = False
        self.taken: list[tuple[Trainer, Message]] = []
        """Reports of its trainers about their generations."""
        self._add(
            events.JobSubmitted,
            name=job_id,
            min_workers=min_workers,
            max_workers=max_workers,
            config={"seed": SEED},
        )
        self._add(
            events.JobPlanned,
            num_train_samples=NUM_SAMPLES,
            num_eval_samples=5,
            global_batch_size=BATCH,
            steps_per_epoch=3,
            total_steps=TOTAL_STEPS,
            num_parameters=10,
            num_trained_parameters=10,
            total_samples=2 * NUM_SAMPLES + BATCH,
        )

    # --- the coordinator's part ---

    def handle(self, stimulus: s.Stimulus) -> None:
        before = self.state
        self.state, commands = handle(before, stimulus, self.cluster.now)
        for command in commands:
            self._OBEY[type(command)](self, command)
        promises.check_state(self)
        if self.state.is_ended and not before.is_ended:
            promises.check_end(self, before)

    def living(self) -> list[Trainer]:
        """Return the living trainers that the coordinator counts as this job's."""
        return [t for t in self.trainers.values() if t.is_alive and self.knows(t)]

    def _add(self, kind: type[events.Event], **values: Any) -> None:
        common = {"time": self.cluster.now, "generation": self.state.generation}
        fact = kind(job_id=self.state.job_id, **{**common, **values})
        self.log.append(fact.with_seq(len(self.log) + 1))
        self.record.apply(fact)

    def _start(self, command: c.StartTrainer) -> None:
        promises.check_start(self, command)
        pid = 100 + sum(len(job.trainers) for job in self.cluster.jobs)
        self.trainers[command.trainer] = Trainer(self, command.trainer, command.worker, pid)

    def _announce(self, command: c.AnnounceChange) -> None:
        self.send(command.trainers, {"op": "change", "generation": command.generation})

    def _abort(self, command: c.AbortGeneration) -> None:
        self.send(command.trainers, {"op": "abort", "generation": command.generation})

    def send(self, names: tuple[str, ...], message: Message) -> None:
        for name in names:
            trainer = self.trainers[name]
            if trainer.worker in self.cluster.workers and not trainer.ends_at:
                trainer.orders.append(message)

    def _form(self, command: c.FormGeneration) -> None:
        promises.check_form(self, command)
        self.group = Group(
            number=command.generation,
            names=command.trainers,
            behind=command.behind,
            restore=command.restore,
            logged_step=min(self.record.logged_step, command.step),
            log_end=self.record.logged_step,
            starts=tuple(self.record.starts),
        )
        self.clock.ranks = command.trainers
        message = {"op": "form", "generation": command.generation, "group": self.group}
        self.send(command.trainers, message)

    def _save(self, command: c.SaveCheckpoint) -> None:
        message = {
            "op": "save",
            "generation": self.state.generation,
            "logged_step": self.record.logged_step,
        }
        self.send((command.trainer,), message)

    def _ask_to_save(self, command: c.RequestBackgroundCheckpoint) -> None:
        self.send(command.trainers, {"op": "checkpoint"})

    def _release(self, command: c.ReleaseTrainer) -> None:
        trainer = self.trainers[command.trainer]
        promises.check_release(self, trainer)
        self.send((command.trainer,), {"op": "release"})
        trainer.ends_at = self.cluster.now + RELEASE_TIMEOUT_S

    def _kill(self, command: c.KillTrainer) -> None:
        trainer = self.trainers[command.trainer]
        promises.check_kill(self, trainer)
        if trainer.worker in self.cluster.workers:
            trainer.die(is_news=True)

    def _dump(self, _: c.DumpStacks) -> None:
        pass

    def _publish(self, command: c.Publish) -> None:
        event = command.event
        values = {k: v for k, v in event.to_dict().items() if k not in ("kind", "seq", "job_id")}
        if isinstance(event, events.GenerationFormed):
            assert self.group is not None
            values["trainer_pids"] = [self.trainers[name].pid for name in self.group.names]
        self._add(type(event), **values)
        if isinstance(event, events.GenerationFormed):
            if self.state.current.is_restoring:
                return
            self.record.started_from(event.step)
            if event.step < self.record.logged_step:
                self._log_restored(event.step)

    def _log_restored(self, step: int) -> None:
        num_undone = max(0, self.record.logged_step - step)
        self._add(events.JobRestored, step=step, num_undone=num_undone)

    # --- reports of its trainers ---

    def take(self, trainer: Trainer, message: Message) -> None:
        """Take one message as the coordinator does; messages of a fenced generation are dropped."""
        op, generation = message["op"], message.get("generation")
        if trainer.ends_at or self.state.is_ended:
            return
        is_old = generation != self.state.generation
        if is_old and op in ("steps", "eval", "weights"):
            return
        if op != "exited" and not self.knows(trainer):
            return
        if op in ("formed", "report", "nan"):
            self.taken.append((trainer, message))
        self._TAKE[op](self, trainer, message)

    def hear_again(self, pick: int) -> None:
        """Deliver an old message a second time: it must change nothing."""
        self.handle(s.Tick())  # any next stimulus does what is due by the clock
        old = [(t, m) for t, m in self.taken if m["generation"] < self.state.generation]
        if not old or self.state.is_ended:
            return
        trainer, message = old[pick % len(old)]
        before, length = self.state, len(self.log)
        self._TAKE[message["op"]](self, trainer, message)
        assert (self.state, len(self.log)) == (before, length), "an old message was taken"

    def lacks_workers(self) -> bool:
        """Whether it may have workers again after it was about to end."""
        return not self.state.assigned and not self.state.outcome

    def knows(self, trainer: Trainer) -> bool:
        return trainer.name in self.state.members

    def see_progress(self, trainer: Trainer) -> None:
        """The supervisor reports a reading of a trainer's page."""
        generation, collectives = trainer.page
        trainer.told = (trainer.page, trainer.beats)
        is_frozen = trainer.hung == "stopped"
        seen = s.ProgressSeen(
            trainer=trainer.name,
            generation=generation,
            collectives=collectives,
            beats=trainer.beats,
            phase={"idle": "idle", "evaluating": "evaluating"}.get(trainer.place, "computing"),
            alive_age_s=self.cluster.now - trainer.hung_at if is_frozen else 0.0,
        )
        self.handle(seen)

    def _on_hello(self, trainer: Trainer, _: Message) -> None:
        self.handle(s.TrainerWarm(trainer=trainer.name))

    def _on_formed(self, trainer: Trainer, message: Message) -> None:
        is_restored = self.record.restored_in == message["generation"]
        is_present = message["generation"] == self.state.generation
        if self.state.current.is_restoring and is_present and not is_restored:
            self._log_restored(message["step"])
        told = {"generation": message["generation"], "step": message["step"]}
        self.handle(s.TrainerFormed(trainer=trainer.name, **told))

    def _on_report(self, trainer: Trainer, message: Message) -> None:
        values = {k: message[k] for k in ("generation", "progress", "why", "undone")}
        self.handle(s.TrainerReported(trainer=trainer.name, **values))

    def _on_nan(self, trainer: Trainer, message: Message) -> None:
        self.had_nan = True
        values = {k: message[k] for k in ("generation", "progress", "rank", "is_source")}
        self.handle(s.NonFiniteLossSeen(trainer=trainer.name, loss=float("nan"), **values))

    def _on_user_error(self, trainer: Trainer, message: Message) -> None:
        values = {k: message[k] for k in ("generation", "progress")}
        self.raised = self.raised or (self.knows(trainer) and not self._needs_not(trainer))
        text = "ValueError: on purpose"
        self.handle(s.UserErrorSeen(trainer=trainer.name, error=text, traceback="", **values))

    def _needs_not(self, trainer: Trainer) -> bool:
        """Whether it is a newcomer, while others hold a state that was trained."""
        is_newcomer = self.state.members[trainer.name].phase in ("starting", "warm")
        holders = self.state.in_phase("ranked", "reported")
        return is_newcomer and bool(holders) and events.GenerationReady in map(type, self.log)

    def _on_steps(self, _: Trainer, message: Message) -> None:
        told = {"loss": 1.0, "lr": 0.1, "samples_per_s": 10.0, **PLAIN_STEP}
        received = [{**record, **told} for record in message["records"]]
        records = self.clock.take(received, after=self.record.logged_step)
        for record in records:
            self._add(events.StepCompleted, **record)
        if records:
            self.handle(s.StepsCommitted(step=self.record.logged_step, step_s=self.clock.step_s))

    def _on_eval(self, _: Trainer, message: Message) -> None:
        self._add(events.EvalCompleted, **message["record"])

    def _on_weights(self, trainer: Trainer, message: Message) -> None:
        values = {k: message[k] for k in ("step", "rank", "digest")}
        self._add(events.WeightsHashed, worker=trainer.worker, **values)

    def _on_committed(self, trainer: Trainer, message: Message) -> None:
        told = {"generation": message["generation"], "step": message["step"]}
        if is_of_job(**told, starts=self.record.starts):
            self.handle(s.CheckpointSaved(step=message["step"], trainer=trainer.name))

    def _on_checkpoint_failed(self, trainer: Trainer, message: Message) -> None:
        self.num_failed_saves += self.state.phase == "closing"
        told = {"step": message["step"], "error": message["error"]}
        self.handle(s.CheckpointSaved(ok=False, trainer=trainer.name, **told))

    def _on_exited(self, trainer: Trainer, message: Message) -> None:
        self.handle(s.TrainerLost(trainer=trainer.name, cause=message["cause"]))

    def is_failure_earned(self) -> bool:
        """Whether trainers ended three times in a row where that counts as the notebook's fault."""
        faults = [e for e in self.log if isinstance(e, events.WorkerLost)]
        stalls = [
            e for e in self.log if isinstance(e, events.GenerationFormed) and "stalled" in e.why
        ]
        return len(faults) + len(stalls) >= MAX_FAULTS

    _OBEY: ClassVar[dict[type, Callable[[Job, Any], None]]] = {
        c.StartTrainer: _start,
        c.AnnounceChange: _announce,
        c.AbortGeneration: _abort,
        c.FormGeneration: _form,
        c.SaveCheckpoint: _save,
        c.RequestBackgroundCheckpoint: _ask_to_save,
        c.ReleaseTrainer: _release,
        c.KillTrainer: _kill,
        c.DumpStacks: _dump,
        c.Publish: _publish,
    }
    _TAKE: ClassVar[dict[str, Callable[[Job, Trainer, Message], None]]] = {
        "hello": _on_hello,
        "formed": _on_formed,
        "report": _on_report,
        "nan": _on_nan,
        "user_error": _on_user_error,
        "steps": _on_steps,
        "eval": _on_eval,
        "weights": _on_weights,
        "checkpoint_committed": _on_committed,
        "checkpoint_failed": _on_checkpoint_failed,
        "exited": _on_exited,
    }
