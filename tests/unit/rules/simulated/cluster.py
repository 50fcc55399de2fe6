"""A simulated cluster: workers, jobs that share them, and a clock that only the test moves.

The test chooses the order of events, one ``Act`` at a time, so that a trainer may die or hang
between any two of them. ``finish`` treats all trainers fairly until all jobs have ended.
"""

from __future__ import annotations

from dataclasses import dataclass

from etrain_jupyter.rules.membership import stimuli as s
from etrain_jupyter.rules.sizing.allocation import Claim, allocate
from tests.unit.rules.simulated.job import RELEASE_TIMEOUT_S, Job
from tests.unit.rules.simulated.trainer import Act, Trainer

MOST_ROUNDS = 400
"""Rounds of acts within which jobs that are treated fairly must end."""


FAIR_ROUNDS = 40

ROUND_S = 0.05
"""Seconds per round, in which each trainer performs one act."""

TICK_S = 0.25
"""Interval of the coordinator's ticks, in seconds."""

BEAT_S = 1.0
"""Interval of a supervisor's progress reports, in seconds."""

SILENCE_S = 10.0
"""Timeout in seconds after which a silent supervisor is evicted."""


@dataclass
class Worker:
    """A worker process and its supervisor."""

    name: str
    is_noticed: bool = False
    leaves_at: float = 0.0
    silent_at: float = 0.0
    """Start of a network partition, in which nothing arrives in either direction; 0.0 without."""
    is_given_up: bool = False
    """Whether the coordinator has evicted it. If it reconnects, it must start over."""

    @property
    def is_usable(self) -> bool:
        """Whether the coordinator may give it to a job."""
        return not self.is_noticed and not self.is_given_up


class Cluster:
    """Workers, jobs that share them, and a clock that only the test moves."""

    def __init__(self, *bounds: tuple[int, int]) -> None:
        self.now = 1000.0
        self.workers: dict[str, Worker] = {}
        self.num_workers = 0
        self.num_notices = 0
        self._beat_at = self._ticked_at = 0.0
        self.is_fair = False
        """Whether no trainer has been delayed long enough to be taken for hung."""
        self.jobs: list[Job] = []
        for number, (low, high) in enumerate(bounds):
            self.jobs.append(Job(self, f"j{number}", min_workers=low, max_workers=high))
        self.allocate()

    # --- what the coordinator does ---

    def active(self) -> list[Job]:
        return [job for job in self.jobs if not job.state.is_ended]

    def allocate(self) -> None:
        claims = []
        for job in self.active():
            state = job.state
            held = tuple(m.worker for m in sorted(state.members.values(), key=lambda m: m.order))
            if not state.outcome:
                bounds = {"min_workers": state.min_workers, "max_workers": state.max_workers}
                claims.append(Claim(job_id=state.job_id, held=held, **bounds))
        ending = [job for job in self.active() if job.state.outcome]
        busy = {m.worker for job in ending for m in job.state.members.values()}
        usable = [w.name for w in self.workers.values() if w.is_usable and w.name not in busy]
        shares = allocate(claims, usable)
        for job in self.active():
            if job.state.job_id in shares:
                job.handle(s.WorkersAssigned(workers=shares[job.state.job_id]))

    def deliver(self, trainer: Trainer) -> None:
        """Deliver the next message of a trainer to the coordinator."""
        job, was_ended = trainer.job, trainer.job.state.is_ended
        job.take(trainer, trainer.said.popleft())
        if job.state.is_ended and not was_ended:
            self.allocate()

    def tick(self, seconds: float) -> None:
        """Advance the time."""
        while seconds > BEAT_S:
            self._tick(BEAT_S)
            seconds -= BEAT_S
        self._tick(seconds)

    def _tick(self, seconds: float) -> None:
        self.now += seconds
        self._ticked_at = self.now
        num_active = len(self.active())
        is_beat_due = self.now - self._beat_at >= BEAT_S
        self._beat_at = self.now if is_beat_due else self._beat_at
        for worker in list(self.workers.values()):
            if not worker.silent_at:
                self._beat(worker, is_due=is_beat_due)
            elif not worker.is_given_up and self.now - worker.silent_at > SILENCE_S:
                self._give_up(worker)
        for job in self.active():
            job.handle(s.Tick())
        if len(self.active()) < num_active or any(job.lacks_workers() for job in self.active()):
            self.allocate()
        for trainer in self.processes():
            if trainer.ends_at and self.now >= trainer.ends_at:
                trainer.die(is_news=False)
        used = {m.worker for job in self.active() for m in job.state.members.values()}
        for worker in list(self.workers.values()):
            if worker.is_noticed and (worker.name not in used or self.now > worker.leaves_at):
                self.vanish(worker.name)

    def _beat(self, worker: Worker, *, is_due: bool) -> None:
        """Report progress at once, and the lack of progress at the interval."""
        for job in self.active():
            for name in list(job.state.members):
                trainer = job.trainers[name]
                is_here = trainer.worker == worker.name and trainer.is_alive
                if is_here and (is_due or trainer.told != (trainer.page, trainer.beats)):
                    job.see_progress(trainer)

    def _give_up(self, worker: Worker) -> None:
        """Evict a supervisor that has timed out: its machine may be gone."""
        worker.is_given_up = True
        for job in self.active():
            job.handle(s.WorkerGone(worker=worker.name, cause="silent"))
        self.allocate()

    # --- what can happen ---

    def processes(self) -> list[Trainer]:
        """Return the trainers that live, part of a job or not."""
        return [t for job in self.jobs for t in job.trainers.values() if t.is_alive]

    def acts(self) -> list[Act]:
        """Return what can happen next by itself, in a fixed order."""
        trainers = [t for job in self.jobs for t in job.trainers.values()]
        return [act for trainer in trainers for act in self.acts_of(trainer)]

    def acts_of(self, trainer: Trainer) -> list[Act]:
        """Return what can happen next to one trainer, the arrival of its messages first."""
        worker = self.workers.get(trainer.worker)
        if worker is None:
            return []
        if worker.silent_at:
            return [act for act in trainer.acts() if act != trainer.read_order]
        arrival: list[Act] = [lambda: self.deliver(trainer)] if trainer.said else []
        return [*arrival, *trainer.acts()]

    def join(self) -> None:
        """A worker's supervisor registers."""
        self.num_workers += 1
        name = f"w{self.num_workers}"
        self.workers[name] = Worker(name=name)
        self.allocate()

    def vanish(self, name: str) -> None:
        """A worker's process ends and its connection closes; unread messages are lost."""
        del self.workers[name]
        for trainer in self.processes():
            if trainer.worker == name:
                trainer.die(is_news=False)
                trainer.said.clear()
        for job in self.active():
            job.handle(s.WorkerGone(worker=name, cause="gone"))
        self.allocate()

    def notice(self, name: str, seconds: float = 120.0, *, trains_on: bool | None = None) -> None:
        """A worker receives an interruption notice; by default, every second one trains on."""
        self.num_notices += 1
        trains_on = self.num_notices % 2 == 0 if trains_on is None else trains_on
        worker = self.workers[name]
        worker.is_noticed, worker.leaves_at = True, self.now + seconds
        for job in self.active():
            notice = s.WorkerNoticed(worker=name, deadline=worker.leaves_at, trains_on=trains_on)
            job.handle(notice)
        self.allocate()

    def kill(self, trainer: Trainer) -> None:
        trainer.unsent = []
        trainer.die(is_news=True)

    def hang(self, trainer: Trainer, kind: str) -> None:
        # An idle trainer runs no user code: only the whole process can stop, or a write.
        is_saving = any(message["op"] == "save" for message in trainer.inbox)
        trainer.hung = "stopped" if trainer.place == "idle" and not is_saving else kind
        trainer.hung_at = self.now
        if trainer.group is not None:
            trainer.group.is_faulty = True

    def cut_off(self, name: str) -> None:
        """A network partition separates a worker, which still runs, from the coordinator."""
        self.workers[name].silent_at = self.workers[name].silent_at or self.now

    def reconnect(self, name: str) -> None:
        """End a partition: late messages arrive first; an evicted worker starts over."""
        worker = self.workers[name]
        worker.silent_at = 0.0
        if not worker.is_given_up:
            return
        for trainer in [t for job in self.jobs for t in job.trainers.values()]:
            if trainer.worker == name:
                while trainer.said:
                    self.deliver(trainer)
                trainer.die(is_news=False)
        worker.is_given_up = False
        self.allocate()

    def stop(self, job: Job, *, now: bool) -> None:
        job.stop_asked = True
        job.stop_now_asked |= now
        job.handle(s.StopRequested(now=now))
        self.allocate()

    def scale(self, job: Job, low: int, high: int) -> None:
        job.handle(s.BoundsChanged(min_workers=low, max_workers=high))
        self.allocate()

    def pause(self, job: Job, is_pause: bool) -> None:
        """The user pauses or resumes a job."""
        job.handle(s.PauseRequested() if is_pause else s.ResumeRequested())

    def ask_to_save(self, job: Job, saves_fail: bool) -> None:
        """The user requests a checkpoint; ``saves_fail`` means that the disk is full now."""
        job.saves_fail = saves_fail
        for member in job.state.in_phase("ranked"):
            job.send((member.trainer,), {"op": "checkpoint"})

    def raisers(self) -> list[Trainer]:
        """Return the trainers that run the notebook's code now."""
        places = ("starting", "looping")
        return [t for t in self.processes() if t.place in places and not t.hung]

    # --- a fair end ---

    def finish(self) -> None:
        """Deliver everything, give all jobs enough workers, and wait for their ends."""
        for name in list(self.workers):
            self.reconnect(name)
        for trainer in self.processes():
            if self.is_left_alone(trainer):
                self.kill(trainer)
        for job in self.active():
            job.saves_fail = False
            if job.state.is_paused:
                job.handle(s.ResumeRequested())
        for number in range(MOST_ROUNDS):
            if not self.active():
                break
            # By now every trainer has had time for everything that was due before.
            self.is_fair = number > FAIR_ROUNDS
            self._add_workers()
            for job in self.active():
                if job.state.is_paused:  # a loss that was not finite pauses a job by itself
                    job.handle(s.ResumeRequested())
            self.play_round()
        assert not self.active(), [job.state for job in self.active()]
        self.tick(RELEASE_TIMEOUT_S)
        left = [trainer.name for trainer in self.processes()]
        assert not left, f"{left} outlive their jobs"

    def is_left_alone(self, trainer: Trainer) -> bool:
        """Whether no rule ends a hung trainer, because no rank waits for it.

        Building a workload may take any time, and so may the step of a single rank.
        """
        is_single = trainer.group is not None and len(trainer.group.names) == 1
        if trainer.place == "idle":
            return False
        return trainer.hung == "stuck" and (trainer.place == "starting" or is_single)

    def _add_workers(self) -> None:
        num_needed = sum(job.state.min_workers for job in self.active())
        while sum(w.is_usable for w in self.workers.values()) < num_needed:
            self.join()

    def play_round(self) -> None:
        """Let each trainer perform one act, and advance the time; further if none can act."""
        is_idle = True
        for trainer in [t for job in self.jobs for t in job.trainers.values()]:
            acts = self.acts_of(trainer)
            if acts:
                is_idle = False
                acts[0]()
        self.now += ROUND_S
        if is_idle:
            self.tick(2.0)
        elif self.now - self._ticked_at >= TICK_S:
            self.tick(0.0)
