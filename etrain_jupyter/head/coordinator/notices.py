"""Notices: what becomes of jobs whose workers' machines will be taken, or may be."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from etrain_jupyter.head.coordinator import clock
from etrain_jupyter.head.coordinator.nodes import NodeSource
from etrain_jupyter.head.coordinator.roster import WorkerFacts, WorkerRoster
from etrain_jupyter.log import events
from etrain_jupyter.rules.membership import stimuli as s
from etrain_jupyter.wire.channel import Message
from etrain_jupyter.wire.notices import INTERRUPTION, REBALANCE

if TYPE_CHECKING:
    from etrain_jupyter.head.jobs.hosted_job import HostedJob

SAME_S = 1.0
"""A deadline that is told again comes out a little different each time."""


class Notices:
    """Takes notices in and lets the jobs know.

    Args:
        roster: The workers.
        active: Returns the jobs that have not ended.
        allocate: Shares the workers anew.
        nodes: Hears of it before it is asked for others.
    """

    def __init__(
        self,
        roster: WorkerRoster,
        active: Callable[[], list[HostedJob]],
        allocate: Callable[[], None],
        nodes: NodeSource,
    ) -> None:
        self._nodes = nodes
        self._roster = roster
        self._active = active
        self._allocate = allocate

    def take(self, message: Message, worker: WorkerFacts) -> None:
        """Take what a supervisor has heard of its machine; it may say so again and again."""
        if message["kind"] == INTERRUPTION:
            self.interrupt(worker, left_s=message.get("left_s", message["deadline"] - time.time()))
        elif message["kind"] == REBALANCE:
            self._note_risk(worker)

    def interrupt(self, worker: WorkerFacts, *, left_s: float) -> None:
        """Announce that a worker's machine will be taken ``left_s`` seconds from now."""
        leaves_at, deadline = clock.now() + left_s, time.time() + left_s
        if worker.leaves_at and worker.leaves_at < leaves_at + SAME_S:
            return  # no notice takes an earlier one back
        worker.leaves_at = leaves_at
        self._nodes.note_notice(worker.name, kind=INTERRUPTION, deadline=deadline)
        for job in self._jobs_on(worker.name):
            job.log(events.PreemptionNoticed, worker=worker.name, deadline=deadline)
            job.handle(s.WorkerNoticed(worker=worker.name, deadline=leaves_at))
        self._allocate()

    def _note_risk(self, worker: WorkerFacts) -> None:
        """Ask for a replacement and a checkpoint; the worker trains on."""
        if worker.at_risk or worker.leaves_at:
            return
        worker.at_risk = True
        self._nodes.note_notice(worker.name, kind=REBALANCE)
        for job in self._jobs_on(worker.name):
            job.log(events.RebalanceRecommended, worker=worker.name)
            for member in job.state.in_phase("ranked"):
                job.send(member.trainer, {"op": "checkpoint"})
        self._allocate()

    def recall(self, notices: Mapping[str, float], at_risk: Collection[str]) -> None:
        """Remember what the logs of the scheduler before tell of machines, in wall time."""
        for name in at_risk:
            facts = self._roster.get(name)
            if facts is not None:
                facts.at_risk = True
                self._nodes.note_notice(name, kind=REBALANCE)
        for name, deadline in notices.items():
            facts = self._roster.get(name)
            if facts is not None:
                facts.leaves_at = clock.from_wall(deadline)
                self._nodes.note_notice(name, kind=INTERRUPTION, deadline=deadline)
                for job in self._active():
                    job.handle(s.WorkerNoticed(worker=name, deadline=facts.leaves_at))

    def _jobs_on(self, worker: str) -> Iterator[HostedJob]:
        for job in self._active():
            if job.state.of_worker(worker) is not None:
                yield job
