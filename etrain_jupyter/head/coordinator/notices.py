"""Handle notices that a worker's machine will or may be reclaimed."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from etrain_jupyter.head.coordinator import clock
from etrain_jupyter.head.coordinator.nodes import NodeSource
from etrain_jupyter.head.coordinator.roster import WorkerFacts, WorkerRoster
from etrain_jupyter.head.jobs.hosted_job import HostedJob
from etrain_jupyter.log import events
from etrain_jupyter.rules.membership import stimuli as s
from etrain_jupyter.wire.messages import INTERRUPTION, REBALANCE, MachineNotice, RequestCheckpoint

SAME_S = 1.0
"""Deadlines that differ by less than this are treated as equal, because repeated notices vary."""


@dataclass
class Notices:
    """Pass notices on to the jobs and to the pool."""

    roster: WorkerRoster
    active: Callable[[], list[HostedJob]]
    """Returns the active jobs."""
    allocate: Callable[[], None]
    """Redistributes the workers among the jobs."""
    nodes: NodeSource
    """The pool. It is notified before a replacement is requested."""

    def take(self, message: MachineNotice, worker: WorkerFacts) -> None:
        """Handle a supervisor's notice about its machine, which may be repeated."""
        if message.notice == INTERRUPTION:
            self.interrupt(worker, left_s=message.left_s)
        elif message.notice == REBALANCE:
            self._note_risk(worker)

    def interrupt(self, worker: WorkerFacts, *, left_s: float) -> None:
        """Announce that a worker's machine will be reclaimed ``left_s`` seconds from now."""
        leaves_at, deadline = clock.now() + left_s, time.time() + left_s
        # A supervisor repeats its notices after each reconnect, and the pool may announce the same
        # interruption.
        if worker.leaves_at and worker.leaves_at < leaves_at + SAME_S:
            return  # a later deadline does not revoke an earlier one
        worker.leaves_at = leaves_at
        self.nodes.note_notice(worker.name, kind=INTERRUPTION, deadline=deadline)
        for job in self._jobs_on(worker.name):
            job.log(events.PreemptionNoticed, worker=worker.name, deadline=deadline)
            job.handle(self._notice_of(worker.name, leaves_at))
        self.allocate()

    def _note_risk(self, worker: WorkerFacts) -> None:
        """Request a replacement and a checkpoint; the worker keeps training."""
        # After a rebalance recommendation, an interruption is likely, but may come with two
        # minutes' notice or never. A checkpoint now bounds the loss if the machine disappears
        # without notice.
        if worker.at_risk or worker.leaves_at:
            return
        worker.at_risk = True
        self.nodes.note_notice(worker.name, kind=REBALANCE)
        for job in self._jobs_on(worker.name):
            job.log(events.RebalanceRecommended, worker=worker.name)
            for member in job.state.in_phase("ranked"):
                job.commands.send(RequestCheckpoint(trainer=member.trainer))
        self.allocate()

    def replay(self, notices: Mapping[str, float], at_risk: Collection[str]) -> None:
        """Restore the notices from the previous scheduler's logs, which use wall time."""
        # They are in the logs already, so only the roster, the pool and the jobs are updated.
        for name in at_risk:
            facts = self.roster.get(name)
            if facts is not None:
                facts.at_risk = True
                self.nodes.note_notice(name, kind=REBALANCE)
        for name, deadline in notices.items():
            facts = self.roster.get(name)
            if facts is not None:
                facts.leaves_at = clock.from_wall(deadline)
                self.nodes.note_notice(name, kind=INTERRUPTION, deadline=deadline)
                for job in self.active():
                    job.handle(self._notice_of(name, facts.leaves_at))

    def _notice_of(self, worker: str, deadline: float) -> s.WorkerNoticed:
        trains_on = self.nodes.trains_after_notice
        return s.WorkerNoticed(worker=worker, deadline=deadline, trains_on=trains_on)

    def _jobs_on(self, worker: str) -> Iterator[HostedJob]:
        for job in self.active():
            if job.state.of_worker(worker) is not None:
                yield job
