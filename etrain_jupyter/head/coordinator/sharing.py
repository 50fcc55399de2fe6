"""Share the workers among the jobs; request workers from the pool and hand them back."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from etrain_jupyter.head.coordinator import clock
from etrain_jupyter.head.coordinator.nodes import NodeSource
from etrain_jupyter.head.coordinator.roster import WorkerFacts, WorkerRoster
from etrain_jupyter.head.coordinator.services import Service
from etrain_jupyter.head.jobs.hosted_job import HostedJob
from etrain_jupyter.log import events
from etrain_jupyter.process.processes import num_usable_cores
from etrain_jupyter.rules.membership import stimuli as s
from etrain_jupyter.rules.sizing.allocation import Claim, allocate
from etrain_jupyter.rules.sizing.speed_evidence import SizingView
from etrain_jupyter.rules.sizing.step_time import Placement
from etrain_jupyter.wire.versions import PROTOCOL_KEY, WIRE_VERSION, VersionComparison, compare

HAND_BACK_S = 2.0
"""An unused worker with a notice is released at least this many seconds before its deadline."""

TAKEN_S = 60.0
"""A remote machine that still runs this many seconds after its deadline is terminated. It is not
terminated earlier, because clouds waive the first hour only if they reclaim the machine."""

SOON_S = 2.0
"""A stopped job frees its workers soon if its steps take less than this many seconds."""

REVIEW_S = 2.0
"""Interval in seconds between two reviews of the jobs' sizes."""


@dataclass
class Sharing:
    """Share the workers of one pool among the jobs of one cluster."""

    nodes: NodeSource
    """The pool."""
    workers: WorkerRoster
    """Its connected workers."""
    active: Callable[[], list[HostedJob]]
    """Returns the active jobs."""
    services: Sequence[Service] = ()
    """Services that limit the claims of their jobs."""
    _fitness: Fitness = field(default_factory=lambda: Fitness(), init=False)
    _review_at: float = field(default=0.0, init=False)

    def allocate(self) -> None:
        """Redistribute the workers, and request as many as all jobs together can use."""
        # A job that is about to end claims no workers, but its workers become free only once its
        # trainers have left, because they may be writing the last checkpoint. Workers at risk are
        # assigned last.
        jobs = {job.state.job_id: job for job in self.active()}
        ending = [job for job in jobs.values() if job.state.outcome]
        busy = {m.worker for job in ending for m in job.state.members.values()}
        soon = {m.worker for job in ending if _ends_soon(job) for m in job.state.members.values()}
        claims = [self._claim_of(job) for job in jobs.values() if not job.state.outcome]
        staying = [w for w in self.workers if not w.leaves_at and w.name not in busy - soon]
        # Workers that will soon be free are shared too, but not used yet. Otherwise, a new job
        # would take workers from the others, and give them back a moment later.
        usable = [w.name for w in sorted(staying, key=lambda w: (w.name in soon, w.at_risk))]
        for service in self.services:
            claims = list(service.limit_claims(claims, usable))
        for job_id, workers in allocate(claims, usable).items():
            free = tuple(worker for worker in workers if worker not in soon)
            jobs[job_id].handle(s.WorkersAssigned(workers=free))
        self._want_workers()

    def capacity(self) -> int:
        """Return how many workers can train at the same time without slowing each other down."""
        most = self.nodes.capacity() or len(self.workers) or 1
        # On this machine, there are more slots than cores, so that a job can be scaled for a test.
        return most if self.nodes.replaces_early else min(most, max(2, num_usable_cores()))

    def review_sizes(self) -> bool:
        """Review how many workers the jobs with ``target: goodput`` use.

        Returns:
            True if the workers should be redistributed.
        """
        now = clock.now()
        if now < self._review_at:
            return False
        self._review_at = now + REVIEW_S
        jobs = [job for job in self.active() if job.spec.is_sized]
        return any([job.tuning.review_size(self._view_of(job), job.state) for job in jobs])

    def _view_of(self, job: HostedJob) -> SizingView:
        prices = [node.get("price_usd_per_h") or 0.0 for node in self.nodes.nodes()]
        priced = [price for price in prices if price > 0]
        finish_by_s, least = self.nodes.finish_by_s, job.state.min_workers
        # Workers that the pool cannot provide can never be measured.
        most = self.nodes.capacity() or job.state.max_workers
        return SizingView(
            min_workers=least,
            max_workers=max(least, min(job.state.max_workers, most)),
            placement=self._placement(),
            usd_per_worker_h=sum(priced) / len(priced) if priced else None,
            remaining_s=(
                None if finish_by_s is None else job.record.attempt_at + finish_by_s - time.time()
            ),
        )

    def _placement(self) -> Placement:
        """Return where the workers run, as far as their addresses and devices show it."""
        facts = list(self.workers)
        per_host = Counter(one.address.rpartition(":")[0] for one in facts)
        if self.nodes.replaces_early or len(per_host) > 1:
            return Placement(workers_per_machine=max(per_host.values(), default=1))
        if all(one.device.startswith("cpu") for one in facts):
            return Placement(cores=num_usable_cores())
        return Placement()

    def _want_workers(self) -> None:
        # Request as many as the jobs can use, and replacements for workers that are about to leave:
        #
        #     worker with a notice            its replacement is requested
        #     on its own machine              immediately; also if it is only at risk
        #     on a shared machine, needed     immediately: it must warm up in time
        #     on a shared machine, surplus    at its release, so that no start-up competes with the
        #                                     change of generation
        jobs = [job for job in self.active() if not job.state.outcome]
        kept = {
            member.worker for job in jobs if _is_short(job) for member in job.state.members.values()
        }
        if self.nodes.replaces_early:
            used = self._used()
            leaving = [
                w
                for w in self.workers
                if not w.is_released and (w.leaves_at or (w.at_risk and w.name in used))
            ]
        else:
            leaving = [w for w in self.workers if w.leaves_at and w.name in kept]
        wanted = sum(job.tuning.wanted_workers(job.state) for job in jobs)
        self.nodes.want(wanted + len(leaving), reason="jobs")

    def hand_back_noticed(self) -> None:
        """Release workers with a notice once the others train without them or time runs short."""
        #     notice ── used by a job ──┬── change of generation ──┬── release ──────── deadline
        #                               leaves the job             others are ready
        #                                                          (or 2 s before the deadline)
        #
        # A worker still used by a job is killed after the deadline: immediately on a shared
        # machine, 60 s later elsewhere (TAKEN_S).
        used = self._used()
        is_changing = any(
            j.state.phase == "running" and not j.state.current.is_ready for j in self.active()
        )
        now = clock.now()
        for facts in self.workers:
            if not facts.leaves_at:
                continue
            left_s = facts.leaves_at - now
            if facts.name not in used and (not is_changing or left_s < HAND_BACK_S):
                self._hand_back(facts, left_s)
            elif left_s < (-TAKEN_S if self.nodes.replaces_early else 0.0):
                self.nodes.kill(facts.name)

    def _hand_back(self, facts: WorkerFacts, left_s: float) -> None:
        facts.is_released = True
        if self.nodes.replaces_early:
            # The pool counts a worker until its release. If demand dropped before that, the
            # replacement would look like surplus.
            self.nodes.release(facts.name, drain_s=max(1.0, left_s))
            self._want_workers()
        else:
            # Lower the demand first. Otherwise the pool would start another worker in the slot that
            # this one frees.
            self._want_workers()
            self.nodes.release(facts.name, drain_s=max(1.0, left_s))

    def _used(self) -> set[str]:
        return {m.worker for job in self.active() for m in job.state.members.values()}

    def _claim_of(self, job: HostedJob) -> Claim:
        state, size = job.state, job.tuning.size
        unfit = [w.name for w in self.workers if not self._fitness.fits(w, job)]
        return Claim(
            job_id=state.job_id,
            min_workers=state.min_workers,
            max_workers=job.tuning.wanted_workers(state),
            goodputs=size.goodputs if size is not None else (),
            held=tuple(m.worker for m in sorted(state.members.values(), key=lambda m: m.order)),
            unfit=frozenset(unfit),
        )


def _ends_soon(job: HostedJob) -> bool:
    # False if its steps are long, or its last checkpoint is being retried, which may take a minute.
    saving = job.state.saving
    return job.state.timings.step_s < SOON_S and not (saving.num_rounds or saving.failed)


def _is_short(job: HostedJob) -> bool:
    # True if too few workers are staying for the job to continue.
    members = job.state.members.values()
    stays = [m for m in members if not m.leaving and m.phase != "starting"]
    return len(stays) < max(1, job.state.min_workers)


class Fitness:
    """Compare fingerprints, and log each incompatibility with a job once."""

    def __init__(self) -> None:
        # Pairs of a job id and worker versions that the job's log already mentions. Without them,
        # each message would repeat, because ``fits`` is called for each worker and job whenever
        # workers are assigned.
        self._told: set[tuple[str, tuple[tuple[str, str], ...]]] = set()

    def fits(self, worker: WorkerFacts, job: HostedJob) -> bool:
        """Return whether a worker may run a job."""
        # A job's workers need the notebook's versions, and our wire version.
        theirs = worker.fingerprint
        ours = {**job.spec.fingerprint, PROTOCOL_KEY: str(WIRE_VERSION)}
        if theirs == ours:
            return True
        found = compare(theirs, ours, at=worker.name, here="this notebook")
        key = (job.spec.job_id, tuple(sorted(theirs.items())))
        if (found.wrong or found.notes) and key not in self._told:
            self._told.add(key)
            text = _describe(found, worker.name)
            job.log(events.LogLine, level="warning", worker=worker.name, text=text)
        return found.fits


def _describe(found: VersionComparison, worker: str) -> str:
    """Describe how a worker's versions differ, the effect and the remedy."""
    if found.fits:
        return (
            f"{'; '.join(found.notes)}: {worker} is used anyway. If its results or errors differ, "
            "install the same versions there"
        )
    return (
        f"{'; '.join(found.wrong)}: this job cannot run there, so it does not use {worker} and "
        f"other workers with these versions. Install {' and '.join(found.remedies)} on the "
        "workers, or start the notebook with their versions. If they are in a local cluster, run "
        "%etrain down: the next cluster starts with the installed versions"
    )
