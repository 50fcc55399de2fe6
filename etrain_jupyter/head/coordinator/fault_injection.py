"""Inject planned, user-requested and random faults into workers and trainers."""

from __future__ import annotations

from dataclasses import dataclass, field

from etrain_jupyter.head.coordinator import clock
from etrain_jupyter.head.coordinator.nodes import NodeSource
from etrain_jupyter.head.coordinator.notices import Notices
from etrain_jupyter.head.coordinator.roster import WorkerRoster
from etrain_jupyter.head.jobs.hosted_job import HostedJob
from etrain_jupyter.head.jobs.planned_faults import FATAL
from etrain_jupyter.log import events
from etrain_jupyter.rules.chaos import Chaos
from etrain_jupyter.wire.messages import InjectFault

CHAOS_NOTICE_S = 10.0
"""Seconds from a random notice until the worker is killed."""


@dataclass
class Injector:
    """Inject faults into workers and their trainers, and log them."""

    nodes: NodeSource
    """Kills workers."""
    roster: WorkerRoster
    """The connected workers."""
    notices: Notices
    """Announces that machines will be reclaimed."""
    _chaos: dict[str, Chaos] = field(default_factory=dict, init=False)

    def inject(self, job: HostedJob, worker: str, kind: str, *, notice_s: float) -> None:
        """Inject one fault into one of a job's workers."""
        member = job.state.of_worker(worker)
        facts = self.roster.get(worker)
        if member is None or facts is None:
            return  # it is already gone
        job.log(events.FaultInjected, worker=worker, fault=kind, step=job.state.step)
        if kind == "notice":
            self.give_notice(worker, notice_s)
        elif kind in ("worker", "kill_worker"):
            self.nodes.kill(worker)
            # A pool whose workers are managed elsewhere cannot kill them, so the supervisor kills
            # its own process. If the pool has killed the worker, the message is lost.
            job.commands.send(InjectFault(trainer=member.trainer, kind_of_fault="kill_worker"))
        else:
            job.trainers[member.trainer].is_injected = kind in FATAL
            job.commands.send(InjectFault(trainer=member.trainer, kind_of_fault=kind))

    def give_notice(self, worker: str, notice_s: float) -> None:
        """Announce that a worker's machine will be reclaimed."""
        facts = self.roster.get(worker)
        if facts is not None:
            self.notices.interrupt(facts, left_s=notice_s)

    def commit_planned(self, job: HostedJob) -> None:
        """Inject the planned faults whose step has been committed."""
        if job.messages.planned.is_empty:
            return
        ranks = job.ranks()
        for fault in job.messages.planned.due(job.state.step, len(ranks)):
            worker = ranks[fault["rank"] or 0]
            self.inject(job, worker, fault["kind"], notice_s=fault.get("notice_s", 120.0))

    # --- random faults ---

    def begin_chaos(self, job: HostedJob, chaos: Chaos, words: str) -> bool:
        """Start injecting random faults, and log that; return True if some were already active."""
        was_on = job.spec.job_id in self._chaos
        self._chaos[job.spec.job_id] = chaos
        job.log(events.LogLine, level="info", worker="", text=f"chaos: {words}")
        return was_on

    def end_chaos(self, job: HostedJob) -> bool:
        """Stop injecting random faults; return False if there were none."""
        was_on = self._chaos.pop(job.spec.job_id, None) is not None
        if was_on and not job.state.is_ended:
            job.log(events.LogLine, level="info", worker="", text="chaos: over")
        return was_on

    def tick(self, job: HostedJob) -> None:
        """Inject the random fault that is due, if any."""
        chaos = self._chaos.get(job.spec.job_id)
        if chaos is None:
            return
        now = clock.now()
        if job.state.is_ended or chaos.is_over(now):
            self.end_chaos(job)
            return
        # Spare the ranks that are leaving.
        staying = [m.worker for m in job.state.in_phase("ranked") if not m.leaving]
        strike = chaos.due([name for name in job.ranks() if name in staying], now)
        if strike is not None:
            self.inject(job, strike.worker, strike.kind, notice_s=CHAOS_NOTICE_S)
