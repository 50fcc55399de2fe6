"""Carry out a user's requests for an active job."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from etrain_jupyter.head.coordinator import clock
from etrain_jupyter.head.coordinator.fault_injection import Injector
from etrain_jupyter.head.coordinator.nodes import NodeSource
from etrain_jupyter.head.coordinator.roster import WorkerFacts, WorkerRoster
from etrain_jupyter.head.jobs.hosted_job import HostedJob
from etrain_jupyter.rules.chaos import FAULT_KINDS, Chaos
from etrain_jupyter.rules.membership import stimuli as s
from etrain_jupyter.wire.messages import RequestCheckpoint
from etrain_jupyter.wire.requests import UNKNOWN_JOB, RefusedRequestError

_BLAMED = "is detected when the others have waited for ETRAIN_HANG_S seconds, and replaced"
_REPLACED = "the others continue, and it is replaced"
_OUTCOMES = {
    "kill": f"loses its trainer; {_REPLACED}",
    "segfault": f"loses its trainer to a segfault; {_REPLACED}",
    "exit": f"loses its trainer, which exits without a message; {_REPLACED}",
    "error": f"loses its trainer to an exception in the framework; {_REPLACED}",
    "stop": f"has its trainer stopped (SIGSTOP); that trainer {_BLAMED}",
    "hold_gil": f"has its trainer hold the GIL forever; that trainer {_BLAMED}",
    "hang": f"has its trainer hang forever; that trainer {_BLAMED}",
    "disconnect": "loses its connections to the other ranks; they reconnect",
    "notice": "received an interruption notice of 120 s",
    "worker": f"is killed; {_REPLACED}",
}
"""Effect of each requested fault; appended to the worker's name in the reply."""

STANDSTILL_S = 5.0
"""Minimum time without a step, in seconds, before a reply contains a warning."""


class RequestError(RefusedRequestError):
    """A request that cannot be carried out. The message is returned to the kernel."""

    def __init__(self, message: str, *, kind: str = "request") -> None:
        super().__init__(kind, message)


class UnknownJobError(RequestError):
    """A request for a job that this cluster does not have."""

    def __init__(self, message: str) -> None:
        super().__init__(message, kind=UNKNOWN_JOB)


@dataclass(kw_only=True)
class JobRequests:
    """Carry out requests, and return a sentence describing the effect."""

    nodes: NodeSource
    """The pool, which limits the number of workers."""
    roster: WorkerRoster
    """The connected workers."""
    injector: Injector
    allocate: Callable[[], None]
    """Redistributes the workers among the jobs."""

    def do(self, job: HostedJob, request: str, args: dict[str, Any]) -> str:
        """Carry out one request.

        Raises:
            RequestError: If it cannot be carried out.
        """
        if job.state.is_ended:
            raise RequestError(f"job {job.spec.name} has ended as {job.state.status}")
        do = self._BY_NAME.get(request)
        if do is None:
            raise RequestError(f"unknown request {request!r}; known: {', '.join(self._BY_NAME)}")
        return do(self, job, **args)

    def check_capacity(self, min_workers: int, outcome: str) -> None:
        """Refuse a minimum number of workers that the pool can never reach."""
        most = self.nodes.capacity()
        if most is not None and min_workers > most:
            raise RequestError(
                f"workers.min={min_workers} exceeds this pool's limit of {most} workers. "
                f"{outcome}. Set workers.min to {most} or less."
            )

    def _stop(self, job: HostedJob, now: bool = False) -> str:
        job.handle(s.StopRequested(now=now))
        if now or job.state.is_ended:
            return "stopped"
        return "stops at the next step boundary, with a checkpoint" + _standstill(job)

    def _pause(self, job: HostedJob) -> str:
        if job.state.is_paused:
            return f"is already paused, at step {job.state.step}; continue with %etrain resume"
        job.handle(s.PauseRequested())
        return "pauses at the next step boundary; its workers keep the state" + _standstill(job)

    def _resume(self, job: HostedJob) -> str:
        if not job.state.is_paused:
            return f"is not paused; it is {job.state.status} at step {job.state.step}"
        job.handle(s.ResumeRequested())
        return "continues"

    def _scale(self, job: HostedJob, min: int | None = None, max: int | None = None) -> str:
        low = job.state.min_workers if min is None else min
        high = job.state.max_workers if max is None else max
        # Check everything before changing anything, because a refused request must have no effect.
        if not 1 <= low <= high:
            raise RequestError(
                f"workers min={low}, max={high} are not valid: 1 <= min <= max must hold. Nothing "
                "was changed."
            )
        self.check_capacity(low, "Nothing was changed")
        shards = job.spec.num_shards
        if shards is not None and high > shards:
            raise RequestError(
                f"workers max={high} exceeds the {shards} shards of this reproducible job: the "
                f"other workers would be idle. Nothing was changed. Scale to {shards} or less, or "
                f"start a job with reproducible: {{shards: {high}}}."
            )
        most = self.nodes.capacity()
        limit = ""
        if most is not None and high > most:
            limit, high = f"; max={high} exceeds this pool's limit of {most}", most
        job.handle(s.BoundsChanged(min_workers=low, max_workers=high))
        self.allocate()
        return f"trains on {low} to {high} workers from now on{limit}"

    def _checkpoint(self, job: HostedJob) -> str:
        ranked = job.state.in_phase("ranked")
        if not ranked:
            raise RequestError(
                f"the job is {job.state.status} at step {job.state.step}: no rank is training, so "
                "there is nothing new to save. Retry once %etrain show lists workers that train."
            )
        for member in ranked:
            job.commands.send(RequestCheckpoint(trainer=member.trainer))
        return "saves at the next step boundary"

    # --- injected faults ---

    def _preempt(self, job: HostedJob, worker: str | None = None, notice_s: float = 120.0) -> str:
        facts = self._victim(job, worker)
        self.injector.give_notice(facts.name, notice_s)
        alone = "or, if it holds the only copy of the state, once that is transferred or saved"
        return (
            f"{facts.name} will be terminated in {notice_s:g} s. It leaves at the next step "
            f"boundary ({alone})"
        )

    def _kill(self, job: HostedJob, worker: str | None = None) -> str:
        facts = self._victim(job, worker)
        self.injector.inject(job, facts.name, "worker", notice_s=0.0)
        return f"{facts.name} (process {facts.pid}) was killed"

    def _fault(self, job: HostedJob, kind: str, worker: str | None = None) -> str:
        known = (*FAULT_KINDS, "error", "disconnect")
        if kind not in known:
            raise RequestError(f"unknown fault {kind!r}; known: {', '.join(known)}")
        facts = self._victim(job, worker)
        self.injector.inject(job, facts.name, kind, notice_s=120.0)
        return f"{facts.name} {_OUTCOMES[kind]}"

    def _chaos(
        self,
        job: HostedJob,
        *,
        mtbf_s: float = 15.0,
        mode: str = "mix",
        duration_s: float | None = None,
        seed: int | None = None,
        off: bool = False,
    ) -> str:
        if off:
            was_on = self.injector.end_chaos(job)
            return "no more random faults" if was_on else "no random faults were active"
        # The seed is logged, so that the same faults can be repeated.
        seed = random.randrange(2**31) if seed is None else seed
        now = clock.now()
        mode = "notice" if mode == "preempt" else mode  # the command's name for this fault
        try:
            chaos = Chaos(mtbf_s=mtbf_s, mode=mode, seed=seed, now=now, duration_s=duration_s)
        except ValueError as exc:
            raise RequestError(str(exc)) from exc
        end = "until the job ends" if duration_s is None else f"for {duration_s:g} s"
        words = f"{mode} every {mtbf_s:g} s on average {end}, seed {seed}"
        was_on = self.injector.begin_chaos(job, chaos, words)
        again = "; they replace the previous ones" if was_on else ""
        return f"random faults: {words}{again}. To stop them, use %etrain chaos --off"

    def _victim(self, job: HostedJob, worker: str | None) -> WorkerFacts:
        """Return the named worker, or the last rank's worker."""
        ranked = [
            m.worker
            for m in job.state.in_phase("ranked")
            if not m.leaving and m.worker in self.roster
        ]
        if worker is None and not ranked:
            raise RequestError("no worker is training now")
        name = ranked[-1] if worker is None else worker
        # A connected worker may belong to another job.
        facts = self.roster.get(name)
        if facts is None or job.state.of_worker(name) is None:
            known = ", ".join(m.worker for m in job.state.members.values()) or "none"
            raise RequestError(f"no worker {name!r} in this job; there are: {known}")
        return facts

    _BY_NAME: ClassVar[dict[str, Callable[..., str]]] = {
        "stop": _stop,
        "pause": _pause,
        "resume": _resume,
        "scale": _scale,
        "checkpoint": _checkpoint,
        "preempt": _preempt,
        "kill": _kill,
        "fault": _fault,
        "chaos": _chaos,
    }


def _standstill(job: HostedJob) -> str:
    """Return a warning if the next step boundary may never be reached."""
    # Stop and pause wait for the end of the current step, which a hung rank never reaches.
    state = job.state
    quiet_s = clock.now() - state.timings.last_step_at
    usual_s = max(STANDSTILL_S, 10 * state.timings.step_s)
    has_stepped = state.phase in ("running", "changing") and state.timings.last_step_at
    if not has_stepped or quiet_s < usual_s:
        return ""
    return f". No step has ended for {quiet_s:.0f} s; %etrain stop --now does not wait for one"
