"""Modes of the coordinator: normal operation, and recovery after a scheduler's death."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from etrain_jupyter.head.coordinator.defects import Defects
from etrain_jupyter.head.coordinator.fault_injection import Injector
from etrain_jupyter.head.coordinator.nodes import NodeCost
from etrain_jupyter.head.coordinator.notices import Notices
from etrain_jupyter.head.coordinator.requests import RequestError
from etrain_jupyter.head.coordinator.roster import WorkerFacts, WorkerRoster
from etrain_jupyter.head.coordinator.sharing import Sharing
from etrain_jupyter.head.coordinator.supervisors import Acknowledgements
from etrain_jupyter.head.jobs.costs import CostLog
from etrain_jupyter.head.jobs.hosted_job import HostedJob
from etrain_jupyter.head.jobs.trainer_commands import Send
from etrain_jupyter.rules.membership import stimuli as s
from etrain_jupyter.wire import messages as m

SHARED_AT_ONCE = 64
"""In a cluster of at most this many workers, a new worker is shared as soon as it connects."""

Held = m.AnyReport | m.MachineNotice
"""Messages held during a recovery; heartbeats and hellos are handled immediately."""

RETURN_S = 30.0
"""Reconnect timeout in seconds for a worker whose process is alive, or whose state is unknown."""


@dataclass(kw_only=True)
class Serving:
    """The coordinator's mode while all its workers are known."""

    active: Callable[[], list[HostedJob]]
    """Returns the active jobs."""
    roster: WorkerRoster
    sharing: Sharing
    notices: Notices
    injector: Injector
    acknowledgements: Acknowledgements
    costs: CostLog
    defects: Defects
    send_to: Send
    """Sends a message to a worker's supervisor."""
    _has_newcomers: bool = field(default=False, init=False)
    """True if workers have connected since the workers were last shared."""

    # --- the same methods as ``Recovering`` ---

    def deciding_jobs(self) -> list[HostedJob]:
        """Return the jobs to tick: all active ones."""
        return self.active()

    def is_busy(self, worker: str) -> bool:
        """Return whether a job uses a worker."""
        return any(job.state.of_worker(worker) for job in self.active())

    def allocate(self) -> None:
        """Share the workers among the jobs."""
        self._has_newcomers = False
        self.sharing.allocate()

    def take_costs(self, costs: Sequence[NodeCost]) -> None:
        """Split the nodes' costs so far among the jobs."""
        self.costs.take(costs, self.active())

    def greet(self, worker: str, trainers: Mapping[str, m.TrainerSummary]) -> None:
        """Make a newly registered worker available to the jobs."""
        # A supervisor that reconnects may still have trainers for a job that has since ended.
        if trainers:
            self.release_unknown(worker, trainers)
        # Sharing takes time proportional to the number of workers. When hundreds of them connect,
        # it is done once for all that have connected since the last tick.
        if len(self.roster) <= SHARED_AT_ONCE:
            self.allocate()
        else:
            self._has_newcomers = True

    def share_newcomers(self) -> None:
        """Share the workers that connected since the last call. Called with each tick."""
        if self._has_newcomers:
            self.allocate()

    def lose(self, facts: WorkerFacts, cause: str, *, detected_s: float = 0.0) -> None:
        """Have the jobs continue without a lost worker."""
        for job in self.active():
            job.handle(s.WorkerGone(worker=facts.name, cause=cause, detected_s=detected_s))
        self.allocate()

    def take(self, message: Held, worker: WorkerFacts) -> None:
        """Handle a notice, or a report that neither we nor the previous scheduler have handled."""
        if isinstance(message, m.MachineNotice):
            self.notices.take(message, worker)
            return
        number = message.number
        if number and not self.acknowledgements.is_new(worker.name, number):
            return
        job = self.job_of(message.trainer, worker)
        try:
            if job is not None:
                job.take_report(message)
                self.injector.commit_planned(job)
        finally:
            # Acknowledge the report even after an exception, because it would fail again each time
            # it is resent.
            if number:
                self.acknowledgements.take(worker.name, number, [job] if job else [])

    def check_request(self, job: HostedJob) -> None:
        """Accept every request."""

    # --- the end of a recovery ---

    def adopt(
        self,
        jobs: Iterable[HostedJob],
        summaries: Mapping[str, m.TrainerSummary],
        *,
        away_s: float,
    ) -> None:
        """Have each job adopt its surviving trainers."""
        for job in jobs:
            with self.defects.watch(job, "adopting its trainers"):
                job.adopt(summaries, away_s=away_s)

    def replay_notices(self, deadlines: Mapping[str, float], at_risk: Collection[str]) -> None:
        """Restore the notices logged by the previous scheduler."""
        self.notices.replay(deadlines, at_risk)

    def take_held(self, message: Held, worker: str) -> None:
        """Handle a held message, if its worker is still connected."""
        facts = self.roster.get(worker)
        if facts is not None:
            job_id = "" if isinstance(message, m.MachineNotice) else message.job_id
            job = next((job for job in self.active() if job.spec.job_id == job_id), None)
            with self.defects.watch(job, f"handling a held {type(message).__name__}"):
                self.take(message, facts)

    def release_unknown(self, worker: str, trainers: Iterable[str]) -> None:
        """Release a worker's trainers that belong to no active job."""
        known = {name for job in self.active() for name in job.state.members}
        for name in trainers:
            if name not in known:
                self.send_to(worker, m.ShutDownTrainer(trainer=name))

    # --- lookups ---

    def job_of(self, trainer: str, worker: WorkerFacts) -> HostedJob | None:
        """Return a trainer's active job; None unless that job launched it on this worker."""
        # Do not trust the job id in the name, because a compromised worker may send any name, but
        # must not report for other workers' trainers.
        for job in self.active():
            facts = job.trainers.get(trainer)
            if facts is not None and facts.worker == worker.name:
                return job
        return None


class Recovering:
    """The coordinator's mode until the previous scheduler's workers are back.

    No decisions are made in this mode, because it is unknown which workers are in use. Reports are
    held, and handled in order once the jobs have their trainers again::

        previous scheduler dies    this one starts       w1 back       w2 back (or 30 s have passed)
        trainers keep training ─────────────────────────────────────────────────▶
                                   Recovering: reports from w1 are held ─┤ Serving: adopt, handle

    Args:
        died_at: When the previous scheduler died, in seconds since the epoch.
        jobs: Its active jobs.
    """

    def __init__(self, died_at: float, jobs: Sequence[HostedJob]) -> None:
        self._died_at = died_at
        self._jobs = tuple(jobs)
        # The trainers of each reconnected worker, and the held messages with their workers' names.
        self._by_worker: dict[str, Mapping[str, m.TrainerSummary]] = {}
        self._held: list[tuple[Held, str]] = []
        # From the logs: the deadlines of machines that will be reclaimed, and machines at risk.
        replayed = [job.replayed for job in jobs if job.replayed is not None]
        self._notices = {w: at for known in replayed for w, at in known.notices.items()}
        self._at_risk = {worker for known in replayed for worker in known.at_risk}
        self._expected = {worker for known in replayed for worker in known.trainers}
        self._deadline = time.monotonic() + RETURN_S

    def is_over(self, alive: Collection[str] | None) -> bool:
        """Return True if there are no workers left to wait for.

        Args:
            alive: The workers whose processes are alive; None if unknown.
        """
        if time.monotonic() >= self._deadline:
            return True
        expected = self._expected if alive is None else self._expected & set(alive)
        return expected <= self._by_worker.keys()

    def hand_over(self, serving: Serving) -> None:
        """Give the jobs their trainers, then handle the held messages."""
        # The order matters:
        #
        #     adopt              restores the jobs' trainers, which the next two steps need
        #     replay_notices     members on workers with a notice begin to leave
        #     take_held          in order of arrival
        #     release_unknown    last, as a held report may have ended a job with these trainers
        summaries = {n: known for part in self._by_worker.values() for n, known in part.items()}
        away_s = max(0.0, time.time() - self._died_at)
        serving.adopt(self._jobs, summaries, away_s=away_s)
        serving.replay_notices(self._notices, self._at_risk)
        for message, worker in self._held:
            serving.take_held(message, worker)
        for worker, trainers in self._by_worker.items():
            serving.release_unknown(worker, trainers)
        serving.allocate()

    # --- what the coordinator does in this mode ---

    def deciding_jobs(self) -> list[HostedJob]:
        """Return no jobs, because no decisions are made."""
        return []

    def is_busy(self, worker: str) -> bool:
        """Return True, because any worker may be in use."""
        return True

    def allocate(self) -> None:
        """Do nothing, because it is unknown which workers are in use."""

    def take_costs(self, costs: Sequence[NodeCost]) -> None:
        """Do nothing, because it is unknown which jobs incurred the costs."""

    def greet(self, worker: str, trainers: Mapping[str, m.TrainerSummary]) -> None:
        """Note that a worker has reconnected."""
        self._by_worker[worker] = trainers

    def lose(self, facts: WorkerFacts, cause: str, *, detected_s: float = 0.0) -> None:
        """Note that a worker is lost; it will not reconnect."""
        self._by_worker.pop(facts.name, None)
        self._expected.discard(facts.name)

    def take(self, message: Held, worker: WorkerFacts) -> None:
        """Hold a message until the jobs have their trainers."""
        self._held.append((message, worker.name))

    def check_request(self, job: HostedJob) -> None:
        """Refuse every request.

        Raises:
            RequestError: Always.
        """
        raise RequestError(
            f"the scheduler of job {job.spec.name} was restarted and is waiting for its workers "
            "to reconnect. The request was not carried out; training continues. Retry in a few "
            "seconds."
        )
