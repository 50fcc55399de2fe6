"""Recovery after a scheduler's death: wait until its workers have reconnected."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence

from etrain_jupyter.head.coordinator.nodes import NodeCost
from etrain_jupyter.head.coordinator.requests import RequestError
from etrain_jupyter.head.coordinator.roster import WorkerFacts
from etrain_jupyter.head.coordinator.serving import Held, Serving
from etrain_jupyter.head.jobs.hosted_job import HostedJob
from etrain_jupyter.wire.messages import TrainerSummary

RETURN_S = 30.0
"""Reconnect timeout in seconds for a worker whose process is alive, or whose state is unknown."""


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
        self._by_worker: dict[str, Mapping[str, TrainerSummary]] = {}
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
        """Return no jobs: no decisions are made."""
        return []

    def is_busy(self, worker: str) -> bool:
        """Return True: any worker may be in use."""
        return True

    def allocate(self) -> None:
        """Do nothing: it is unknown which workers are in use."""

    def take_costs(self, costs: Sequence[NodeCost]) -> None:
        """Do nothing: it is unknown which jobs incurred the costs."""

    def greet(self, worker: str, trainers: Mapping[str, TrainerSummary]) -> None:
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
