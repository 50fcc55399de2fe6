"""Which worker is whose: the shares of the jobs, and what the pool is asked for and handed back."""

from __future__ import annotations

from collections.abc import Callable

from etrain_jupyter.head.coordinator import clock
from etrain_jupyter.head.coordinator.compatibility import Fitness
from etrain_jupyter.head.coordinator.nodes import NodeSource
from etrain_jupyter.head.coordinator.roster import WorkerFacts, WorkerRoster
from etrain_jupyter.head.jobs.hosted_job import HostedJob
from etrain_jupyter.rules.membership import stimuli as s
from etrain_jupyter.rules.policy.allocation import Claim, allocate

HAND_BACK_S = 2.0
"""A noticed worker that nobody uses ends at the latest so long before its machine is taken."""


TAKEN_S = 60.0
"""A machine elsewhere that was not taken so long after its time is ended by us: what we end
ourselves is paid for, and what EC2 takes in its first hour is not."""


class Sharing:
    """Shares the workers of one pool among the jobs of one cluster.

    Args:
        nodes: The pool.
        roster: Its workers that are there now.
        active: Returns the jobs that have not ended.
    """

    def __init__(
        self, nodes: NodeSource, roster: WorkerRoster, active: Callable[[], list[HostedJob]]
    ) -> None:
        self._nodes = nodes
        self._workers = roster
        self._active = active
        self._fitness = Fitness()

    def allocate(self) -> None:
        """Share the workers anew and ask the pool for as many as all jobs together can use."""
        jobs = {job.state.job_id: job for job in self._active()}
        ending = [job for job in jobs.values() if job.state.outcome]
        busy = {m.worker for job in ending for m in job.state.members.values()}
        claims = [self._claim_of(job) for job in jobs.values() if not job.state.outcome]
        staying = [w for w in self._workers if not w.leaves_at and w.name not in busy]
        free = [w.name for w in sorted(staying, key=lambda w: w.at_risk)]
        for job_id, workers in allocate(claims, free).items():
            jobs[job_id].handle(s.WorkersAssigned(workers=workers))
        self._want_workers()

    def _want_workers(self) -> None:
        """Ask the pool for what the jobs can use.

        A noticed worker that stays because too few would be left is replaced at once: its time is
        what the newcomer needs to start and to warm up. The others are replaced when they are
        released, so that nothing starts on this machine while their generation changes; all are at
        once where newcomers have machines of their own, and those whose machines are likely to be
        taken, too.
        """
        jobs = [job for job in self._active() if not job.state.outcome]
        kept = {
            member.worker for job in jobs if _is_short(job) for member in job.state.members.values()
        }
        if self._nodes.replaces_early:
            used = self._used()
            leaving = [
                w
                for w in self._workers
                if not w.is_released and (w.leaves_at or (w.at_risk and w.name in used))
            ]
        else:
            leaving = [w for w in self._workers if w.leaves_at and w.name in kept]
        wanted = sum(job.state.max_workers for job in jobs)
        self._nodes.want(wanted + len(leaving), reason="jobs")

    def hand_back_noticed(self) -> None:
        """Hand noticed workers back once the others train without them; in time in any case."""
        used = self._used()
        is_changing = any(
            j.state.phase == "running" and not j.state.current.is_ready for j in self._active()
        )
        now = clock.now()
        for facts in self._workers:
            if not facts.leaves_at:
                continue
            left_s = facts.leaves_at - now
            if facts.name not in used and (not is_changing or left_s < HAND_BACK_S):
                self._hand_back(facts, left_s)
            elif left_s < (-TAKEN_S if self._nodes.replaces_early else 0.0):
                self._nodes.kill(facts.name)

    def _hand_back(self, facts: WorkerFacts, left_s: float) -> None:
        facts.is_released = True
        if self._nodes.replaces_early:
            # Counted until then: what replaces it must not look like one too many.
            self._nodes.release(facts.name, drain_s=max(1.0, left_s))
            self._want_workers()
        else:
            self._want_workers()  # without it, before its end makes room for another one
            self._nodes.release(facts.name, drain_s=max(1.0, left_s))

    def _used(self) -> set[str]:
        return {m.worker for job in self._active() for m in job.state.members.values()}

    def _claim_of(self, job: HostedJob) -> Claim:
        state = job.state
        unfit = [w.name for w in self._workers if not self._fitness.fits(w, job)]
        return Claim(
            job_id=state.job_id,
            min_workers=state.min_workers,
            max_workers=state.max_workers,
            held=tuple(m.worker for m in sorted(state.members.values(), key=lambda m: m.order)),
            unfit=frozenset(unfit),
        )


def _is_short(job: HostedJob) -> bool:
    """Whether a job could not go on with those that need not leave."""
    members = job.state.members.values()
    stays = [m for m in members if not m.leaving and m.phase != "starting"]
    return len(stays) < max(1, job.state.min_workers)
