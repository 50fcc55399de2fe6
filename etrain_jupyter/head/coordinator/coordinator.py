"""Coordinator: a Dask scheduler plugin that owns the jobs and carries out what ``rules`` decide."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed import Scheduler, SchedulerPlugin

from etrain_jupyter import __version__
from etrain_jupyter.head.coordinator import clock
from etrain_jupyter.head.coordinator.acknowledgements import Acknowledgements
from etrain_jupyter.head.coordinator.bundles import HeadBundles
from etrain_jupyter.head.coordinator.defects import Defects
from etrain_jupyter.head.coordinator.fault_injection import Injector
from etrain_jupyter.head.coordinator.nodes import JobProgress, NodeCost, NodeSource
from etrain_jupyter.head.coordinator.notices import Notices
from etrain_jupyter.head.coordinator.recovery import Recovering
from etrain_jupyter.head.coordinator.requests import RequestError, Requests, UnknownJobError
from etrain_jupyter.head.coordinator.roster import WorkerFacts, WorkerRoster
from etrain_jupyter.head.coordinator.serving import Serving
from etrain_jupyter.head.coordinator.sharing import Sharing
from etrain_jupyter.head.head_coordinator import HeadCoordinator
from etrain_jupyter.head.jobs.costs import CostLog
from etrain_jupyter.head.jobs.hosted_job import HostedJob
from etrain_jupyter.head.jobs.job_records import JobRecords
from etrain_jupyter.head.jobs.job_spec import JobSpec
from etrain_jupyter.head.jobs.mirrored_log import open_run
from etrain_jupyter.head.studies.studies import Studies
from etrain_jupyter.head.studies.study_spec import StudySpec
from etrain_jupyter.log import events
from etrain_jupyter.process.processes import num_usable_cores
from etrain_jupyter.rules.membership import stimuli as s
from etrain_jupyter.rules.membership.silence import BEAT_S, choose_beat_s
from etrain_jupyter.wire import codec
from etrain_jupyter.wire import messages as m
from etrain_jupyter.wire import requests as q
from etrain_jupyter.wire.stream import MessageStream, SharedFields

logger = logging.getLogger("etrain.coordinator")

TICK_S = 0.25
COALESCE_S = 0.05
"""Minimum interval in seconds between replies with new events, so that each carries several."""

ACKNOWLEDGED_PER_S = 250.0
"""Maximum number of acknowledgements per second, as an average; those of up to 62 workers are sent
in each tick."""

HANG_S = 30.0
"""Seconds without progress after which ranks count as hung, unless ``ETRAIN_HANG_S`` is set."""

SILENCE_S = 10.0
"""Supervisor heartbeat timeout in seconds, unless ``ETRAIN_SILENCE_S`` is set. Dask would need
minutes to detect a machine that vanished without closing its connections."""

MANY_WORKERS = 100
REMOVAL_DELAY_S = 1.0
"""Seconds for which Dask delays the end of a removal in a cluster of more than ``MANY_WORKERS``."""

LAST_UPLOADS_S = 3.0
"""Timeout in seconds for uploading logs to a bucket when the cluster shuts down."""

Handler = Callable[[Any], Awaitable[Any]]
"""Handler for one kind of kernel request."""


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
        self._on_shutdown = on_shutdown
        self._jobs: dict[str, HostedJob] = {}
        silence_s = float(os.environ.get("ETRAIN_SILENCE_S", silence_s))
        self._hang_s = float(os.environ.get("ETRAIN_HANG_S", HANG_S))
        self._workers = WorkerRoster(silence_s=silence_s, tick_s=TICK_S)
        self._studies = Studies(self, None)
        self._sharing = Sharing(
            nodes, self._workers, self._active, studies=lambda: self._studies.shares()
        )
        self._notices = Notices(self._workers, self._active, self._allocate, nodes)
        self._injector = Injector(nodes, self._workers, self._notices)
        self._requests = Requests(
            nodes=nodes, roster=self._workers, injector=self._injector, allocate=self._allocate
        )
        self._costs = CostLog()
        self._halted = ""  # why the pool starts no more workers; empty if it still may
        self._defects = Defects()
        self._bundles = HeadBundles(lambda: (job.spec for job in self._active()))
        self._serve(JobRecords(None))
        self._streams: dict[str, MessageStream] = {}  # to the supervisors, by address
        self._refused: set[str] = set()  # addresses of supervisors with another wire version
        self._ticked_at: float | None = None
        self._acknowledged_at = -math.inf
        self._beat_s = BEAT_S  # the supervisors' heartbeat interval
        self._machines: dict[str, dict[str, Any]] | None = None  # nodes by worker, for one tick
        self._sent_at: dict[str, float] = {}  # last reply with events, by job and loop.time()
        self._idle_since = time.monotonic()
        self._ticker: asyncio.Task[None] | None = None

    def _serve(self, records: JobRecords) -> None:
        """Start serving; ``records`` stores the data that the next scheduler needs."""
        self._records = records
        self._acknowledgements = Acknowledgements(records)
        self._serving = Serving(
            active=self._active,
            roster=self._workers,
            sharing=self._sharing,
            notices=self._notices,
            injector=self._injector,
            acknowledgements=self._acknowledgements,
            costs=self._costs,
            defects=self._defects,
            send_to=self._send_to,
        )
        self._mode: Serving | Recovering = self._serving

    # --- start and end ---

    def replay(self, folder: Path, *, died_at: float) -> None:
        """Keep job records in a folder, and take over the jobs of a scheduler that died.

        Called before the scheduler listens, so that each kernel finds its job when it reconnects.

        Args:
            folder: Folder of the records.
            died_at: When the previous scheduler died, in seconds since the epoch; 0.0 if there was
                none.
        """
        self._serve(JobRecords(folder))
        for spec, pending in self._records.load():
            try:
                job = self._host(spec, replays=pending)
            except Exception:
                # A job that cannot continue must not stop the others or the scheduler.
                logger.exception("job %s could not be taken over", spec.job_id)
                continue
            self._jobs[spec.job_id] = job
        replayed = [job for job in self._active() if job.replayed is not None]
        if replayed:
            self._mode = Recovering(died_at, replayed)
        self._studies = Studies(self, folder)
        self._studies.replay()

    def _host(self, spec: JobSpec, **more: Any) -> HostedJob:
        return HostedJob(
            spec=spec,
            send_to=self._send_to,
            send_all=self._send_all,
            describe_worker=self._machine_of,
            before_end=self._costs.report_final,
            on_events=self._report_to_studies,
            defects=self._defects,
            hang_s=self._hang_s,
            **more,
        )

    async def start(self, scheduler: Scheduler) -> None:
        """Register the handlers and start ticking. Called by the scheduler."""
        self.register(scheduler)
        self._ticker = asyncio.create_task(self._tick_often())

    def register(self, scheduler: Scheduler) -> None:
        """Register the handlers with a scheduler that may not have started yet."""
        self._scheduler = scheduler
        scheduler.stream_handlers["etrain_report"] = self._receive
        for request, handler in self._handlers().items():
            scheduler.handlers[request.op] = q.handler_of(request, handler)

    def _handlers(self) -> dict[type[q.Request[Any]], Handler]:
        return {
            q.SubmitJob: self._submit,
            q.PutBundle: self._put_bundle,
            q.FetchBundle: self._read_bundle,
            q.ListJobs: self._list_jobs,
            q.FetchEvents: self._events,
            q.ControlJob: self._control,
            q.ListWorkers: self._list_workers,
            q.DescribeCluster: self._describe,
            q.ShutDownCluster: self._down,
            q.SubmitStudy: self._submit_study,
            q.StopStudy: self._stop_study,
        }

    async def close(self) -> None:
        """Stop ticking, and upload the logs of ended jobs. Called as the scheduler closes."""
        await self._studies.close()
        if self._ticker is not None:
            self._ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticker
        self._bundles.close()
        # Each log has an upload thread. What is not uploaded before the timeout is uploaded by the
        # next process on this machine that claims the log.
        deadline = time.monotonic() + LAST_UPLOADS_S
        while any(job.is_uploading for job in self._jobs.values()) and time.monotonic() < deadline:
            self._write_logs()
            await asyncio.sleep(COALESCE_S)
        for job in self._jobs.values():
            if job.job_log.is_behind:
                job.job_log.abandon()

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
        self._studies.start()
        self._write_logs()
        self._acknowledge(now)
        asleep_s = self._workers.tick(now)
        with self._defects.watch(None, "taking jobs over"):
            self._end_recovery()
        self._drop_silent(now)
        passed_s = now - self._ticked_at if self._ticked_at is not None else 0.0
        self._ticked_at = now
        self._pace_heartbeats()
        self._machines = None
        if self._mode is self._serving:
            self._serving.share_newcomers()
        for job in self._mode.deciding_jobs():
            with self._defects.watch(job, "a tick"):
                # Trainers that wait for the log to become writable are not hung. Treat the time
                # since the last tick as if this process had been suspended, so that it does not
                # count towards the hang timeout.
                is_stuck = self._is_stuck(job)
                job.handle(s.Tick(asleep_s=passed_s if is_stuck and not asleep_s else asleep_s))
                self._injector.tick(job)
        self._after_change()
        if self._mode is self._serving and self._sharing.review_sizes():
            self._allocate()
        self._sharing.hand_back_noticed()

    def _pace_heartbeats(self) -> None:
        """Ask for fewer heartbeats the more workers there are."""
        num, limit_s = len(self._workers), self._workers.silence_s
        beat_s = choose_beat_s(num, current_s=self._beat_s, limit_s=limit_s)
        if beat_s != self._beat_s:
            self._beat_s = beat_s
            for facts in self._workers:
                self._send(facts.address, m.SetHeartbeatInterval(interval_s=beat_s))

    def _write_logs(self) -> None:
        """Retry event writes that failed."""
        for job in self._jobs.values():
            with self._defects.watch(job, "writing the log"):
                job.job_log.retry()

    def _is_stuck(self, job: HostedJob) -> bool:
        # True if one of the job's trainers is blocked because its supervisor's outbox is full.
        facts = [self._workers.get(member.worker) for member in job.state.members.values()]
        return any(known is not None and known.is_stuck for known in facts)

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
        for job in self._active():
            job.log(events.LogLine, level="warning", worker="", text=text)

    def note(self, text: str) -> None:
        """Log a line about the pool's progress for each active job."""
        for job in self._active():
            job.log(events.LogLine, level="info", worker="", text=text)

    def halt(self, why: str) -> None:
        """Save and stop all jobs, and refuse new ones: the pool starts no more workers."""
        if self._halted:  # the pool may report further reasons
            return
        self._halted = why
        what = "The job saves a checkpoint and stops. To continue from it, use %etrain resume"
        self.warn(f"{why.rstrip('.')}. {what}.")
        # During a recovery, the jobs do not know their trainers yet. Stopping a job now would end
        # it without a checkpoint, while its trainers keep training. `_end_recovery` stops the jobs
        # later.
        if self._mode is self._serving:
            self._stop_all()
        self._after_change()

    def _stop_all(self) -> None:
        self._studies.stop_all(self._halted)
        for job in self._active():
            job.handle(s.StopRequested(now=False))

    def is_busy(self, worker: str) -> bool:
        """Return whether a job uses this worker; the pool may release the others as surplus."""
        return self._mode.is_busy(worker)

    def progress(self) -> list[JobProgress]:
        """Return the progress of all active jobs that are not about to end."""
        return [job.progress() for job in self._active() if not job.state.outcome]

    def idle_s(self) -> float:
        """Return the seconds since the last job ended; 0.0 while a job or its upload is active."""
        return 0.0 if self._has_unfinished() else time.monotonic() - self._idle_since

    def _active(self) -> list[HostedJob]:
        return [job for job in self._jobs.values() if not job.state.is_ended]

    # --- workers ---

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: Any) -> Awaitable[None] | None:
        """Handle a worker's closed connection. Called by the scheduler, which awaits the result."""
        # An evicted worker is no longer in the roster, and its loss was handled when it was
        # evicted.
        self._refused.discard(worker)
        self._streams.pop(worker, None)
        facts = self._workers.remove(worker)
        if facts is not None:
            self._records.forget_worker(facts.name)
            self._acknowledgements.forget(facts.name)
            cause = "preempted" if facts.leaves_at else f"worker process {facts.pid} is gone"
            is_used = self._mode.is_busy(facts.name)
            self._mode.lose(facts, cause)
            # Next, the scheduler informs each other worker that this one is gone, for the sake of
            # Dask's own tasks. In a large cluster, that takes a sixth of the time in which the
            # survivors form, so it waits.
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
            try:
                decoded = m.FROM_SUPERVISOR.decode(message)
            except codec.WireVersionError as exc:
                self._refuse(worker, exc)
                return
            except codec.MalformedMessageError as exc:
                decoded = self._end_sender(message, worker, exc)
            doing = f"handling {type(decoded).__name__} of {worker}"
            with self._defects.watch(self._job_named(decoded), doing):
                self._handle(decoded, worker)

    def _end_sender(
        self, message: Any, worker: str, exc: codec.MalformedMessageError
    ) -> m.TrainerExited:
        """Kill the trainer that sent a malformed report, and return its exit in place of it."""
        # Supervisors forward reports undecoded. Take the exit as reported now: until the real one
        # arrives, the coordinator would handle the trainer's next reports without this one.
        #
        #     trainer       StepsTrained of 7 (malformed)   of 8                killed
        #     coordinator     handles TrainerExited           drops it: not a member
        if not isinstance(message, dict) or not message.get("number"):
            raise exc  # the supervisor's own message
        why = f"its message cannot be decoded: {type(exc).__name__}: {exc}"
        sender = {name: message.get(name) for name in ("trainer", "number")}
        exited: m.TrainerExited = codec.decode_fields(m.TrainerExited, {**sender, "cause": why})
        logger.error("worker %s, trainer %s: %s", worker, exited.trainer, why)
        self._send(worker, m.TerminateTrainer(trainer=exited.trainer, why=why))
        return exited

    def _refuse(self, worker: str, exc: codec.WireVersionError) -> None:
        """Ignore a supervisor with another wire version, and log that once."""
        # Its hello is refused, so it never enters the roster. It may resend its messages.
        if worker in self._refused:
            return
        self._refused.add(worker)
        state = self._scheduler.workers.get(worker)
        name = str(state.name) if state is not None else worker
        text = (
            f"worker {name} cannot train: {exc} (etrain-jupyter {__version__}). Training continues "
            f"on the other workers. Install etrain-jupyter {__version__} there and restart that "
            "worker"
        )
        logger.error("%s", text)
        self.warn(text)

    def _job_named(self, message: m.Message) -> HostedJob | None:
        return self._jobs.get(message.job_id) if isinstance(message, m.TrainerReport) else None

    def _handle(self, message: m.FromSupervisor | m.AnyReport, worker: str) -> None:
        now = clock.now()
        if isinstance(message, m.SupervisorHello):
            self._greet(message, worker, now)
            return
        known = self._workers.hear(worker, now)
        if known is None:  # evicted, or no hello yet: its reports must not be handled
            self._reset(worker)
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
        self._after_change()

    def _greet(self, hello: m.SupervisorHello, worker: str, now: float) -> None:
        facts = WorkerFacts(
            name=str(self._scheduler.workers[worker].name),
            address=worker,
            device=hello.device,
            pid=hello.pid,
            incarnation=hello.incarnation,
            fingerprint=hello.fingerprint or {},
        )
        if self._workers.greet(facts, now):
            if self._beat_s != BEAT_S:
                self._send(worker, m.SetHeartbeatInterval(interval_s=self._beat_s))
            self._mode.greet(facts.name, hello.trainers or {})

    def _acknowledge(self, now: float) -> None:
        """Send each supervisor the number of the last report that it may drop."""
        # Each rank sends several reports when a generation changes. In a large cluster, one message
        # acknowledges them all.
        if 0.0 <= now - self._acknowledged_at < len(self._workers) / ACKNOWLEDGED_PER_S:
            return
        self._acknowledged_at = now
        for worker, number in self._acknowledgements.collect().items():
            self._send_to(worker, m.AcknowledgeReports(number=number))

    def _end_recovery(self) -> None:
        """Serve again once all workers are back, or the reconnect timeout has expired."""
        recovery = self._mode
        if not isinstance(recovery, Recovering):
            return
        # A pool without a known capacity cannot list its workers: they are managed elsewhere, or
        # their machines have not been adopted yet.
        alive = None
        if self._nodes.capacity() is not None:
            alive = {node["worker"] for node in self._nodes.nodes()}
        if recovery.is_over(alive):
            # Set the mode first: the handover handles reports, which may cause workers to be
            # allocated.
            self._mode = self._serving
            recovery.hand_over(self._serving)
            if self._halted:
                self._stop_all()

    def _reset(self, address: str) -> None:
        """Send a reset to an evicted supervisor, which ignores repeated resets."""
        incarnation = self._workers.evicted_incarnation(address)
        if incarnation is not None:
            self._send(address, m.ResetSupervisor(incarnation=incarnation))

    def _send_to(self, worker: str, message: m.ToSupervisor | m.ToTrainer) -> None:
        facts = self._workers.get(worker)
        if facts is not None:
            self._send(facts.address, message)

    def _send(self, address: str, message: m.ToSupervisor | m.ToTrainer) -> None:
        stream = self._stream_to(address)
        if stream is not None:
            stream.send(codec.encode(message))

    def _send_all(
        self, message: m.ToTrainer, recipients: Sequence[tuple[str, Mapping[str, Any]]]
    ) -> None:
        """Send a message to several workers, each with its own values of some fields."""
        differing = {name for _, own in recipients for name in own}
        encoded = codec.encode(message).items()
        shared = SharedFields({name: value for name, value in encoded if name not in differing})
        for worker, own in recipients:
            facts = self._workers.get(worker)
            stream = self._stream_to(facts.address) if facts is not None else None
            if stream is not None:
                stream.send_shared(shared, own)

    def _stream_to(self, address: str) -> MessageStream | None:
        batched = self._scheduler.stream_comms.get(address)
        if batched is None:
            return None
        stream = self._streams.get(address)
        if stream is None or stream.batched is not batched:
            stream = self._streams[address] = MessageStream(batched, "etrain_message")
        return stream

    def _allocate(self) -> None:
        self._mode.allocate()

    def _after_change(self) -> None:
        """Free the resources of ended jobs, and redistribute the workers if necessary."""
        #     the job's end is logged ──── free its resources,   ──── the end is durable, in a
        #                                  reassign its workers       bucket up to 15 s later:
        #                                                             remove its record
        ended = [job for job in self._jobs.values() if job.state.is_ended and not job.is_disposed]
        for job in ended:
            job.dispose()
            self._forget_bundle(job.spec.bundle_digest)
            self._costs.end(job)
            self._injector.end_chaos(job)
            self._idle_since = time.monotonic()
        for job in [job for job in self._jobs.values() if job.has_reported_end and job.is_recorded]:
            # Do not remove the record earlier. If this scheduler died in between, the next one
            # would not know the job and would reject a kernel that still waits for the job's end.
            job.is_recorded = False
            self._records.remove(job.spec.job_id)
        for job in self._active():
            self._records.note(job.spec.job_id, job.pending_requests)
        # A job that was about to end and continues after all (``Turn.train_on``) has no workers
        # assigned.
        if ended or any(not j.state.assigned and not j.state.outcome for j in self._active()):
            self._allocate()

    def _forget_bundle(self, digest: str) -> None:
        # Jobs with the same objects share a bundle.
        if all(job.spec.bundle_digest != digest for job in self._active()):
            for facts in self._workers:
                self._send_to(facts.name, m.RemoveBundle(digest=digest))

    # --- kernel requests ---

    async def _submit(self, request: q.SubmitJob) -> q.Submitted:
        spec = JobSpec.from_message(request.job)
        known = self._jobs.get(spec.job_id)
        if known is not None and not (spec.resumes and known.state.is_ended):
            raise RequestError(
                f"job {spec.job_id} is already on this cluster: it is {known.state.status} at "
                f"step {known.state.step}. Nothing was submitted. Follow it with %etrain attach, "
                "or stop it with %etrain stop, which saves a checkpoint, and then resume it."
            )
        if self._halted:
            raise RequestError(
                f"{self._halted}. Nothing was submitted. Shut down the pool with %etrain down"
            )
        self._requests.check_capacity(spec.min_workers, "Nothing was submitted")
        if not await self._bundles.is_here(spec):
            return q.Submitted(wants_bundle=True)
        try:
            hosted = await self._open(spec)
        except OSError as exc:
            raise RequestError(
                f"{exc.filename or spec.run_dir} cannot be written: {exc.strerror or exc}. "
                "Nothing was submitted. Free space there, or set ETRAIN_RUNS to another folder "
                "and restart the kernel"
            ) from exc
        self._jobs[spec.job_id] = hosted
        self._allocate()
        return q.Submitted(job_id=spec.job_id)

    async def _open(self, spec: JobSpec) -> HostedJob:
        # Write the record first: if the scheduler dies now, the next one starts the job (see
        # HostedJob).
        spec.run_dir.mkdir(parents=True, exist_ok=True)
        opened = await asyncio.to_thread(open_run, spec) if spec.place else None
        try:
            self._records.add(spec)
            return self._host(spec, opened=opened)
        except BaseException as exc:
            self._records.remove(spec.job_id)
            if isinstance(exc, OSError) and not spec.resumes:
                spec.log_path.unlink(missing_ok=True)  # it is empty: the job never existed
            raise

    async def _put_bundle(self, request: q.PutBundle) -> q.Done:
        await self._bundles.put(JobSpec.from_message(request.job), request.offset, request.data)
        return q.Done()

    async def _read_bundle(self, request: q.FetchBundle) -> q.BundlePiece:
        return q.BundlePiece(data=await self._bundles.read(request.digest, request.offset))

    async def _list_jobs(self, request: q.ListJobs) -> q.JobList:
        return q.JobList(jobs=tuple(job.summary() for job in self._jobs.values()))

    async def _events(self, request: q.FetchEvents) -> q.EventBatch:
        job_id, since, wait_s = request.job_id, request.since, request.wait_s
        job = self._job(job_id)
        # Long polling: reply when there are new events, or after ``wait_s``. A log that is behind
        # also wakes waiting kernels, so that they receive ``trouble``.
        if job.job_log.last_seq <= since and not job.has_reported_end:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(job.job_log.changed.wait(), min(wait_s, 60.0))
        if wait_s and job.job_log.last_seq - since < request.limit:
            await self._collect_events(job_id)
        trouble = job.job_log.trouble
        if trouble and self._is_stuck(job):
            trouble += "; training is blocked until then"
        batch = tuple(job.job_log.since(since, request.limit))
        return q.EventBatch(events=batch, status=job.state.status, trouble=trouble)

    async def _collect_events(self, job_id: str) -> None:
        """Wait until a job's next batch of events is due; all waiting kernels get the same one."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._sent_at.get(job_id, -math.inf) + COALESCE_S - loop.time())
        if loop.time() >= self._sent_at.get(job_id, -math.inf) + COALESCE_S:
            self._sent_at[job_id] = loop.time()

    def _machine_of(self, worker: str) -> dict[str, Any]:
        """Return the facts about a worker's machine, as fields of ``WorkerJoined``."""
        facts = self._workers.get(worker)
        # Listing the nodes takes time for each of them, and a job may start trainers on all.
        if self._machines is None or worker not in self._machines:
            self._machines = {node["worker"]: node for node in reversed(self._nodes.nodes())}
        node = self._machines.get(worker, {})
        machine: dict[str, Any] = (
            {"device": facts.device, "address": facts.address} if facts else {}
        )
        if node.get("zone"):
            machine |= {
                "machine": node["type"],
                "zone": node["zone"],
                "lifecycle": node["lifecycle"],
                "usd_per_h": node["price_usd_per_h"],
            }
        return machine

    async def _list_workers(self, request: q.ListWorkers) -> q.WorkerList:
        records = self._job(request.job_id).members()
        for record in records:
            facts = self._workers.get(record["worker"])
            record["address"] = facts.address if facts else ""
            record["pid"] = facts.pid if facts else 0
            record |= self._machine_of(record["worker"]) | {"device": record["device"]}
        return q.WorkerList(workers=tuple(records))

    async def _describe(self, request: q.DescribeCluster) -> q.ClusterFacts:
        return q.ClusterFacts(
            cluster_id=self._cluster_id,
            pid=os.getpid(),
            workers=len(self._workers),
            jobs=len(self._active()),
            idle_s=self.idle_s(),
        )

    async def _down(self, request: q.ShutDownCluster) -> q.ShuttingDown:
        await self._save_and_stop(request)
        # Delay the shutdown, so that the reply is sent before the scheduler closes its connections.
        asyncio.get_running_loop().call_later(0.05, self._on_shutdown)
        return q.ShuttingDown()

    async def _save_and_stop(self, request: q.ShutDownCluster) -> None:
        """Stop all studies and jobs, each with a checkpoint if there is time for one."""
        why = f"the cluster was shut down by {request.by or 'an unknown process'}"
        deadline = time.monotonic() + request.drain_s
        # A job that is being taken over does not know its trainers yet: it could not save.
        while self._mode is not self._serving and time.monotonic() < deadline:
            await asyncio.sleep(COALESCE_S)
        #   StopRequested(now=False)  deadline                 StopRequested(now=True)
        #       |--- last checkpoint ----|--- if still active ------|
        self._studies.stop_all(why)
        for job in self._active():
            job.handle(s.StopRequested(reason=why))
        while self._has_unfinished() and time.monotonic() < deadline:
            await asyncio.sleep(COALESCE_S)
        unsaved = f"{why}; no checkpoint was saved within {request.drain_s:g} s"
        for job in self._active():
            job.handle(s.StopRequested(now=True, reason=unsaved))
        self._after_change()

    def _has_unfinished(self) -> bool:
        is_uploading = any(job.is_uploading for job in self._jobs.values())
        return bool(self._active()) or self._studies.is_active or is_uploading

    async def _control(self, request: q.ControlJob) -> q.Outcome:
        job = self._job(request.job_id)
        self._mode.check_request(job)
        # ``HostedJob.handle`` logs exceptions in our own code instead of raising them. Count them,
        # so that a defect is not reported to the user as a success.
        num_before = self._defects.num_seen
        message = self._requests.do(job, request.request, request.args or {})
        self._after_change()
        if self._defects.num_seen > num_before:
            raise RequestError(
                f"{request.request} may be incomplete, because of a defect in etrain-jupyter: "
                f"{self._defects.newest}. The traceback is in the scheduler's log"
            )
        return q.Outcome(message=message)

    # --- studies ---

    async def _submit_study(self, request: q.SubmitStudy) -> q.Submitted:
        spec = StudySpec.from_message(request.study)
        if self._halted:
            raise RequestError(
                f"{self._halted}. Nothing was submitted. Shut down the pool with %etrain down"
            )
        self._studies.submit(spec)
        return q.Submitted(job_id=spec.study_id)

    async def _stop_study(self, request: q.StopStudy) -> q.Outcome:
        return q.Outcome(message=self._studies.stop(request.study_id))

    def _report_to_studies(self, job_id: str, new: Sequence[events.Event]) -> None:
        # Watched, because an exception here must not keep the job from handling its report.
        with self._defects.watch(None, f"passing events of {job_id} to its study"):
            self._studies.take_events(job_id, new)

    @property
    def is_ready(self) -> bool:
        """False while the workers of the previous scheduler reconnect; see ``TrialHost``."""
        return self._mode is self._serving

    @property
    def capacity(self) -> int:
        """Number of workers that can train at the same time without slowing each other down."""
        most = self._nodes.capacity() or len(self._workers) or 1
        # On this machine, there are more slots than cores, so that a job can be scaled for a test.
        return most if self._nodes.replaces_early else min(most, max(2, num_usable_cores()))

    def find_job(self, job_id: str) -> HostedJob | None:
        """Return a job of this scheduler, also one that has ended."""
        return self._jobs.get(job_id)

    async def host_job(self, spec: JobSpec) -> None:
        """Start or resume a job for a study."""
        self._jobs[spec.job_id] = await self._open(spec)
        self._allocate()

    def after_change(self) -> None:
        """Free the resources of ended jobs, and share the workers again."""
        self._after_change()
        self._allocate()

    def _job(self, job_id: str) -> HostedJob:
        if job_id not in self._jobs:
            raise UnknownJobError(f"job {job_id} is not on this cluster")
        return self._jobs[job_id]
