"""The coordinator: a Dask scheduler plugin that owns the jobs and acts as ``elastic`` decides."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed import Scheduler, SchedulerPlugin

from etrain_jupyter.cluster.hosted_job import HostedJob, Message, Order
from etrain_jupyter.cluster.nodes import NodeSource
from etrain_jupyter.elastic import stimuli as s
from etrain_jupyter.elastic.allocation import Claim, allocate
from etrain_jupyter.events import types as events

logger = logging.getLogger("etrain.coordinator")

TICK_S = 0.25
COALESCE_S = 0.05
"""How long an answer to a listener is held back to take more events along: at most 20 a second."""


@dataclass
class WorkerFacts:
    """A worker that has a supervisor."""

    name: str
    address: str
    device: str
    pid: int
    leaves_at: float = 0.0
    """When its machine will be taken; 0 if nothing is known of that."""


class RequestError(Exception):
    """A request that cannot be done; the text goes back to whoever asked."""

    kind = "request"


class UnknownJobError(RequestError):
    """A request for a job that this cluster does not have."""

    kind = "JobNotFoundError"


Handler = Callable[..., Awaitable[dict[str, Any]]]


class Coordinator(SchedulerPlugin):
    """Runs the jobs of one cluster. Everything happens on the scheduler's event loop."""

    name = "etrain-coordinator"

    def __init__(
        self, nodes: NodeSource, *, cluster_id: str, on_shutdown: Callable[[], None]
    ) -> None:
        self._nodes = nodes
        self._cluster_id = cluster_id
        self._on_shutdown = on_shutdown
        self._jobs: dict[str, HostedJob] = {}
        self._workers: dict[str, WorkerFacts] = {}
        self._idle_since = time.monotonic()
        self._ticker: asyncio.Task[None] | None = None

    # --- life ---

    async def start(self, scheduler: Scheduler) -> None:
        """Register what the kernel and the supervisors may call."""
        self._scheduler = scheduler
        scheduler.stream_handlers["etrain_report"] = self._take_report
        handlers: dict[str, Handler] = {
            "submit": self._submit,
            "jobs": self._jobs_list,
            "events": self._events,
            "request": self._request,
            "workers": self._workers_of,
            "describe": self._describe,
            "down": self._down,
        }
        for name, handler in handlers.items():
            scheduler.handlers[f"etrain_{name}"] = _answering(handler)
        self._ticker = asyncio.create_task(self._tick())

    async def close(self) -> None:
        """Stop ticking; the scheduler is closing."""
        if self._ticker is not None:
            self._ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticker

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            for job in self._active():
                job.handle(s.Tick())
            self._after_change()
            self._take_noticed_machines()

    def is_busy(self, worker: str) -> bool:
        """Whether a job holds this worker; the pool may end the others when there are too many."""
        return any(job.state.of_worker(worker) for job in self._active())

    def idle_s(self) -> float:
        """Return the seconds since the last job ended; 0.0 while one is active."""
        return 0.0 if self._active() else time.monotonic() - self._idle_since

    def _active(self) -> list[HostedJob]:
        return [job for job in self._jobs.values() if not job.state.is_ended]

    # --- workers ---

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: Any) -> None:
        """Take in that a worker's connection is gone. Called by the scheduler."""
        facts = next((w for w in self._workers.values() if w.address == worker), None)
        if facts is None:
            return
        del self._workers[facts.name]
        cause = "preempted" if facts.leaves_at else f"worker process {facts.pid} is gone"
        for job in self._active():
            job.handle(s.WorkerGone(worker=facts.name, cause=cause))
        self._allocate()

    def _take_report(self, message: Message, worker: str) -> None:
        """Take a message of a supervisor; ``worker`` is its address."""
        if message["op"] == "supervisor":
            name = str(self._scheduler.workers[worker].name)
            facts = WorkerFacts(name, worker, message["device"], message["pid"])
            self._workers[name] = facts
            self._allocate()
            return
        for job in list(self._jobs.values()):
            if message["trainer"] in job.trainers and not job.state.is_ended:
                facts_of = job.trainers[message["trainer"]]
                known = self._workers.get(facts_of.worker)
                if known is not None and known.address == worker:
                    job.take_report(message["trainer"], message)
        self._after_change()

    def _tell(self, worker: str, message: Message) -> None:
        facts = self._workers.get(worker)
        stream = self._scheduler.stream_comms.get(facts.address) if facts else None
        if stream is not None:
            stream.send({"op": "etrain_order", "message": message})

    def _allocate(self) -> None:
        """Share the workers anew and ask the pool for as many as all jobs together can use."""
        claims = []
        for job in self._active():
            state = job.state
            if state.outcome:
                continue
            held = tuple(m.worker for m in sorted(state.members.values(), key=lambda m: m.order))
            claims.append(
                Claim(
                    job_id=state.job_id,
                    min_workers=state.min_workers,
                    max_workers=state.max_workers,
                    held=held,
                )
            )
        usable = [w.name for w in self._workers.values() if not w.leaves_at]
        busy = {
            m.worker
            for job in self._active()
            if job.state.outcome
            for m in job.state.members.values()
        }
        shares = allocate(claims, [name for name in usable if name not in busy])
        for job_id, workers in shares.items():
            self._jobs[job_id].handle(s.WorkersAssigned(workers=workers))
        self._nodes.want(sum(claim.max_workers for claim in claims), reason="jobs")

    def _after_change(self) -> None:
        """Let go what is not needed any more."""
        ended = [job for job in self._jobs.values() if job.state.is_ended and job.order.bundle]
        for job in ended:
            job.order.bundle = b""
            job.trainers.clear()
            self._idle_since = time.monotonic()
        if ended:
            self._allocate()

    def _take_noticed_machines(self) -> None:
        """Hand noticed workers back once nobody trains on them; take them when time is over."""
        used = {m.worker for job in self._active() for m in job.state.members.values()}
        for facts in list(self._workers.values()):
            if not facts.leaves_at:
                continue
            if facts.name not in used:
                self._nodes.release(facts.name, drain_s=max(1.0, facts.leaves_at - time.time()))
            elif time.time() > facts.leaves_at:
                self._nodes.kill(facts.name)

    # --- what the kernel may call ---

    async def _submit(self, job: dict[str, Any]) -> dict[str, Any]:
        order = Order(**{**job, "run_dir": Path(job["run_dir"])})
        if order.job_id in self._jobs:
            raise RequestError(f"job {order.job_id} is here already")
        self._check_capacity(order.min_workers, "Nothing was submitted")
        order.run_dir.mkdir(parents=True, exist_ok=True)
        (order.run_dir / "bundle").write_bytes(order.bundle)
        self._jobs[order.job_id] = HostedJob(order=order, tell=self._tell)
        self._allocate()
        return {"job_id": order.job_id}

    def _check_capacity(self, min_workers: int, outcome: str) -> None:
        """Refuse what would wait for ever."""
        most = self._nodes.capacity()
        if most is not None and min_workers > most:
            raise RequestError(
                f"workers.min={min_workers} is more than the {most} workers that this pool can "
                f"have. {outcome}. Write workers.min of {most} or less."
            )

    async def _jobs_list(self) -> dict[str, Any]:
        return {"jobs": [job.summary() for job in self._jobs.values()]}

    async def _events(
        self, job_id: str, since: int = 0, wait_s: float = 10.0, limit: int = 5000
    ) -> dict[str, Any]:
        job = self._job(job_id)
        if job.last_seq <= since and not job.state.is_ended:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(job.changed.wait(), min(wait_s, 60.0))
                await asyncio.sleep(COALESCE_S)
        return {"events": job.events_since(since, limit), "status": job.state.status}

    async def _workers_of(self, job_id: str) -> dict[str, Any]:
        records = self._job(job_id).members()
        for record in records:
            facts = self._workers.get(record["worker"])
            record["address"] = facts.address if facts else ""
            record["pid"] = facts.pid if facts else 0
        return {"workers": records}

    async def _describe(self) -> dict[str, Any]:
        return {
            "cluster_id": self._cluster_id,
            "pid": os.getpid(),
            "workers": len(self._workers),
            "jobs": len(self._active()),
            "idle_s": self.idle_s(),
        }

    async def _down(self) -> dict[str, Any]:
        for job in self._active():
            job.handle(s.StopAsked(now=True))
        asyncio.get_running_loop().call_later(0.05, self._on_shutdown)
        return {"message": "the cluster is going down"}

    async def _request(
        self, job_id: str, request: str, args: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        job = self._job(job_id)
        if job.state.is_ended:
            raise RequestError(f"job {job.order.name} has ended as {job.state.status}")
        do = _REQUESTS.get(request)
        if do is None:
            raise RequestError(f"no request {request!r}; there are {', '.join(_REQUESTS)}")
        message = do(self, job, **(args or {}))
        self._after_change()
        return {"message": message}

    def _job(self, job_id: str) -> HostedJob:
        if job_id not in self._jobs:
            raise UnknownJobError(f"job {job_id} is not on this cluster")
        return self._jobs[job_id]

    # --- requests ---

    def _stop(self, job: HostedJob, now: bool = False) -> str:
        job.handle(s.StopAsked(now=now))
        return "stopped" if now else "stops at the next step boundary, with a checkpoint"

    def _pause(self, job: HostedJob) -> str:
        job.handle(s.PauseAsked())
        return "pauses at the next step boundary; its workers keep the state"

    def _resume(self, job: HostedJob) -> str:
        job.handle(s.ResumeAsked())
        return "goes on"

    def _scale(self, job: HostedJob, min: int | None = None, max: int | None = None) -> str:
        low = job.state.min_workers if min is None else min
        high = job.state.max_workers if max is None else max
        if not 1 <= low <= high:
            raise RequestError(f"workers min={low}, max={high}: they must obey 1 <= min <= max")
        self._check_capacity(low, "Nothing was changed")
        job.handle(s.BoundsChanged(min_workers=low, max_workers=high))
        self._allocate()
        return f"trains on {low} to {high} workers from now on"

    def _checkpoint(self, job: HostedJob) -> str:
        ranked = job.state.in_phase("ranked")
        if not ranked:
            raise RequestError("no rank is training now, so there is nothing new to save")
        for member in ranked:
            job._send(member.trainer, {"op": "checkpoint"})
        return "saves at the next step boundary"

    def _preempt(self, job: HostedJob, worker: str | None = None, notice_s: float = 120.0) -> str:
        facts = self._victim(job, worker)
        facts.leaves_at = time.time() + notice_s
        job.log(events.PreemptionNoticed, worker=facts.name, deadline=facts.leaves_at)
        job.handle(s.WorkerNoticed(worker=facts.name))
        self._allocate()
        return f"{facts.name} has {notice_s:g} s; it leaves at the next step boundary"

    def _kill(self, job: HostedJob, worker: str | None = None) -> str:
        facts = self._victim(job, worker)
        job.log(
            events.LogLine, level="warning", worker="", text=f"{facts.name} is killed on request"
        )
        self._nodes.kill(facts.name)
        return f"{facts.name} (process {facts.pid}) was killed"

    def _victim(self, job: HostedJob, worker: str | None) -> WorkerFacts:
        """Return the worker that was named, or the last rank's."""
        ranked = [
            m.worker
            for m in job.state.in_phase("ranked")
            if not m.leaving and m.worker in self._workers
        ]
        if worker is None and not ranked:
            raise RequestError("no worker is training now")
        name = ranked[-1] if worker is None else worker
        if name not in self._workers or job.state.of_worker(name) is None:
            known = ", ".join(m.worker for m in job.state.members.values()) or "none"
            raise RequestError(f"no worker {name!r} in this job; there are: {known}")
        return self._workers[name]


_REQUESTS: dict[str, Callable[..., str]] = {
    "stop": Coordinator._stop,
    "pause": Coordinator._pause,
    "resume": Coordinator._resume,
    "scale": Coordinator._scale,
    "checkpoint": Coordinator._checkpoint,
    "preempt": Coordinator._preempt,
    "kill": Coordinator._kill,
}


def _answering(handler: Handler) -> Handler:
    """Turn what goes wrong into an answer: the caller gets words, not a pickled traceback."""

    async def answer(**arguments: Any) -> dict[str, Any]:
        try:
            return await handler(**arguments)
        except RequestError as exc:
            return {"error": exc.kind, "message": str(exc)}
        except Exception as exc:
            logger.exception("a request failed")
            return {"error": type(exc).__name__, "message": str(exc)}

    return answer
