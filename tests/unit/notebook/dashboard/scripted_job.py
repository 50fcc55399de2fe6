"""A job that never ran: the events of a run with every kind of trouble, for tests of the screen."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from etrain_jupyter.log import events as t
from tests.unit.log.spent import PLAIN_STEP

JOB_ID = "digits-7f3a"
STEPS_PER_EPOCH = 200


class Script:
    """Makes events with a clock of its own.

    Args:
        num_steps: Steps of the job.
        start: The instant of its submission, seconds since the epoch.
        job_id: The job.
        name: What it is called; by default the part of the id before the last dash.
    """

    def __init__(
        self, num_steps: int = 1200, start: float = 1e9, job_id: str = JOB_ID, *, name: str = ""
    ) -> None:
        self.name = name or job_id.rpartition("-")[0]
        self.num_steps, self.job_id = num_steps, job_id
        self.now, self.seq, self.generation, self.step = start, 0, 0, 0
        self.ranks: list[str] = ["w0", "w1"]
        self.noise = random.Random(7)

    def make(self, kind: type[t.Event], **fields: Any) -> t.Event:
        self.seq += 1
        common: dict[str, Any] = {"job_id": self.job_id, "time": self.now, "seq": self.seq}
        return kind(**common, generation=self.generation, **fields)

    def events(self) -> Iterator[t.Event]:
        """The whole run: 2 ranks, then 4, one killed, one preempted, both replaced."""
        yield from self.begin()
        yield from self.form(["w0", "w1"], "start")
        yield self.make(t.JobStatusChanged, status="running")
        turns: dict[int, Callable[[], Iterable[t.Event]]] = {
            self.num_steps // 6: lambda: self.grow(["w2", "w3"]),
            self.num_steps * 2 // 5: lambda: self.lose("w1"),
            self.num_steps * 9 // 20: lambda: self.grow(["w4"]),
            self.num_steps * 13 // 20: lambda: self.preempt("w2"),
            self.num_steps * 3 // 4: lambda: self.grow(["w5"]),
        }
        for step in range(1, self.num_steps + 1):
            yield from self.complete(step)
            if step in turns:
                yield from turns[step]()
        for worker in self.ranks:
            yield self.make(t.WorkerLeft, worker=worker, reason="job ended")
        yield self.make(t.JobStatusChanged, status="finished")

    def begin(self) -> Iterator[t.Event]:
        config = {"metrics": {"accuracy": "accuracy"}, "data": {"train": "a", "eval": "b"}}
        yield self.make(
            t.JobSubmitted,
            name=self.name or self.job_id,
            min_workers=1,
            max_workers=4,
            config=config,
        )
        self.now += 0.1
        for worker in ("w0", "w1"):
            yield self.make(t.WorkerJoined, worker=worker)
        self.now += 2.5
        for worker in ("w0", "w1"):
            yield self.make(
                t.WorkerWarmed, worker=worker, trainer_pid=self.pid_of(worker), warm_s=2.5
            )
        yield self.make(
            t.JobPlanned,
            num_train_samples=51_200,
            num_eval_samples=360,
            global_batch_size=256,
            steps_per_epoch=STEPS_PER_EPOCH,
            total_steps=self.num_steps,
            num_parameters=128_394,
            num_trained_parameters=128_394,
            total_samples=256 * self.num_steps,
        )

    def pid_of(self, worker: str) -> int:
        return 4200 + int(worker[1:])

    def form(self, ranks: list[str], why: str, stall_s: float = 0.03) -> Iterator[t.Event]:
        self.ranks, self.generation = ranks, self.generation + 1
        self.now += stall_s
        yield self.make(
            t.GenerationFormed,
            why=why,
            world_size=len(ranks),
            ranks=list(ranks),
            trainer_pids=[self.pid_of(worker) for worker in ranks],
            step=self.step,
            stall_s=stall_s,
            backend="gloo",
        )

    def grow(self, newcomers: list[str]) -> Iterator[t.Event]:
        for worker in newcomers:
            yield self.make(t.WorkerJoined, worker=worker)
            yield self.make(
                t.WorkerWarmed, worker=worker, trainer_pid=self.pid_of(worker), warm_s=2.1
            )
        yield from self.form([*self.ranks, *newcomers], "join")

    def lose(self, worker: str) -> Iterator[t.Event]:
        yield self.make(t.WorkerLost, worker=worker, cause="trainer killed", detected_s=0.004)
        rest = [name for name in self.ranks if name != worker]
        yield self.make(t.StepUndone, step=self.step + 1, workers=rest)
        yield from self.form(rest, "lost", 0.05)

    def preempt(self, worker: str) -> Iterator[t.Event]:
        yield self.make(t.PreemptionNoticed, worker=worker, deadline=self.now + 120)
        yield self.make(t.WorkerLeft, worker=worker, reason="preempted")
        yield from self.form([name for name in self.ranks if name != worker], "leave")

    def complete(self, step: int) -> Iterator[t.Event]:
        """One step, and what is due after it."""
        self.step = step
        rate = 3100.0 * len(self.ranks) * self.noise.uniform(0.9, 1.05)
        self.now += 256 / rate
        loss = (
            2.3 * math.exp(-step / 180) + 0.08 + self.noise.gauss(0, 0.03 + 0.2 / (1 + step / 30))
        )
        accuracy = min(1.0, 0.985 - 0.88 * math.exp(-step / 150) + self.noise.gauss(0, 0.012))
        epoch, place = divmod(step - 1, STEPS_PER_EPOCH)
        yield self.make(
            t.StepCompleted,
            step=step,
            epoch=epoch,
            first=place * 256,
            samples=256,
            sample_checksum=0,
            loss=max(0.01, loss),
            lr=3e-4,
            world_size=len(self.ranks),
            samples_per_s=rate,
            metrics={"accuracy": max(0.0, accuracy)},
            **PLAIN_STEP,
        )
        if step % STEPS_PER_EPOCH == 0 or step == self.num_steps:
            yield from self.end_epoch(step, epoch)

    def end_epoch(self, step: int, epoch: int) -> Iterator[t.Event]:
        self.now += 0.05
        yield self.make(
            t.EvalCompleted,
            step=step,
            epoch=epoch,
            samples=360,
            loss=2.2 * math.exp(-step / 190) + 0.11,
            duration_s=0.05,
            metrics={"accuracy": 0.978 - 0.86 * math.exp(-step / 160)},
        )
        yield self.make(
            t.CheckpointCommitted,
            step=step,
            manifest=f"manifests/step_{step:08d}.json",
            size_bytes=1_541_120,
            stall_s=0.001,
            duration_s=0.02,
        )


def play(script: Script, listener: Callable[[list[t.Event]], None], *, steps_per_s: float) -> None:
    """Bring the script's events to ``listener`` in small batches, at the pace of a real job."""
    pause_s = 0.05
    batch: list[t.Event] = []
    num_steps = 0
    for event in script.events():
        batch.append(event)
        num_steps += isinstance(event, t.StepCompleted)
        if num_steps >= steps_per_s * pause_s:
            listener(batch)
            batch, num_steps = [], 0
            time.sleep(pause_s)
    listener(batch)
