"""Coordinator: a Dask scheduler plugin that owns the jobs and carries out what ``rules`` decide."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from distributed import Scheduler, SchedulerPlugin

from etrain_jupyter.head.coordinator import clock
from etrain_jupyter.head.coordinator.bundles import HeadBundles
from etrain_jupyter.head.coordinator.defects import Defects
from etrain_jupyter.head.coordinator.fault_injection import Injector
from etrain_jupyter.head.coordinator.hosted_jobs import HostedJobs
from etrain_jupyter.head.coordinator.kernel_requests import KernelRequests
from etrain_jupyter.head.coordinator.modes import Recovering, Serving
from etrain_jupyter.head.coordinator.nodes import JobProgress, NodeCost, NodeSource
from etrain_jupyter.head.coordinator.notices import Notices
from etrain_jupyter.head.coordinator.requests import JobRequests
from etrain_jupyter.head.coordinator.roster import MachineFacts, WorkerRoster
from etrain_jupyter.head.coordinator.services import Handler, load_services
from etrain_jupyter.head.coordinator.sharing import Sharing
from etrain_jupyter.head.coordinator.supervisors import Acknowledgements, Supervisors
from etrain_jupyter.head.interfaces import HeadCoordinator
from etrain_jupyter.head.jobs.costs import CostLog
from etrain_jupyter.head.jobs.hosted_job import HostedJob
from etrain_jupyter.head.jobs.job_records import JobRecords
from etrain_jupyter.head.jobs.job_spec import JobSpec
from etrain_jupyter.log import events
from etrain_jupyter.rules.costs import rates_by_type
from etrain_jupyter.rules.membership import stimuli as s
from etrain_jupyter.rules.sizing.step_time import exchange_of
from etrain_jupyter.wire import messages as m
from etrain_jupyter.wire import requests as q

TICK_S = 0.25

HANG_S = 30.0
"""Seconds without progress after which ranks count as hung, unless ``ETRAIN_HANG_S`` is set."""

SILENCE_S = 10.0
"""Supervisor heartbeat timeout in seconds, unless ``ETRAIN_SILENCE_S`` is set. Dask would need
minutes to detect a machine that vanished without closing its connections."""

MANY_WORKERS = 100
REMOVAL_DELAY_S = 1.0
"""Delay in seconds before Dask finishes a removal in a cluster of more than ``MANY_WORKERS``."""


class Coordinator(SchedulerPlugin, HeadCoordinator):
    """Run the jobs of one cluster. Everything happens on the scheduler's event loop.

    Its mode is normally ``Serving``. After the death of the previous scheduler, the mode is
    ``Recovering`` until it is known which workers are in use.
    """

    name = "etrain-coordinator"

    def __init__(
        self,
        nodes: NodeSource,
        *,
        cluster_id: str,
        on_shutdown: Callable[[], None],
        silence_s: float = SILENCE_S,
    ) -> None:
        self._nodes = nodes
        self._cluster_id = cluster_id
        self.halted = ""
        """Why the pool starts no more workers; empty if it still may."""
        silence_s = float(os.environ.get("ETRAIN_SILENCE_S", silence_s))
        self._hang_s = float(os.environ.get("ETRAIN_HANG_S", HANG_S))
        self._defects = Defects()
        self._costs = CostLog()
        records = JobRecords()
        self._acknowledgements = Acknowledgements(records)
        self._workers = WorkerRoster(silence_s=silence_s, tick_s=TICK_S)
        self._machines = MachineFacts(nodes, self._workers)
        self._supervisors = Supervisors(self._workers, self._acknowledgements, self.warn)
        self._jobs = HostedJobs(self._host, records, self._defects)
        self._services = load_services(self)
        active = self._jobs.active
        self._sharing = Sharing(nodes, self._workers, active, services=self._services)
        self._notices = Notices(self._workers, active, self.allocate, nodes)
        self._injector = Injector(nodes, self._workers, self._notices)
        self._requests = JobRequests(
            nodes=nodes, roster=self._workers, injector=self._injector, allocate=self.allocate
        )
        self._serving = Serving(
            active=active,
            roster=self._workers,
            sharing=self._sharing,
            notices=self._notices,
            injector=self._injector,
            acknowledgements=self._acknowledgements,
            costs=self._costs,
            defects=self._defects,
            send_to=self._supervisors.send_to,
        )
        self._mode: Serving | Recovering = self._serving
        self._kernel_requests = KernelRequests(
            cluster=self,
            cluster_id=cluster_id,
            on_shutdown=on_shutdown,
            jobs=self._jobs,
            services=self._services,
            roster=self._workers,
            machines=self._machines,
            requests=self._requests,
            bundles=HeadBundles(lambda: (job.spec for job in active())),
            defects=self._defects,
        )
        self._ticked_at: float | None = None
        self._ticker: asyncio.Task[None] | None = None

    def _host(self, spec: JobSpec, **more: Any) -> HostedJob:
        return HostedJob(
            spec=spec,
            send_to=self._supervisors.send_to,
            send_all=self._supervisors.send_all,
            describe_worker=self._machines.describe,
            before_end=self._costs.report_final,
            on_events=self._report_to_services,
            defects=self._defects,
            hang_s=self._hang_s,
            **more,
        )

    # --- start and end ---

    def replay(self, folder: Path, *, died_at: float) -> None:
        """Keep records in a folder, and take over what the previous scheduler ran."""
        replayed = self._jobs.replay(folder)
        if replayed:
            self._mode = Recovering(died_at, replayed)
        for service in self._services:
            service.replay(folder)

    async def start(self, scheduler: Scheduler) -> None:
        """Register the handlers and start ticking. Called by the scheduler."""
        self.register(scheduler)
        self._ticker = asyncio.create_task(self._tick_often())

    def register(self, scheduler: Scheduler) -> None:
        """Register the handlers with a scheduler that may not have started yet."""
        self._scheduler = scheduler
        self._supervisors.attach(scheduler)
        scheduler.stream_handlers["etrain_report"] = self._receive
        for request, handler in self._handlers().items():
            scheduler.handlers[request.op] = q.handler_of(request, handler)

    def _handlers(self) -> dict[type[q.Request[Any]], Handler]:
        return self._kernel_requests.handlers()

    async def close(self) -> None:
        """Stop ticking, and upload the logs of ended jobs. Called as the scheduler closes."""
        for service in self._services:
            await service.close()
        if self._ticker is not None:
            self._ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticker
        self._kernel_requests.bundles.close()
        await self._jobs.close()

    async def _tick_often(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            with self._defects.watch(None, "a tick"):
                self.tick()

    def tick(self) -> None:
        """Do everything that is due: logs, acknowledgements, timeouts, decisions."""
        # Write the logs first, so that reports are acknowledged in the same tick. Advance the
        # roster's clock before checking timeouts, so that no worker is evicted because this process
        # was suspended.
        now = clock.now()
        for service in self._services:
            service.start()
        self._jobs.write_logs()
        self._supervisors.acknowledge(now)
        asleep_s = self._workers.tick(now)
        with self._defects.watch(None, "taking jobs over"):
            self._end_recovery()
        self._drop_silent(now)
        passed_s = now - self._ticked_at if self._ticked_at is not None else 0.0
        self._ticked_at = now
        self._supervisors.pace_heartbeats()
        self._machines.forget()
        if self._mode is self._serving:
            self._serving.share_newcomers()
        for job in self._mode.deciding_jobs():
            with self._defects.watch(job, "a tick"):
                # Trainers that wait for the log to become writable are not hung. Treat the time
                # since the last tick as if this process had been suspended, so that it does not
                # count towards the hang timeout.
                is_stuck = self._workers.is_stuck(job.workers())
                job.handle(s.Tick(asleep_s=passed_s if is_stuck and not asleep_s else asleep_s))
                self._injector.tick(job)
        self.free_ended()
        if self._mode is self._serving and self._sharing.review_sizes():
            self.allocate()
        self._sharing.hand_back_noticed()

    # --- called by the pool ---

    def take_costs(self, costs: Sequence[NodeCost]) -> None:
        """Share the nodes' costs among the jobs, and log them."""
        self._mode.take_costs(costs)

    def take_notice(self, worker: str, leaves_at: float) -> None:
        """Handle the pool's notice that it will terminate a machine at ``leaves_at`` (epoch)."""
        facts = self._workers.get(worker)
        if facts is not None:
            self._notices.interrupt(facts, left_s=leaves_at - time.time())

    def warn(self, text: str) -> None:
        """Log a warning for each active job."""
        self._jobs.log_all("warning", text)

    def note(self, text: str) -> None:
        """Log a line about the pool's progress for each active job."""
        self._jobs.log_all("info", text)

    def halt(self, why: str) -> None:
        """Save and stop all jobs, and refuse new ones, because the pool starts no more workers."""
        if self.halted:  # the pool may report further reasons
            return
        self.halted = why
        what = "The job saves a checkpoint and stops. To continue from it, use %etrain resume"
        self.warn(f"{why.rstrip('.')}. {what}.")
        # During a recovery, the jobs do not know their trainers yet. Stopping a job now would end
        # it without a checkpoint, while its trainers keep training. `_end_recovery` stops the jobs
        # later.
        if self._mode is self._serving:
            self._stop_all()
        self.free_ended()

    def _stop_all(self) -> None:
        for service in self._services:
            service.stop_all(self.halted)
        self._jobs.stop_all()

    def is_busy(self, worker: str) -> bool:
        """Return whether a job uses this worker; the pool may release the others as surplus."""
        return self._mode.is_busy(worker)

    def progress(self) -> list[JobProgress]:
        """Return the progress of all active jobs that are not about to end."""
        return [report_progress(job) for job in self._jobs.active() if not job.state.outcome]

    def idle_s(self) -> float:
        """Return the seconds since the last job ended; 0.0 while a job or its upload is active."""
        return 0.0 if any(one.is_active for one in self._services) else self._jobs.idle_s()

    # --- workers ---

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: Any) -> Awaitable[None] | None:
        """Handle a worker's closed connection. Called by the scheduler, which awaits the result."""
        # None for an evicted worker, because its loss was handled when it was evicted.
        facts = self._supervisors.remove(worker)
        if facts is not None:
            cause = "preempted" if facts.leaves_at else f"worker process {facts.pid} is gone"
            is_used = self._mode.is_busy(facts.name)
            self._mode.lose(facts, cause)
            # Next, the scheduler notifies all other workers, which matters only to Dask's own
            # tasks. In a large cluster, that would delay the next generation by a sixth.
            if is_used and len(self._workers) > MANY_WORKERS:
                return asyncio.sleep(REMOVAL_DELAY_S)
        return None

    def _drop_silent(self, now: float) -> None:
        """Evict workers whose heartbeats have timed out, even if their connections are open."""
        # ::
        #
        #     worker          (network partition) ─────────── back: heartbeat ──▶
        #     coordinator       10 s: evict, kill; the jobs      ResetSupervisor ──▶
        #                       continue without it
        #
        # The kill works only if the pool can reach the machine, for example through a cloud's API.
        for facts, silence_s in self._workers.evict_silent(now):
            with self._defects.watch(None, f"killing {facts.name}"):
                self._nodes.kill(facts.name)
            self._mode.lose(facts, f"no heartbeat for {silence_s:.1f} s", detected_s=silence_s)

    def _receive(self, message: Any, worker: str) -> None:
        """Handle a message from a supervisor; ``worker`` is its address. Called by Dask."""
        # Never raise: Dask would close the connection, and the worker would shut down.
        with self._defects.watch(None, f"reading a message of {worker}"):
            decoded = self._supervisors.decode(message, worker)
            if decoded is None:
                return
            job = self._jobs.get(decoded.job_id) if isinstance(decoded, m.TrainerReport) else None
            with self._defects.watch(job, f"handling {type(decoded).__name__} of {worker}"):
                self._handle(decoded, worker)

    def _handle(self, message: m.FromSupervisor | m.AnyReport, worker: str) -> None:
        now = clock.now()
        if isinstance(message, m.SupervisorHello):
            self._greet(message, worker, now)
            return
        known = self._workers.hear(worker, now)
        if known is None:  # evicted, or no hello yet: its reports must not be handled
            self._supervisors.reset(worker)
        elif isinstance(message, m.Heartbeat):
            known.is_stuck = message.is_stuck
            # During a recovery no job has trainers yet, so a progress message would have no effect.
            for trainer, page in message.trainers.items():
                job = self._serving.job_of(trainer, known)
                if job is not None:
                    job.take_progress(trainer, page)
        else:
            self._mode.take(message, known)
            if isinstance(self._mode, Recovering):
                return  # the message is held until then
        self.free_ended()

    def _greet(self, hello: m.SupervisorHello, worker: str, now: float) -> None:
        facts = self._supervisors.greet(hello, worker, now)
        if facts is not None:
            self._mode.greet(facts.name, hello.trainers)

    def _end_recovery(self) -> None:
        """Serve again once all workers are back, or the reconnect timeout has expired."""
        recovery = self._mode
        if not isinstance(recovery, Recovering):
            return
        # A pool without a known capacity cannot list its workers, because they are managed
        # elsewhere, or their machines have not been adopted yet.
        alive = None
        if self._nodes.capacity() is not None:
            alive = {node["worker"] for node in self._nodes.nodes()}
        if recovery.is_over(alive):
            # Set the mode first, because the handover handles reports, which may cause workers to
            # be allocated.
            self._mode = self._serving
            recovery.hand_over(self._serving)
            if self.halted:
                self._stop_all()

    def free_ended(self) -> None:
        """Free the resources of ended jobs, and redistribute the workers if necessary."""
        ended = self._jobs.settle()
        active = self._jobs.active()
        for job in ended:
            digest = job.spec.bundle_digest
            # Jobs with the same objects share a bundle.
            if all(other.spec.bundle_digest != digest for other in active):
                self._supervisors.send_to_each(m.RemoveBundle(digest=digest))
            self._costs.end(job)
            self._injector.end_chaos(job)
        # A job that was about to end and continues after all (``Turn.train_on``) has no workers
        # assigned.
        if ended or any(not j.state.assigned and not j.state.outcome for j in active):
            self.allocate()

    def allocate(self) -> None:
        """Share the workers among the jobs."""
        self._mode.allocate()

    def check_request(self, job: HostedJob) -> None:
        """Raise a ``RequestError`` while a job is being taken over."""
        self._mode.check_request(job)

    # --- services ---

    def _report_to_services(self, job_id: str, new: Sequence[events.Event]) -> None:
        for service in self._services:
            # Log exceptions here, so that the job still handles its report.
            with self._defects.watch(None, f"passing events of {job_id} to a plug-in"):
                service.take_events(job_id, new)

    @property
    def is_ready(self) -> bool:
        """False while the workers of the previous scheduler reconnect; see ``ServiceHost``."""
        return self._mode is self._serving

    @property
    def capacity(self) -> int:
        """Number of workers that can train at the same time without slowing each other down."""
        return self._sharing.capacity()

    async def check_submission(self, folder: Path) -> None:
        """Raise a ``RequestError`` if the pool starts no more workers."""
        self._kernel_requests.check_halted()

    def find_job(self, job_id: str) -> HostedJob | None:
        """Return a job of this scheduler, even one that has ended."""
        return self._jobs.get(job_id)

    async def host_job(self, spec: JobSpec) -> None:
        """Start or resume a job of a service."""
        await self._jobs.open(spec)
        self.allocate()

    def after_change(self) -> None:
        """Free the resources of ended jobs, and share the workers again."""
        self.free_ended()
        self.allocate()


def report_progress(job: HostedJob) -> JobProgress:
    """Return the job's progress, for a pool that plans for deadlines."""
    record, state = job.record, job.state
    plan, gradient_bytes = record.plan, 0.0
    if plan is not None and plan.num_parameters:
        gradient_bytes = exchange_of(
            num_parameters=plan.num_trained_parameters,
            compression=str(job.spec.config.get("compression") or "none"),
            passes=1,
        ).num_bytes
    return JobProgress(
        job_id=state.job_id,
        attempt_at=record.attempt_at,
        first_step=record.attempt_step,
        step=record.step,
        total_steps=record.total_steps if record.is_planned else 0,
        num_workers=state.members.num_in("ranked") if state.status == "running" else 0,
        min_workers=state.min_workers,
        max_workers=job.tuning.wanted_workers(state),
        is_paused=state.status == "paused",
        gradient_bytes=gradient_bytes,
        steps_per_s=1 / record.step_s if record.step_s else 0.0,
        type_rates=rates_by_type(record.work) if job.spec.splits_by_speed else {},
    )
