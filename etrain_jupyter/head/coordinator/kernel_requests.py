"""Handlers for the requests that kernels send to the scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from etrain_jupyter.head.coordinator.bundles import HeadBundles
from etrain_jupyter.head.coordinator.defects import Defects
from etrain_jupyter.head.coordinator.hosted_jobs import HostedJobs
from etrain_jupyter.head.coordinator.requests import JobRequests, RequestError
from etrain_jupyter.head.coordinator.roster import MachineFacts, WorkerRoster
from etrain_jupyter.head.coordinator.services import Handler, Service
from etrain_jupyter.head.jobs.hosted_job import HostedJob
from etrain_jupyter.head.jobs.job_spec import JobSpec
from etrain_jupyter.wire import requests as q

COALESCE_S = 0.05
"""Minimum interval in seconds between replies with new events, so that each carries several."""


class Cluster(Protocol):
    """The part of the coordinator that handlers need."""

    halted: str
    """Why the pool starts no more workers; empty if it still may."""

    @property
    def is_ready(self) -> bool:
        """False while a restarted scheduler waits for its workers."""

    def check_request(self, job: HostedJob) -> None:
        """Raise a ``RequestError`` while a job cannot take requests."""

    def idle_s(self) -> float:
        """Return the seconds since the last job ended; 0.0 while a job or a service is active."""

    def allocate(self) -> None:
        """Share the workers among the jobs."""

    def free_ended(self) -> None:
        """Free the resources of ended jobs, and redistribute the workers if necessary."""


@dataclass(kw_only=True)
class KernelRequests:
    """Handle the requests of kernels; each handler raises ``RequestError`` for a refusal."""

    cluster: Cluster
    cluster_id: str
    on_shutdown: Callable[[], None]
    """Shuts down the scheduler's process."""
    jobs: HostedJobs
    services: Sequence[Service]
    roster: WorkerRoster
    machines: MachineFacts
    requests: JobRequests
    """Carries out a user's requests for an active job."""
    bundles: HeadBundles
    defects: Defects
    _sent_at: dict[str, float] = field(default_factory=dict, init=False)
    """Last reply with events, by job, on the event loop's clock."""

    def handlers(self) -> dict[type[q.Request[Any]], Handler]:
        """Return the handler for each kind of request."""
        of_services = {
            kind: handler for one in self.services for kind, handler in one.handlers().items()
        }
        return of_services | {
            q.SubmitJob: self.submit,
            q.PutBundle: self.put_bundle,
            q.FetchBundle: self.read_bundle,
            q.ListJobs: self.list_jobs,
            q.FetchEvents: self.fetch_events,
            q.ControlJob: self.control,
            q.ListWorkers: self.list_workers,
            q.DescribeCluster: self.describe,
            q.ShutDownCluster: self.shut_down,
        }

    async def submit(self, request: q.SubmitJob) -> q.Submitted:
        """Start or resume a job, once its bundle is here."""
        spec = JobSpec.from_message(request.job)
        known = self.jobs.get(spec.job_id)
        if known is not None and not (spec.resumes and known.state.is_ended):
            raise RequestError(
                f"job {spec.job_id} is already on this cluster: it is {known.state.status} at "
                f"step {known.state.step}. Nothing was submitted. Follow it with %etrain attach, "
                "or stop it with %etrain stop, which saves a checkpoint, and then resume it."
            )
        self.check_halted()
        self.requests.check_capacity(spec.min_workers, "Nothing was submitted")
        if not await self.bundles.is_here(spec):
            return q.Submitted(wants_bundle=True)
        try:
            await self.jobs.open(spec)
        except OSError as exc:
            raise RequestError(
                f"{exc.filename or spec.run_dir} cannot be written: {exc.strerror or exc}. "
                "Nothing was submitted. Free space there, or set ETRAIN_RUNS to another folder "
                "and restart the kernel"
            ) from exc
        self.cluster.allocate()
        return q.Submitted(job_id=spec.job_id)

    def check_halted(self) -> None:
        """Refuse a submission to a pool that starts no more workers."""
        if self.cluster.halted:
            raise RequestError(
                f"{self.cluster.halted}. Nothing was submitted. Shut down the pool with "
                "%etrain down"
            )

    async def put_bundle(self, request: q.PutBundle) -> q.Done:
        """Store a piece of a job's bundle."""
        await self.bundles.put(JobSpec.from_message(request.job), request.offset, request.data)
        return q.Done()

    async def read_bundle(self, request: q.FetchBundle) -> q.BundlePiece:
        """Return a piece of a job's bundle; workers send this request."""
        return q.BundlePiece(data=await self.bundles.read(request.digest, request.offset))

    async def list_jobs(self, request: q.ListJobs) -> q.JobList:
        """Return a summary of each job."""
        return q.JobList(jobs=tuple(_summarize(job) for job in self.jobs.values()))

    async def fetch_events(self, request: q.FetchEvents) -> q.EventBatch:
        """Return a job's new events as soon as there are some, or none after ``wait_s``."""
        job_id, since, wait_s = request.job_id, request.since, request.wait_s
        job = self.jobs.find(job_id)
        # A log that is behind also wakes waiting kernels, so that they receive ``trouble``.
        if job.job_log.last_seq <= since and not job.has_reported_end:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(job.job_log.changed.wait(), min(wait_s, 60.0))
        if wait_s and job.job_log.last_seq - since < request.limit:
            await self._collect_events(job_id)
        trouble = job.job_log.trouble
        if trouble and self.roster.is_stuck(job.workers()):
            trouble += "; training is blocked until then"
        batch = tuple(job.job_log.since(since, request.limit))
        return q.EventBatch(events=batch, status=job.state.status, trouble=trouble)

    async def _collect_events(self, job_id: str) -> None:
        """Wait until a job's next batch of events is due; all waiting kernels get the same one."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._sent_at.get(job_id, -math.inf) + COALESCE_S - loop.time())
        if loop.time() >= self._sent_at.get(job_id, -math.inf) + COALESCE_S:
            self._sent_at[job_id] = loop.time()

    async def list_workers(self, request: q.ListWorkers) -> q.WorkerList:
        """Return one record for each worker of a job."""
        records = _list_members(self.jobs.find(request.job_id))
        for record in records:
            facts = self.roster.get(record["worker"])
            record["address"] = facts.address if facts else ""
            record["pid"] = facts.pid if facts else 0
            record |= self.machines.describe(record["worker"]) | {"device": record["device"]}
        return q.WorkerList(workers=tuple(records))

    async def control(self, request: q.ControlJob) -> q.Outcome:
        """Carry out a user's request for a job."""
        job = self.jobs.find(request.job_id)
        self.cluster.check_request(job)
        # ``HostedJob.handle`` logs exceptions in our own code instead of raising them. Count them,
        # so that a defect is not reported to the user as a success.
        num_before = self.defects.num_seen
        message = self.requests.do(job, request.request, request.args or {})
        self.cluster.free_ended()
        if self.defects.num_seen > num_before:
            raise RequestError(
                f"{request.request} may be incomplete, because of a defect in etrain-jupyter: "
                f"{self.defects.newest}. The traceback is in the scheduler's log"
            )
        return q.Outcome(message=message)

    async def describe(self, request: q.DescribeCluster) -> q.ClusterFacts:
        """Return the state of the cluster."""
        return q.ClusterFacts(
            cluster_id=self.cluster_id,
            pid=os.getpid(),
            workers=len(self.roster),
            jobs=len(self.jobs.active()),
            idle_s=self.cluster.idle_s(),
        )

    async def shut_down(self, request: q.ShutDownCluster) -> q.ShuttingDown:
        """Save and stop everything, and shut down the scheduler's process."""
        await self.save_and_stop(request)
        # Delay the shutdown, so that the reply is sent before the scheduler closes its connections.
        asyncio.get_running_loop().call_later(0.05, self.on_shutdown)
        return q.ShuttingDown()

    async def save_and_stop(self, request: q.ShutDownCluster) -> None:
        """Stop all services and jobs, each with a checkpoint if there is time for one."""
        why = f"the cluster was shut down by {request.by or 'an unknown process'}"
        deadline = time.monotonic() + request.drain_s
        # A job that is being taken over does not know its trainers yet, so it could not save.
        while not self.cluster.is_ready and time.monotonic() < deadline:
            await asyncio.sleep(COALESCE_S)
        #   StopRequested(now=False)  deadline                 StopRequested(now=True)
        #       |--- last checkpoint ----|--- if still active ------|
        for service in self.services:
            service.stop_all(why)
        self.jobs.stop_all(why)
        while not self.cluster.idle_s() and time.monotonic() < deadline:
            await asyncio.sleep(COALESCE_S)
        unsaved = f"{why}; no checkpoint was saved within {request.drain_s:g} s"
        self.jobs.stop_all(unsaved, now=True)
        self.cluster.free_ended()


def _summarize(job: HostedJob) -> dict[str, Any]:
    """Return the job's row in the list of jobs."""
    state = job.state
    plan = job.record.plan if job.record.is_planned else None
    return {
        "job_id": state.job_id,
        "name": job.spec.name,
        "status": state.status,
        "step": state.step,
        "total_steps": plan.total_steps if plan is not None else 0,
        "world_size": state.members.num_in("ranked", "reported"),
        "generation": state.generation,
        "run_dir": str(job.spec.run_dir),
    }


def _list_members(job: HostedJob) -> list[dict[str, Any]]:
    """Return one record per member: worker, rank, state, device, trainer_pid."""
    records = []
    ranks = {name: rank for rank, name in enumerate(job.messages.step_clock.ranks)}
    for member in job.state.in_phase("ranked", "reported", "warm", "starting"):
        facts = job.trainers[member.trainer]
        is_ranked = member.phase == "ranked"
        records.append(
            {
                "worker": member.worker,
                "rank": ranks.get(member.trainer) if is_ranked else None,
                "state": "training" if is_ranked else member.phase,
                "device": facts.device,
                "trainer_pid": facts.pid,
                "leaving": member.leaving,
            }
        )
    return records
