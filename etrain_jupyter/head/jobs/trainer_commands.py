"""Messages to a job's trainers, among them those that carry out the state machine's commands."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, assert_never

from etrain_jupyter.head.jobs.job_spec import JobSpec
from etrain_jupyter.head.jobs.reports import TrainerMessages
from etrain_jupyter.head.jobs.tuning import Tuning
from etrain_jupyter.log.job_record import JobRecord
from etrain_jupyter.rules.membership import commands as c
from etrain_jupyter.rules.membership.membership import JobState
from etrain_jupyter.wire import messages as m

SECRET_BYTES = 16
"""Length of a generation's secret in bytes."""

Send = Callable[[str, m.ToSupervisor | m.ToTrainer], None]
"""Sends a message to a worker's supervisor, given the worker's name."""

SendAll = Callable[[m.ToTrainer, Sequence[tuple[str, Mapping[str, Any]]]], None]
"""Sends a message to several workers, given each worker's name and own field values."""


@dataclass(kw_only=True)
class TrainerCommands:
    """Send messages to the trainers of one job, through their supervisors."""

    spec: JobSpec
    record: JobRecord
    messages: TrainerMessages
    tuning: Tuning
    send_to: Send
    send_to_all: SendAll

    def send(self, message: m.AboutTrainer) -> None:
        """Send a message to one trainer."""
        self.send_to(self.messages.trainers[message.trainer].worker, message)

    def send_all(
        self,
        message: m.ForwardedMessage,
        trainers: Iterable[str],
        own: Callable[[str], dict[str, Any]] = lambda trainer: {},
    ) -> None:
        """Send a message to several trainers; ``own`` returns the fields in which they differ."""
        recipients = [
            (self.messages.trainers[trainer].worker, {"trainer": trainer, **own(trainer)})
            for trainer in trainers
        ]
        self.send_to_all(message, recipients)

    def carry_out(self, command: c.TrainerCommand, state: JobState) -> None:
        """Send the messages for one command of the state machine."""
        match command:
            case c.StartTrainer():
                self._launch(command, state)
            case c.AnnounceChange(generation=generation, trainers=trainers):
                self.send_all(m.LeaveGeneration(generation=generation), trainers)
            case c.AbortGeneration(generation=generation, trainers=trainers):
                self.send_all(m.BreakGeneration(generation=generation), trainers)
            case c.FormGeneration():
                self._form(command)
            case c.SaveCheckpoint(trainer=trainer):
                self.send(
                    m.SaveState(
                        trainer=trainer,
                        generation=state.generation,
                        logged_step=self.record.logged_step,
                        starts=tuple(self.record.starts),
                    )
                )
            case c.RequestBackgroundCheckpoint(trainers=trainers):
                for trainer in trainers:
                    self.send(m.RequestCheckpoint(trainer=trainer))
            case c.ReleaseTrainer(trainer=trainer):
                self.send(m.ShutDownTrainer(trainer=trainer))
            case c.KillTrainer(trainer=trainer, why=why, stacks=stacks):
                self.send(m.TerminateTrainer(trainer=trainer, why=why, dumps_stacks=stacks))
            case c.DumpStacks(trainer=trainer):
                self.send(m.LogStacks(trainer=trainer))
            case _:
                assert_never(command)

    def _launch(self, command: c.StartTrainer, state: JobState) -> None:
        spec, planned = self.spec, self.messages.planned
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
                faults=tuple(planned.of_newcomer(command.trainer, among=state.members)),
            )
        )

    def _form(self, command: c.FormGeneration) -> None:
        # Rank 0 sends the records of steps after ``logged_step``. With ``restore``, steps after the
        # checkpoint are repeated, so ``logged_step`` must not exceed the step at which the
        # generation begins:
        #
        #     log    ... 38 39 40    generation begins at 35    logged_step = 35, log_end = 40
        self.messages.step_clock.ranks = command.trainers
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
            pace=self.tuning.pace(restore=command.restore),
            saves=command.saves,
        )

        def own(trainer: str) -> dict[str, Any]:
            rank, num_starts = ranks[trainer], self.messages.trainers[trainer].num_starts
            return {
                "rank": rank,
                "faults": tuple(self.messages.planned.of_rank(rank, world_size)),
                "starts": starts[num_starts:],
                "num_starts": num_starts,
            }

        self.send_all(message, command.trainers, own)
