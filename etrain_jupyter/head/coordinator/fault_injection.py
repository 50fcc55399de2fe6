"""Faults on purpose: those that a job's plan has, those that somebody asks for, and by chance."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from etrain_jupyter.head.coordinator import clock
from etrain_jupyter.head.coordinator.nodes import NodeSource
from etrain_jupyter.head.coordinator.notices import Notices
from etrain_jupyter.head.coordinator.roster import WorkerRoster
from etrain_jupyter.log import events
from etrain_jupyter.rules.policy.chaos import Chaos

if TYPE_CHECKING:
    from etrain_jupyter.head.jobs.hosted_job import HostedJob

FATAL = frozenset({"kill", "segfault", "exit", "error", "stop", "hold_gil", "hang"})
"""Kinds that end the trainer, by themselves or because it holds the others up."""

BY_COORDINATOR = frozenset({"notice", "kill_worker"})
"""Kinds that befall a worker, not its trainer."""

CHAOS_NOTICE_S = 10.0
"""How long a worker lives after a notice that came by chance."""


class PlannedFaults:
    """The faults of a job's plan that have not fired yet."""

    def __init__(self, faults: Iterable[dict[str, Any]]) -> None:
        self._left = {fault["id"]: fault for fault in faults}
        self._given_to: dict[int, str] = {}
        """Trainers that are to commit what may befall any that warms up, by the fault's id."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left to come."""
        return not self._left

    @property
    def left(self) -> tuple[int, ...]:
        """The ids of those that have not fired."""
        return tuple(self._left)

    def of_newcomer(self, trainer: str, *, among: Collection[str]) -> list[dict[str, Any]]:
        """Return those that a trainer may commit before it is a rank.

        What may befall any of them is given to one at a time: two that warm up side by side would
        both commit it.

        Args:
            trainer: Who is told of them.
            among: The trainers of the job that have not ended.
        """
        mine = []
        for fault in self._of_trainers():
            is_anyones = fault["rank"] is None
            if is_anyones and self._given_to.get(fault["id"]) in among:
                continue
            if is_anyones and fault["at"] == "warm":
                self._given_to[fault["id"]] = trainer
            if not is_anyones or fault["at"] == "warm":
                mine.append(fault)
        return mine

    def of_rank(self, rank: int, world_size: int) -> list[dict[str, Any]]:
        """Return those that a rank may commit; what may befall any rank is given to one of them."""
        return [
            fault
            for fault in self._of_trainers()
            if (fault["rank"] is not None or fault["id"] % world_size == rank)
            and not (fault["rank"] is None and fault["at"] == "warm")
        ]

    def _of_trainers(self) -> list[dict[str, Any]]:
        return [fault for fault in self._left.values() if fault["kind"] not in BY_COORDINATOR]

    def fire(self, fault_id: int) -> dict[str, Any] | None:
        """Take one out of the plan; None if it has fired before."""
        return self._left.pop(fault_id, None)

    def due(self, step: int, world_size: int) -> list[dict[str, Any]]:
        """Take out those of the coordinator's whose step is committed and whose rank is there."""
        found = [
            fault
            for fault in self._left.values()
            if fault["kind"] in BY_COORDINATOR
            and fault["step"] <= step
            and (fault["rank"] or 0) < world_size
        ]
        for fault in found:
            del self._left[fault["id"]]
        return found


class Injector:
    """Lets faults happen to workers and their trainers, and says so in the job's log.

    Args:
        nodes: Kills workers.
        roster: Knows them.
        notices: Announces that machines will be taken.
    """

    def __init__(self, nodes: NodeSource, roster: WorkerRoster, notices: Notices) -> None:
        self._nodes = nodes
        self._roster = roster
        self._notices = notices
        self._chaos: dict[str, Chaos] = {}

    def inject(self, job: HostedJob, worker: str, kind: str, *, notice_s: float) -> None:
        """Let one fault happen to a worker of a job."""
        member = job.state.of_worker(worker)
        facts = self._roster.get(worker)
        if member is None or facts is None:
            return  # it is gone already
        job.log(events.FaultInjected, worker=worker, fault=kind, step=job.state.step)
        order = {"op": "fault", "trainer": member.trainer, "kind": kind}
        if kind == "notice":
            self.give_notice(worker, notice_s)
        elif kind in ("worker", "kill_worker"):
            self._nodes.kill(worker)
            # Where somebody else starts the workers, only they themselves can do it.
            job.tell(worker, {**order, "kind": "kill_worker"})
        else:
            job.trainers[member.trainer].is_injected = kind in FATAL
            job.tell(worker, order)

    def give_notice(self, worker: str, notice_s: float) -> None:
        """Announce that a worker's machine will be taken."""
        facts = self._roster.get(worker)
        if facts is not None:
            self._notices.interrupt(facts, left_s=notice_s)

    def commit_planned(self, job: HostedJob) -> None:
        """Let those faults of the plan happen whose step is committed."""
        if job.planned.is_empty:
            return
        ranks = job.ranks()
        for fault in job.planned.due(job.state.step, len(ranks)):
            worker = ranks[fault["rank"] or 0]
            self.inject(job, worker, fault["kind"], notice_s=fault.get("notice_s", 120.0))

    # --- by chance ---

    def begin_chaos(self, job: HostedJob, chaos: Chaos, words: str) -> bool:
        """Let faults happen by chance from now on, and say so; return whether others did before."""
        was_on = job.order.job_id in self._chaos
        self._chaos[job.order.job_id] = chaos
        job.log(events.LogLine, level="info", worker="", text=f"chaos: {words}")
        return was_on

    def end_chaos(self, job: HostedJob) -> bool:
        """Let no more faults happen by chance; False if none would have."""
        was_on = self._chaos.pop(job.order.job_id, None) is not None
        if was_on and not job.state.is_ended:
            job.log(events.LogLine, level="info", worker="", text="chaos: over")
        return was_on

    def tick(self, job: HostedJob) -> None:
        """Let happen what is due by chance."""
        chaos = self._chaos.get(job.order.job_id)
        if chaos is None:
            return
        now = clock.now()
        if job.state.is_ended or chaos.is_over(now):
            self.end_chaos(job)
            return
        # Those that leave anyway are left alone.
        staying = [m.worker for m in job.state.in_phase("ranked") if not m.leaving]
        strike = chaos.due([name for name in job.ranks() if name in staying], now)
        if strike is not None:
            self.inject(job, strike.worker, strike.kind, notice_s=CHAOS_NOTICE_S)
