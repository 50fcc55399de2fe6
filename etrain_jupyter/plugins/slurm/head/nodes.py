"""Source of a ``slurm`` cluster's workers, in the head.

One task on the head's event loop compares the queue with the desired state, about every ``tick``
seconds. It calls SLURM's commands in threads, because they may take seconds::

    squeue  -> jobs of this cluster, found by their names
    decide  -> submit missing jobs, cancel surplus ones, notify workers near their time limit
    sbatch, scancel

The queue is the only record of the jobs, so the next scheduler, or a head that takes over, adopts
them with its first listing. SLURM's own requeueing is disabled, so a job that has ended is replaced
by a new one, whose worker has a new name.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from etrain_jupyter.head.coordinator.nodes import NodeCost
from etrain_jupyter.head.interfaces import HeadFacts
from etrain_jupyter.plugins.slurm import commands
from etrain_jupyter.plugins.slurm.commands import QueuedJob, SlurmError
from etrain_jupyter.plugins.slurm.head.plan import Limits, Plan, Slot, decide
from etrain_jupyter.plugins.slurm.head.script import LIFECYCLE, Accounts, job_class, job_script
from etrain_jupyter.plugins.slurm.site import Site
from etrain_jupyter.plugins.slurm.spec import SlurmSpec
from etrain_jupyter.pools.warning_limit import RateLimitedWarnings
from etrain_jupyter.process.files import write_private
from etrain_jupyter.process.survivors import WorkerRecords

logger = logging.getLogger(__name__)

FIRST_BACK_OFF_S, MAX_BACK_OFF_S = 5.0, 300.0
"""First and longest delay before the next submission; each failure doubles the delay."""
HEALTHY_S = 30.0
"""A job that ran for at least this many seconds is replaced without a back-off."""
CLOSE_S = 5.0
"""Timeout for cancelled jobs to leave the queue when the cluster shuts down."""
UNLISTED_S = 15.0
"""Seconds after its submission during which a job may be missing in squeue's list, which some sites
cache."""
CANCELLED = "CANCELLED AT"
"""SLURM writes this into the output of a job that it ends itself, for example by preemption."""


class SlurmNodes:
    """Submit, watch and cancel a cluster's SLURM jobs."""

    replaces_early = True
    # The replacement of a worker near its time limit starts before its notice.
    trains_after_notice = False
    finish_by_s: float | None = None

    def __init__(self, facts: HeadFacts) -> None:
        # Import dask-jobqueue now, on the main thread, because it replaces signal handlers.
        job_class()
        self._facts = facts
        self._spec = SlurmSpec.model_validate(facts.settings.spec)
        cluster = facts.cluster
        self._prefix = commands.job_name_of(cluster.cluster_id, "")
        self._site = site_of(self._spec, cluster.cluster_id)
        self._accounts = Accounts(cluster.path / "costs.json", self._spec.price)
        self._records = WorkerRecords(cluster)
        self._warnings = RateLimitedWarnings(facts.on_warning)
        self._scheduler = ""
        self._wanted = 0
        self._held = max(self._spec.workers.min, self._records.num_held())
        self._jobs: dict[str, QueuedJob] = {}  # by worker, as last listed
        self._unlisted: dict[str, float] = {}  # submission times of jobs that were never listed
        self._connected: set[str] = set()  # workers of listed jobs that have connected
        self._releasing: dict[str, float] = {}  # by worker: time (epoch) of its forced end
        self._cancelled: set[str] = set()
        self._killing: set[str] = set()
        self._killed: set[str] = set()
        self._noticed: set[str] = set()
        self._surplus_since: float | None = None
        self._num_failures = 0  # consecutive jobs whose workers never connected
        self._retry_at = 0.0
        self._halted = False
        self._is_closing = False
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self, scheduler_address: str) -> None:
        """Write the workers' files, adopt the jobs in the queue, and start the task.

        Raises:
            PoolError: If the folder or the settings cannot be used, or SLURM does not respond.
        """
        self._scheduler = scheduler_address
        await asyncio.to_thread(self._site.prepare, self._facts.cluster.tls)
        self._script("w0")  # reports settings that dask-jobqueue refuses
        self._site.publish(scheduler_address, num_lives=self._facts.incarnation)
        self._take(await self._first_list())
        # These workers may be training, so keep them until the restored jobs have requested
        # workers.
        self._wanted = len(self._jobs)
        self._task = asyncio.create_task(self._run())

    async def _first_list(self) -> list[QueuedJob]:
        while True:
            try:
                return await asyncio.to_thread(commands.list_jobs, self._prefix)
            except SlurmError as exc:
                # A later scheduler must not give up, because its workers still wait for it.
                if self._facts.incarnation == 1:
                    raise
                logger.warning("the jobs of %s are not known yet: %s", self._prefix, exc)
                await asyncio.sleep(self._spec.tick)

    # --- desired state ---

    def want(self, count: int, *, reason: str) -> None:
        """Keep ``count`` workers for the jobs, at most ``workers.max``."""
        if count != self._wanted:
            logger.info("%d workers wanted instead of %d: %s", count, self._wanted, reason)
            self._wanted = count
            self._wake.set()

    def hold(self, count: int, *, reason: str) -> None:
        """Keep at least ``count`` workers, regardless of the jobs."""
        logger.info("at least %d workers held: %s", count, reason)
        self._records.note_held(count)
        self._held = max(count, self._spec.workers.min)
        self._wake.set()

    def capacity(self) -> int | None:
        """Return ``workers.max``."""
        return self._spec.workers.max

    def note_notice(self, worker: str, *, kind: str, deadline: float = 0.0) -> None:
        """Submit a replacement of a worker that is about to leave."""
        if kind == "interruption" and worker in self._jobs:
            self._noticed.add(worker)
            self._wake.set()

    def release(self, worker: str, *, drain_s: float) -> None:
        """Cancel a worker's job once no training job uses it, or after ``drain_s`` seconds."""
        if worker in self._jobs and worker not in self._releasing:
            self._releasing[worker] = time.time() + drain_s
            self._wake.set()

    def kill(self, worker: str) -> None:
        """Kill a worker's job immediately."""
        if worker in self._jobs:
            self._killing.add(worker)
            self._wake.set()

    def reap(self) -> None:
        """Note which workers are connected, and wake the task if a released one is idle."""
        for worker in self._jobs:
            if self._facts.is_connected(worker):
                self._connected.add(worker)
                self._num_failures = 0
        if self._due():
            self._wake.set()

    # --- actual state ---

    def nodes(self) -> list[dict[str, Any]]:
        """Return one record per pending or running job, oldest first."""
        return [
            {
                "worker": worker,
                "pid": 0,
                "state": self._state_of(worker),
                "device": self._spec.device,
                "type": self._type(),
                "zone": job.node,
                "lifecycle": LIFECYCLE,
                "price_usd_per_h": self._spec.price if job.is_running else None,
            }
            for worker, job in self._jobs.items()
        ]

    def costs(self) -> Sequence[NodeCost]:
        """Return the cost of each job since the cluster started; empty without a price."""
        return self._accounts.costs(self._jobs)

    async def close(self, *, grace_s: float) -> None:
        """Cancel all jobs and remove the cluster's folder on the shared disk."""
        if self._task is not None:
            # Do not cancel the task, because a job that is being submitted would be missed below.
            self._is_closing = True
            self._wake.set()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._task, CLOSE_S)
        # Workers that lose their connection without this file shut down.
        self._site.retract()
        try:
            left = await asyncio.to_thread(
                commands.cancel_all, self._prefix, timeout_s=max(grace_s, CLOSE_S)
            )
        except SlurmError as exc:
            logger.warning("the jobs of %s were not cancelled: %s", self._prefix, exc)
            return
        if left:
            logger.warning("still in the queue: %s", [job.job_id for job in left])
        await asyncio.to_thread(self._site.remove)

    def _state_of(self, worker: str) -> str:
        if self._is_leaving(worker):
            return "draining"
        return "running" if self._facts.is_connected(worker) else "starting"

    def _is_leaving(self, worker: str) -> bool:
        return self._is_dismissed(worker) or self._jobs[worker].is_ending

    def _is_dismissed(self, worker: str) -> bool:
        return worker in self._releasing or worker in self._cancelled or worker in self._killing

    def _type(self) -> str:
        gpu = f" with {self._spec.gpu_type or 'GPU'}" if self._spec.gpus else ""
        return f"{self._spec.queue or 'SLURM'} job{gpu}"

    # --- the task ---

    async def _run(self) -> None:
        while not self._is_closing:
            try:
                await self._tick()
            except SlurmError as exc:
                self._warnings.warn(
                    "slurm", f"SLURM does not respond: {exc}. Workers keep running; retrying."
                )
            except Exception:  # top of the task: it must keep the pool at its size
                logger.exception("a look at the queue failed")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._spec.tick)
            self._wake.clear()

    async def _tick(self) -> None:
        self._take(await asyncio.to_thread(commands.list_jobs, self._prefix))
        plan = self._decide()
        for worker in plan.notices:
            # The coordinator reports back with `note_notice`.
            left_s = min(self._jobs[worker].left_s, self._spec.ahead_s)
            self._facts.on_notice(worker, time.time() + left_s)
        await self._cancel([*plan.cancels, *self._due()])
        for _ in range(plan.num_submits):
            # Check each time, because the cluster may begin to shut down, or SLURM may refuse a
            # job.
            if self._halted or self._is_closing or time.monotonic() < self._retry_at:
                break
            await self._submit()

    def _decide(self) -> Plan:
        now = time.monotonic()
        since = self._surplus_since
        facts = self._facts
        plan = decide(
            [
                Slot(
                    worker=worker,
                    left_s=job.left_s if job.is_running else float("inf"),
                    is_running=job.is_running,
                    is_connected=facts.is_connected(worker),
                    is_busy=self._may_be_busy(worker),
                    is_noticed=worker in self._noticed,
                    is_leaving=self._is_leaving(worker),
                )
                for worker, job in self._jobs.items()
            ],
            wanted=self._wanted,
            held=self._held,
            limits=Limits(
                max_workers=self._spec.workers.max,
                notice_s=self._spec.notice,
                ahead_s=self._spec.ahead_s,
            ),
            shrinks=since is not None and now - since >= self._spec.lifetime.linger,
        )
        self._surplus_since = (now if since is None else since) if plan.has_surplus else None
        return plan

    def _take(self, jobs: Sequence[QueuedJob]) -> None:
        """Compare a listing with the previous one."""
        previous, self._jobs = self._jobs, {job.worker: job for job in jobs}
        for worker, submitted_at in list(self._unlisted.items()):
            if worker in self._jobs or time.monotonic() - submitted_at > UNLISTED_S:
                del self._unlisted[worker]
            else:
                self._jobs[worker] = previous[worker]
        self.reap()
        self._accounts.record(jobs)
        for worker in previous.keys() - self._jobs.keys():
            self._forget(previous[worker])

    def _forget(self, job: QueuedJob) -> None:
        """Handle a job that has left the queue."""
        worker, was_dismissed = job.worker, self._is_dismissed(job.worker)
        has_connected = worker in self._connected
        for names in (self._cancelled, self._killing, self._killed, self._noticed, self._connected):
            names.discard(worker)
        self._releasing.pop(worker, None)
        logger.info("job %s of worker %s has ended", job.job_id, worker)
        self._facts.on_gone(worker, f"SLURM job {job.job_id} has ended")
        if was_dismissed:
            return
        if has_connected:
            if job.used_s < HEALTHY_S:
                self._back_off(1)
            return
        tail = self._site.log_tail(job.name, self._log_folder())
        # SLURM ends jobs at their time limit and by preemption, and users cancel them.
        if CANCELLED in tail:
            return
        self._num_failures += 1
        self._back_off(self._num_failures)
        why = f"SLURM job {job.job_id} of worker {worker} ended before its worker connected"
        detail = f". End of its output:\n{tail}" if tail else ""
        if self._num_failures < self._spec.lifetime.max_start_failures:
            self._warnings.warn("failed start", f"{why}; the next job is submitted soon{detail}")
        elif not self._halted:
            self._halted = True
            self._facts.on_halt(
                f"{why}, as {self._num_failures} in a row. No more jobs are submitted{detail}"
            )

    def _back_off(self, num_failures: int) -> None:
        delay_s = min(MAX_BACK_OFF_S, FIRST_BACK_OFF_S * 2.0 ** min(num_failures - 1, 10))
        # At most ten ticks, so that a test with short ticks stays short.
        self._retry_at = time.monotonic() + min(delay_s, 10 * self._spec.tick)

    def _due(self) -> list[str]:
        """Return the released workers that no training job uses, or whose time is over."""
        now = time.time()
        return [
            worker
            for worker, deadline in self._releasing.items()
            if worker not in self._cancelled and (now >= deadline or not self._may_be_busy(worker))
        ]

    def _may_be_busy(self, worker: str) -> bool:
        return self._facts.is_connected(worker) and self._facts.is_busy(worker)

    async def _cancel(self, workers: Sequence[str]) -> None:
        killing = self._killing - self._killed
        for names, signal, done in (
            (killing, "KILL", self._killed),
            (workers, "", self._cancelled),
        ):
            known = [worker for worker in dict.fromkeys(names) if worker in self._jobs]
            if known:
                logger.info("cancelling the jobs of %s %s", known, signal)
                ids = [self._jobs[worker].job_id for worker in known]
                await asyncio.to_thread(commands.cancel, ids, signal=signal)
                # Only now, so that the next tick repeats a command that has failed.
                done.update(known)

    async def _submit(self) -> None:
        """Submit one job. If SLURM refuses it, submit no more, or none for some time."""
        worker = self._next_name()
        try:
            job_id = await asyncio.to_thread(
                commands.submit, self._script(worker), folder=self._site.path
            )
        except SlurmError as exc:
            if exc.is_transient:
                self._back_off(1)
                self._warnings.warn("refused", f"{exc}. No job was submitted; retrying.")
            else:
                self._halted = True
                self._facts.on_halt(
                    f"SLURM refuses this pool's jobs: {exc}. Correct its entry in pools.yaml"
                )
            return
        logger.info("submitted job %s for worker %s", job_id, worker)
        self._unlisted[worker] = time.monotonic()
        self._jobs[worker] = QueuedJob(
            job_id=job_id,
            name=commands.job_name_of(self._facts.cluster.cluster_id, worker),
            is_running=False,
            left_s=float("inf"),
            used_s=0.0,
            node="",
            reason="submitted",
        )

    def _script(self, worker: str) -> str:
        return job_script(
            self._spec,
            worker=worker,
            job_name=commands.job_name_of(self._facts.cluster.cluster_id, worker),
            scheduler=self._scheduler,
            supervisor=self._facts.settings.supervisor,
            site=self._site.path,
        )

    def _next_name(self) -> str:
        # Stored before the job is submitted, because names are never reused.
        path = self._facts.cluster.path / "named"
        number = 1 + (int(path.read_text()) if path.exists() else 0)
        write_private(path, str(number))
        return f"w{number}"

    def _log_folder(self) -> Path | None:
        folder = self._spec.log_folder
        return Path(folder).expanduser() if folder else None


def site_of(spec: SlurmSpec, cluster_id: str) -> Site:
    """Return a cluster's folder on the shared disk."""
    return Site(Path(spec.folder).expanduser().absolute() / cluster_id)
