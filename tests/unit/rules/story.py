"""Scripted jobs: send stimuli one after the other, and look at the commands."""

from __future__ import annotations

from typing import Any

from etrain_jupyter.rules.membership import commands as c
from etrain_jupyter.rules.membership import stimuli as s
from etrain_jupyter.rules.membership.formation import ADMISSION_GRACE_S
from etrain_jupyter.rules.membership.membership import JobState
from etrain_jupyter.rules.membership.state_machine import handle


class Story:
    """Sends stimuli to the state machine and remembers the commands of the last one."""

    def __init__(
        self, *, min_workers: int = 1, max_workers: int = 4, is_sharded: bool = False
    ) -> None:
        self.state = JobState(
            job_id="j", min_workers=min_workers, max_workers=max_workers, is_sharded=is_sharded
        )
        self.now = 100.0
        self.last: list[c.Command] = []
        self.all: list[c.Command] = []

    def send(self, stimulus: s.Stimulus, after_s: float = 0.01) -> Story:
        self.now += after_s
        self.state, self.last = handle(self.state, stimulus, self.now)
        self.all += self.last
        return self

    def wait(self, seconds: float) -> Story:
        """Advance the time, in one tick."""
        return self.send(s.Tick(), after_s=seconds)

    def lose(self, worker: str, cause: str = "SIGKILL", **values: Any) -> Story:
        """A worker's trainer exits while the worker lives."""
        return self.send(s.TrainerLost(trainer=self.trainer(worker), cause=cause, **values))

    def warm(self, *workers: str) -> Story:
        for worker in workers:
            self.send(s.TrainerWarm(trainer=self.trainer(worker)))
        return self

    def see(
        self, worker: str, collectives: int, *, beats: int = 0, generation: int = -1, **values: Any
    ) -> Story:
        """A supervisor reads the page of its trainer; by default in the current generation."""
        return self.send(
            s.ProgressSeen(
                trainer=self.trainer(worker),
                generation=self.state.generation if generation < 0 else generation,
                collectives=collectives,
                beats=beats,
                **values,
            )
        )

    def trainer(self, worker: str) -> str:
        member = self.state.of_worker(worker)
        assert member is not None
        return member.trainer

    def found(self, kind: type, *, ever: bool = False) -> list:
        """Return the commands and events of a kind, of the last stimulus or of all so far."""
        outputs = self.all if ever else self.last
        commands = [x for x in outputs if isinstance(x, kind)]
        facts = [x.event for x in outputs if isinstance(x, c.Publish)]
        return commands + [x for x in facts if isinstance(x, kind)]

    def start(self, *workers: str) -> Story:
        """All workers are assigned, warm, and step in generation 1."""
        self.send(s.WorkersAssigned(workers=workers))
        for worker in workers:
            self.send(s.TrainerWarm(trainer=self.trainer(worker)))
        self.send(s.Tick(), after_s=ADMISSION_GRACE_S)
        return self.formed()

    def formed(self) -> Story:
        for member in self.state.in_phase("ranked"):
            generation = self.state.generation
            self.send(s.TrainerFormed(trainer=member.trainer, generation=generation))
        return self

    def report(self, worker: str, step: int, why: str = "planned", evals: int = 0) -> Story:
        """A rank leaves its generation; negative steps mean that it never held the state."""
        return self.send(
            s.TrainerReported(
                trainer=self.trainer(worker),
                generation=self.state.generation,
                progress=(step, evals) if step >= 0 else s.NO_PROGRESS,
                why=why,
            )
        )

    def ranks(self) -> list[str]:
        [form] = self.found(c.FormGeneration)
        names = {m.trainer: m.worker for m in self.state.members.values()}
        return [names[trainer] for trainer in form.trainers]
