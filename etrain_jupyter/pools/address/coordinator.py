"""Coordinator as a guest in a scheduler that others started and keep using.

It is idle while no job and no service is active: it does not tick, and the supervisors send no
heartbeats and keep no spare trainer::

    _submit --> _wake: _work is set,           ticks until no job or service is active, and all
                WakeSupervisor to all    --->  logs and reports are written  -->  _rest: _work is
                                                                                  cleared, all rest

If it fails, it must not take down the scheduler's workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path
from typing import Any

from distributed import Scheduler
from distributed.comm.addressing import get_address_host

from etrain_jupyter import __version__
from etrain_jupyter.head.coordinator import clock
from etrain_jupyter.head.coordinator.coordinator import TICK_S, Coordinator
from etrain_jupyter.head.coordinator.nodes import NoNodes
from etrain_jupyter.head.coordinator.requests import RequestError
from etrain_jupyter.head.coordinator.services import Handler
from etrain_jupyter.head.jobs.hosted_job import HostedJob
from etrain_jupyter.head.jobs.job_spec import JobSpec
from etrain_jupyter.log.events import LogLine
from etrain_jupyter.pools.address.guest import UNFIT
from etrain_jupyter.wire import messages as m
from etrain_jupyter.wire import requests as q

logger = logging.getLogger("etrain.coordinator")

SILENCE_S = 60.0
"""Heartbeat timeout in seconds. It is long because other users' tasks run in the supervisor's
process, and some hold the GIL for a long time."""

ANSWER_S = 10.0
"""Timeout in seconds for workers to check whether they see a job's folder."""


class GuestNodes(NoNodes):
    """Workers of an external cluster, which the coordinator can retire but not start."""

    def __init__(self) -> None:
        self.leaving: dict[str, asyncio.Task[Any]] = {}
        """Workers that are being retired, by name."""

    def attach(self, scheduler: Scheduler) -> None:
        """Use the workers of this scheduler."""
        self._scheduler = scheduler

    def release(self, worker: str, *, drain_s: float) -> None:
        """Retire a worker: Dask moves its results elsewhere and closes it."""
        known = self._scheduler.workers.items()
        address = next((str(one) for one, state in known if str(state.name) == worker), "")
        if address and worker not in self.leaving:
            # `drain_s` has no effect here: Dask has no deadline for a retirement.
            retire = self._scheduler.retire_workers(workers=[address], close_workers=True)
            task = asyncio.get_running_loop().create_task(retire)
            self.leaving[worker] = task
            task.add_done_callback(lambda done: self._note_end(worker, done))

    def _note_end(self, worker: str, task: asyncio.Task[Any]) -> None:
        self.leaving.pop(worker, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("worker %s did not retire: %s", worker, error)


class GuestCoordinator(Coordinator):
    """Run our jobs on the scheduler's existing workers."""

    idempotent = True
    """Dask keeps the registered coordinator when a second notebook sends its own."""

    def __init__(self, *, cluster_id: str) -> None:
        # Created here and attached later, because the scheduler is known only at registration.
        self._guests = GuestNodes()
        super().__init__(
            self._guests, cluster_id=cluster_id, on_shutdown=lambda: None, silence_s=SILENCE_S
        )
        self._unfit: dict[str, str] = {}
        """Reasons why workers cannot train, by name."""
        self._work = asyncio.Event()

    def __reduce__(self) -> tuple[Any, ...]:
        """Create a new coordinator in the receiving process, because each needs an event loop."""
        return _make, (self._cluster_id,)

    def register(self, scheduler: Scheduler) -> None:
        """Register it with a running scheduler."""
        super().register(scheduler)
        self._guests.attach(scheduler)

    def _handlers(self) -> dict[type[q.Request[Any]], Handler]:
        return super()._handlers() | {
            q.SubmitJob: self._submit,
            q.DescribeCluster: self._describe,
            q.ShutDownCluster: self._down,
            q.RemoveCoordinator: self._uninstall,
            q.ListNodes: self._list_nodes,
            q.WantWorkers: self._want,
            q.ReleaseWorker: self._release,
        }

    # --- idle without jobs ---

    async def _tick_often(self) -> None:
        while True:
            await self._work.wait()
            await asyncio.sleep(TICK_S)
            with self._defects.watch(None, "a tick"):
                self.tick()
            # Stop ticking only when all logs are written and all messages are acknowledged: no
            # later event would start the ticks again.
            is_behind = any(job.job_log.is_behind for job in self._jobs.values())
            if not (self._has_work or is_behind) and self._acknowledgements.is_empty:
                self._rest()

    @property
    def _has_work(self) -> bool:
        return bool(self._jobs.active()) or any(one.is_active for one in self._services)

    def tick(self) -> None:
        """Run due actions, and mark a scheduler with jobs as busy, as they are not Dask tasks."""
        super().tick()
        if self._has_work:
            # Otherwise `idle_timeout` or an adaptive cluster would shut the scheduler down during a
            # job.
            self._scheduler.idle_since = None

    def valid_workers_downscaling(self, scheduler: Scheduler, workers: list[Any]) -> list[Any]:
        """Return the workers that Dask may close on its own, because no job uses them."""
        return [state for state in workers if not self.is_busy(str(state.name))]

    def _wake(self) -> None:
        if self._work.is_set():
            return
        self._work.set()
        now = clock.now()
        # The roster treats the time without ticks as a suspension of this process, so it does not
        # count towards heartbeat timeouts.
        self._workers.tick(now)
        for facts in self._workers:
            self._workers.hear(facts.address, now)  # it sent no heartbeats while it was idle
        self._supervisors.send_to_each(m.WakeSupervisor())

    def _rest(self) -> None:
        self._work.clear()
        self._supervisors.send_to_each(m.RestSupervisor())

    # --- workers ---

    def _greet(self, hello: m.SupervisorHello, worker: str, now: float) -> None:
        super()._greet(hello, worker, now)
        # None if this incarnation is fenced: it stays unfit and idle.
        facts = self._workers.hear(worker, now)
        if facts is not None:
            self._unfit.pop(facts.name, None)
            if self._work.is_set():
                self._supervisors.send_to(facts.name, m.WakeSupervisor())

    def log_event(self, topic: str, msg: Any) -> None:
        """Record that a worker cannot train. Called by the scheduler for all its events."""
        if topic != UNFIT:
            return
        self._unfit[msg["name"]] = msg["why"]
        for job in self._jobs.active():
            _log_unfit(job, msg["name"], msg["why"])

    def remove_worker(
        self, scheduler: Scheduler, worker: str, **values: Any
    ) -> Awaitable[None] | None:
        """Handle a worker's closed connection. Called by the scheduler, which awaits the result."""
        # Forget the reasons for workers that are gone, because a new one of the same name may fit.
        present = {str(state.name) for state in scheduler.workers.values()}
        self._unfit = {name: why for name, why in self._unfit.items() if name in present}
        return super().remove_worker(scheduler, worker, **values)

    # --- requests of kernels ---

    async def _submit(self, request: q.SubmitJob) -> q.Submitted:
        job = request.job
        # If `place` is set, the run is stored in a bucket, so a shared folder is not needed.
        if not job.get("place"):
            await self._check_folder(str(job["run_dir"]))
        self._wake()
        reply = await self._kernel_requests.submit(request)
        if job["job_id"] not in self._jobs:
            return reply  # the kernel must first send the job's bundle
        for name, why in self._unfit.items():
            _log_unfit(self._jobs[job["job_id"]], name, why)
        return reply

    async def check_submission(self, folder: Path) -> None:
        """Start ticking, or refuse a service's jobs because a machine does not see the folder."""
        await self._check_folder(str(folder))
        self._wake()
        await super().check_submission(folder)

    async def host_job(self, spec: JobSpec) -> None:
        """Start or resume a job of a service."""
        await super().host_job(spec)
        for name, why in self._unfit.items():
            _log_unfit(self._jobs[spec.job_id], name, why)

    async def _check_folder(self, folder: str) -> None:
        """Refuse jobs whose folder exists only on the notebook's machine."""
        from os.path import isdir

        import cloudpickle

        # The notebook has created the folder. Check before `HostedJobs.open` creates it on another
        # disk.
        without_folder = [] if isdir(folder) else ["the scheduler"]
        workers = [facts.address for facts in self._workers]
        # The Dask RPC behind `Client.run`; a worker that has just left does not respond.
        request_to_run = {
            "op": "run",
            "function": cloudpickle.dumps(isdir),
            "args": cloudpickle.dumps((folder,)),
        }
        answers: dict[str, Any] = {}
        with contextlib.suppress(TimeoutError):
            # Workers that do not respond in time are not refused, because they may just be busy.
            async with asyncio.timeout(ANSWER_S):
                answers = await self._scheduler.broadcast(
                    msg=request_to_run, workers=workers, on_error="ignore"
                )
        without_folder += [
            facts.name
            for facts in self._workers
            if (answer := answers.get(facts.address)) and not answer.get("result")
        ]
        if without_folder:
            raise RequestError(
                f"the folder {folder} does not exist on {', '.join(without_folder)}: the log "
                "and the checkpoints would be split over several disks. Nothing was submitted. Set "
                "ETRAIN_RUNS to a folder that all machines share, or to s3://BUCKET/PREFIX."
            )

    async def _describe(self, request: q.DescribeCluster) -> q.ClusterFacts:
        facts = await self._kernel_requests.describe(request)
        return replace(facts, version=__version__, unfit=dict(self._unfit))

    async def _list_nodes(self, request: q.ListNodes) -> q.NodeList:
        return q.NodeList(nodes=tuple(self._node_of(state) for state in self._fit()))

    def _fit(self) -> list[Any]:
        found = self._scheduler.workers.values()
        return [state for state in found if str(state.name) not in self._unfit]

    def _node_of(self, state: Any) -> dict[str, Any]:
        name = str(state.name)
        facts = self._workers.get(name)
        status = "running" if facts else "starting"
        if name in self._guests.leaving or (facts and facts.leaves_at):
            status = "draining"
        return {
            "worker": name,
            "state": status,
            "pid": facts.pid if facts else 0,
            "device": facts.device if facts else "",
            "zone": get_address_host(state.address),
        }

    async def _want(self, request: q.WantWorkers) -> q.WorkersPresent:
        logger.info(
            "%d workers requested (%s); etrain does not start workers on this cluster",
            request.count,
            request.reason,
        )
        return q.WorkersPresent(num_present=len(self._fit()))

    async def _release(self, request: q.ReleaseWorker) -> q.Done:
        worker, drain_s = request.worker, request.drain_s
        facts = self._workers.get(worker)
        jobs = [job for job in self._jobs.active() if job.state.of_worker(worker) is not None]
        if jobs:
            # Treat the release like an interruption notice, so that the ranks leave at a
            # step boundary and the state is copied.
            self._injector.give_notice(worker, drain_s)
            return q.Done()
        if facts is not None:
            facts.leaves_at = clock.now() + drain_s  # no longer assigned to jobs
        self._guests.release(worker, drain_s=drain_s)
        return q.Done()

    async def _down(self, request: q.ShutDownCluster) -> q.ShuttingDown:
        await self._kernel_requests.save_and_stop(request)
        return q.ShuttingDown()

    async def _uninstall(self, request: q.RemoveCoordinator) -> q.Done:
        """Restore the scheduler's handlers and plugins."""
        scheduler = self._scheduler
        # Stop ticking and upload the last logs before the handlers are removed.
        await self.close()
        for handled in self._handlers():
            scheduler.handlers.pop(handled.op, None)
        # Without a handler, Dask would close the connection on a message that is still in flight.
        scheduler.stream_handlers["etrain_report"] = _ignore
        scheduler.remove_plugin(self.name)
        return q.Done()


def _make(cluster_id: str) -> GuestCoordinator:
    return GuestCoordinator(cluster_id=cluster_id)


def _log_unfit(job: HostedJob, name: str, why: str) -> None:
    job.log(LogLine, level="warning", worker=name, text=f"worker {name} cannot train: {why}")


def _ignore(**_: Any) -> None:
    """Drop a late message from a supervisor that has ended."""
