"""Which worker is whose: the shares of the jobs, and what the pool is asked for and handed back."""

from __future__ import annotations

import time
from collections.abc import Callable

from etrain_jupyter.cluster.hosted_job import HostedJob
from etrain_jupyter.cluster.nodes import NodeSource
from etrain_jupyter.cluster.roster import Roster
from etrain_jupyter.elastic import stimuli as s
from etrain_jupyter.elastic.allocation import Claim, allocate

HAND_BACK_S = 2.0
"""A noticed worker that nobody uses ends at the latest so long before its machine is taken."""


class Sharing:
    """Shares the workers of one pool among the jobs of one cluster.

    Args:
        nodes: The pool.
        roster: Its workers that are there now.
        active: Returns the jobs that have not ended.
    """

    def __init__(
        self, nodes: NodeSource, roster: Roster, active: Callable[[], list[HostedJob]]
    ) -> None:
        self._nodes = nodes
        self._workers = roster
        self._active = active

    def allocate(self) -> None:
        """Share the workers anew and ask the pool for as many as all jobs together can use."""
        jobs = {job.state.job_id: job for job in self._active()}
        ending = [job for job in jobs.values() if job.state.outcome]
        busy = {m.worker for job in ending for m in job.state.members.values()}
        claims = [_claim_of(job) for job in jobs.values() if not job.state.outcome]
        free = [w.name for w in self._workers if not w.leaves_at and w.name not in busy]
        for job_id, workers in allocate(claims, free).items():
            jobs[job_id].handle(s.WorkersAssigned(workers=workers))
        self._want_workers()

    def _want_workers(self) -> None:
        """Ask the pool for what the jobs can use.

        A noticed worker that stays because too few would be left is replaced at once: its time is
        what the newcomer needs to start and to warm up. The others are replaced when they are
        released, so that nothing starts on this machine while their generation changes.
        """
        jobs = [job for job in self._active() if not job.state.outcome]
        kept = {
            member.worker for job in jobs if _is_short(job) for member in job.state.members.values()
        }
        num_leaving = sum(1 for w in self._workers if w.leaves_at and w.name in kept)
        wanted = sum(job.state.max_workers for job in jobs)
        self._nodes.want(wanted + num_leaving, reason="jobs")

    def hand_back_noticed(self) -> None:
        """Hand noticed workers back once the others train without them; in time in any case."""
        used = {m.worker for job in self._active() for m in job.state.members.values()}
        is_changing = any(
            j.state.phase == "running" and not j.state.is_ready for j in self._active()
        )
        now = time.time()
        for facts in self._workers:
            if not facts.leaves_at:
                continue
            left_s = facts.leaves_at - now
            if facts.name not in used and (not is_changing or left_s < HAND_BACK_S):
                self._want_workers()  # without it, before its end makes room for another one
                self._nodes.release(facts.name, drain_s=max(1.0, left_s))
            elif left_s < 0:
                self._nodes.kill(facts.name)


def _claim_of(job: HostedJob) -> Claim:
    state = job.state
    return Claim(
        job_id=state.job_id,
        min_workers=state.min_workers,
        max_workers=state.max_workers,
        held=tuple(m.worker for m in sorted(state.members.values(), key=lambda m: m.order)),
    )


def _is_short(job: HostedJob) -> bool:
    """Whether a job could not go on with those that need not leave."""
    members = job.state.members.values()
    stays = [m for m in members if not m.leaving and m.phase != "starting"]
    return len(stays) < max(1, job.state.min_workers)
