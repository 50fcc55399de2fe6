"""Random schedules: whatever comes in whatever order, no step is lost and every job ends."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etrain_jupyter.elastic import commands as c
from etrain_jupyter.elastic import stimuli as s
from etrain_jupyter.elastic.membership import JobState
from etrain_jupyter.elastic.state_machine import handle

TOTAL_STEPS = 12


@dataclass
class Trainer:
    """A trainer process as far as the protocol sees it."""

    worker: str
    state: str = "starting"
    generation: int = 0
    step: int = -1
    pending: bool = False


class World:
    """Workers and trainers that obey the commands, in an order that chance chooses."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.now = 0.0
        self.min, self.max = 1, self.dice.randint(1, 4)
        self.state = JobState(job_id="j", min_workers=1, max_workers=self.max)
        self.workers: list[str] = []
        self.noticed: set[str] = set()
        self.trainers: dict[str, Trainer] = {}
        self.num_workers = 0
        self.saved = 0
        self.asked_to_save: list[str] = []
        self.committed = 0

    # --- what the coordinator does ---

    def tell(self, stimulus: s.Stimulus) -> None:
        self.now += self.dice.random() * 0.5
        self.state, commands = handle(self.state, stimulus, self.now)
        for command in commands:
            self.obey(command)

    def assign(self) -> None:
        usable = [w for w in self.workers if w not in self.noticed]
        self.tell(s.WorkersAssigned(workers=tuple(usable[: self.state.max_workers])))

    def obey(self, command: c.Command) -> None:
        if isinstance(command, c.StartTrainer):
            assert all(t.worker != command.worker for t in self.trainers.values())
            self.trainers[command.trainer] = Trainer(command.worker)
        elif isinstance(command, c.FormGeneration):
            self.form(command)
        elif isinstance(command, c.AnnounceChange):
            for name in command.trainers:
                self.trainers[name].pending = True
        elif isinstance(command, c.AbortGeneration):
            for name in command.trainers:
                if name in self.trainers:
                    self.trainers[name].state = "aborted"
        elif isinstance(command, c.SaveCheckpoint):
            self.asked_to_save.append(command.trainer)
        elif isinstance(command, c.ReleaseTrainer | c.KillTrainer):
            self.trainers.pop(command.trainer, None)

    def form(self, command: c.FormGeneration) -> None:
        members = [self.trainers[name] for name in command.trainers]
        assert len(members) >= self.state.min_workers
        assert not any(t.state in ("ranked", "forming", "aborted") for t in self.trainers.values())
        source = members[0]
        holders = [t.step for t in self.trainers.values()]
        if command.restore:
            assert max(holders) < 0
            self.committed = self.saved
            source.step = self.saved
        else:
            assert source.step == max(holders)
            source.step = max(source.step, 0)
        # I3: what any survivor has committed is kept.
        assert source.step == self.committed
        for rank, member in enumerate(members):
            assert rank in command.behind or rank == 0 or member.step == source.step
            member.state, member.generation = "forming", command.generation
            member.pending = False

    # --- what can happen ---

    def ranked(self, *states: str) -> list[str]:
        return [n for n, t in self.trainers.items() if t.state in states]

    def act(self, *, faults: bool) -> None:
        calm = [self.warm, self.go_on, self.go_on, self.step, self.step, self.report, self.save]
        rough = [self.join, self.lose_worker, self.kill_trainer, self.notice, self.scale]
        self.dice.choice(calm + (rough if faults else []))()

    def join(self) -> None:
        if len(self.workers) - len(self.noticed) < 6:
            self.num_workers += 1
            self.workers.append(f"w{self.num_workers}")
            self.assign()

    def warm(self) -> None:
        for name in self.ranked("starting")[:1]:
            self.trainers[name].state = "warm"
            self.tell(s.TrainerWarm(trainer=name))

    def go_on(self) -> None:
        """A forming rank that has the state begins to step, if its generation is whole."""
        for name in self.ranked("forming")[:1]:
            trainer = self.trainers[name]
            trainer.state = "ranked"
            trainer.step = self.committed
            self.tell(s.TrainerFormed(trainer=name, generation=trainer.generation))

    def step(self) -> None:
        """All ranks commit a step; on a pending change, or when all is done, they report."""
        names = self.ranked("ranked")
        if not names or len(names) < len(self.state.in_phase("ranked")):
            return
        why = "planned" if any(self.trainers[n].pending for n in names) else ""
        if self.committed < TOTAL_STEPS:
            self.committed += 1
            for name in names:
                self.trainers[name].step = self.committed
        if self.committed == TOTAL_STEPS and not why:
            why = "done"
        if why:
            for name in names:
                self.trainers[name].state = "left:" + why

    def report(self) -> None:
        leaving = [n for n, t in self.trainers.items() if t.state.startswith(("left", "aborted"))]
        if not leaving:
            return
        name = self.dice.choice(leaving)
        trainer = self.trainers[name]
        why = trainer.state.removeprefix("left:") if "left" in trainer.state else "failed"
        trainer.state = "reported"
        self.tell(
            s.TrainerReported(
                trainer=name,
                generation=trainer.generation,
                progress=(trainer.step, 0) if trainer.step >= 0 else s.NO_PROGRESS,
                why=why,
            )
        )

    def save(self) -> None:
        if self.asked_to_save:
            name = self.asked_to_save.pop()
            if name in self.trainers:
                self.saved = self.trainers[name].step
                self.tell(s.CheckpointSaved(step=self.saved))

    def lose_worker(self) -> None:
        if self.workers and self.dice.random() < 0.5:
            worker = self.dice.choice(self.workers)
            self.torn_step(worker)
            self.workers.remove(worker)
            self.noticed.discard(worker)
            for name in [n for n, t in self.trainers.items() if t.worker == worker]:
                del self.trainers[name]
            self.forget_what_nobody_holds()
            self.tell(s.WorkerGone(worker=worker, cause="gone"))
            self.assign()

    def forget_what_nobody_holds(self) -> None:
        """A step whose every holder died is trained again, from a survivor or a checkpoint."""
        held = max((t.step for t in self.trainers.values()), default=-1)
        if held >= 0 or self.state.generation:
            self.committed = held if held >= 0 else self.saved

    def torn_step(self, worker: str) -> None:
        """Some survivors see the end of the step in which a rank died, others do not."""
        names = [n for n in self.ranked("ranked") if self.trainers[n].worker != worker]
        is_whole = len(names) + 1 == len(self.state.in_phase("ranked"))
        if is_whole and names and self.committed < TOTAL_STEPS and self.dice.random() < 0.5:
            self.committed += 1
            for name in self.dice.sample(names, self.dice.randint(1, len(names))):
                self.trainers[name].step = self.committed

    def kill_trainer(self) -> None:
        names = list(self.trainers)
        if names and self.dice.random() < 0.3:
            name = self.dice.choice(names)
            if self.trainers[name].state != "starting":  # three of these in a row fail the job
                self.torn_step(self.trainers[name].worker)
                del self.trainers[name]
                self.forget_what_nobody_holds()
                self.tell(s.TrainerLost(trainer=name, cause="SIGKILL"))

    def notice(self) -> None:
        if self.workers and self.dice.random() < 0.5:
            worker = self.dice.choice(self.workers)
            self.noticed.add(worker)
            self.tell(s.WorkerNoticed(worker=worker))
            self.assign()

    def scale(self) -> None:
        high = self.dice.randint(1, 5)
        self.tell(s.BoundsChanged(min_workers=self.dice.randint(1, high), max_workers=high))
        self.assign()


def walk(seed: int, *, num_faults: int) -> World:
    world = World(seed)
    for _ in range(num_faults):
        world.act(faults=True)
        if world.state.is_ended:
            return world
    world.tell(s.BoundsChanged(min_workers=1, max_workers=4))
    for _ in range(4):
        world.join()
    for _ in range(3000):
        world.act(faults=False)
        world.tell(s.Tick())
        if world.state.is_ended:
            return world
    raise AssertionError(f"seed {seed} never ended: {world.state}\n{world.trainers}")


@settings(max_examples=500, deadline=None)
@given(st.integers(0, 10**9), st.integers(0, 120))
def test_every_schedule_ends_with_all_steps_committed(seed, num_faults):
    world = walk(seed, num_faults=num_faults)
    assert world.state.is_ended
    if world.state.status == "failed":
        # Only the budget for a step that ends trainer after trainer may say so.
        assert "ended a trainer in 3 generations" in world.state.reason
    else:
        assert world.state.status == "finished"
        assert world.committed == TOTAL_STEPS
    assert not world.trainers


@pytest.mark.parametrize("seed", range(5))
def test_without_faults_no_step_is_ever_done_again(seed):
    world = walk(seed, num_faults=0)
    assert world.state.status == "finished"
    assert world.committed == TOTAL_STEPS
