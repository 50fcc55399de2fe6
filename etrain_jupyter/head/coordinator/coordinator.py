"""The coordinator: a Dask scheduler plugin that owns the jobs and acts as ``elastic`` decides."""

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

from etrain_jupyter.head.coordinator import clock
from etrain_jupyter.head.coordinator.acknowledgements import Acknowledgements
from etrain_jupyter.head.coordinator.bundles import HeadBundles
from etrain_jupyter.head.coordinator.defects import Defects
from etrain_jupyter.head.coordinator.fault_injection import Injector
from etrain_jupyter.head.coordinator.nodes import NodeCost, NodeSource
from etrain_jupyter.head.coordinator.notices import Notices
from etrain_jupyter.head.coordinator.recovery import Returning
from etrain_jupyter.head.coordinator.requests import RequestError, Requests, UnknownJobError
from etrain_jupyter.head.coordinator.roster import WorkerFacts, WorkerRoster
from etrain_jupyter.head.coordinator.sharing import Sharing
from etrain_jupyter.head.head_coordinator import HeadCoordinator
from etrain_jupyter.head.jobs.costs import Money
from etrain_jupyter.head.jobs.hosted_job import HostedJob
from etrain_jupyter.head.jobs.job_records import JobRecords
from etrain_jupyter.head.jobs.job_spec import JobSpec
from etrain_jupyter.head.jobs.mirrored_log import open_run
from etrain_jupyter.head.jobs.reports import Message
from etrain_jupyter.log import events
from etrain_jupyter.rules.membership import stimuli as s

logger = logging.getLogger("etrain.coordinator")

TICK_S = 0.25
COALESCE_S = 0.05
"""Least time between two tellings of news of a job: the first is told at once, and later ones take
more events along."""

HANG_S = 30.0
"""How long the ranks of a job may stand still, unless the variable ``ETRAIN_HANG_S`` says else."""

SILENCE_S = 10.0
"""How long a supervisor may be silent, unless ``ETRAIN_SILENCE_S`` says else. Dask would notice a
machine that vanished without closing its connections only after minutes."""


LAST_UPLOADS_S = 3.0
"""How long the end of the cluster waits for logs that a bucket does not have yet."""

Handler = Callable[..., Awaitable[dict[str, Any]]]


class Coordinator(SchedulerPlugin, HeadCoordinator):
    """Runs the jobs of one cluster. Everything happens on the scheduler's event loop."""

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
        self._sharing = Sharing(nodes, self._workers, self._active)
        self._notices = Notices(self._workers, self._active, self._allocate, nodes)
        self._injector = Injector(nodes, self._workers, self._notices)
        self._requests = Requests(
            nodes=nodes, roster=self._workers, injector=self._injector, allocate=self._allocate
        )
        self._money = Money()
        self._halted = ""
        """Why there will be no more workers; empty if there will."""
        self._defects = Defects()
        self._records = JobRecords(None)
        self._acknowledgements = Acknowledgements(self._records)
        self._bundles = HeadBundles(lambda: (job.order for job in self._active()))
        self._returning: Returning | None = None
        """The trainers of the scheduler before, while they are waited for."""
        self._ticked_at: float | None = None
        self._told_at: dict[str, float] = {}
        """When news of a job was told, by the event loop's clock."""
        self._idle_since = time.monotonic()
        self._ticker: asyncio.Task[None] | None = None

    # --- life ---

    def recall(self, folder: Path, *, died_at: float) -> None:
        """Keep the records of jobs in a folder, and take over those of a scheduler that died.

        Called before the scheduler listens, so that nobody hears that a job is unknown.

        Args:
            folder: Where the records are.
            died_at: When it died, in seconds since the epoch; 0.0 if there was none.
        """
        self._records = JobRecords(folder)
        self._acknowledgements = Acknowledgements(self._records)
        for order, wishes in self._records.load():
            try:
                job = self._host(order, recalls=wishes)
            except Exception:
                # One that cannot go on must not keep the others from it, nor the scheduler.
                logger.exception("job %s could not be taken over", order.job_id)
                continue
            self._jobs[order.job_id] = job
        recalled = [job for job in self._active() if job.recalled is not None]
        self._returning = Returning(died_at, recalled) if recalled else None

    def _host(self, order: JobSpec, **more: Any) -> HostedJob:
        job = HostedJob(order=order, tell=self._tell, hang_s=self._hang_s, **more)
        job.before_end = self._money.tell_last
        job.describe_worker = self._machine_of
        job.defects = self._defects
        return job

    async def start(self, scheduler: Scheduler) -> None:
        """Register what the kernel and the supervisors may call."""
        self.register(scheduler)
        self._ticker = asyncio.create_task(self._tick_often())

    def register(self, scheduler: Scheduler) -> None:
        """Register it with a scheduler that may not have started yet."""
        self._scheduler = scheduler
        scheduler.stream_handlers["etrain_report"] = self._take_report
        for name, handler in self._handlers().items():
            scheduler.handlers[f"etrain_{name}"] = _answering(handler)

    def _handlers(self) -> dict[str, Handler]:
        """Return what may be called, without the prefix that all of it has."""
        return {
            "submit": self._submit,
            "put_bundle": self._put_bundle,
            "bundle": self._read_bundle,
            "jobs": self._jobs_list,
            "events": self._events,
            "request": self._request,
            "workers": self._workers_of,
            "describe": self._describe,
            "down": self._down,
        }

    async def close(self) -> None:
        """Stop ticking, and let what has ended be uploaded; the scheduler is closing."""
        if self._ticker is not None:
            self._ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticker
        self._bundles.close()
        deadline = time.monotonic() + LAST_UPLOADS_S
        while any(job.is_uploading for job in self._jobs.values()) and time.monotonic() < deadline:
            self._write_logs()
            await asyncio.sleep(COALESCE_S)
        for job in self._jobs.values():
            if job.is_log_behind:
                job.abandon_log()

    async def _tick_often(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            with self._defects.watch(None, "a tick"):
                self.tick()

    def tick(self) -> None:
        """Do what is due because time has passed."""
        now = clock.now()
        self._write_logs()
        self._acknowledge()
        asleep_s = self._workers.tick(now)
        with self._defects.watch(None, "taking jobs over"):
            self._bring_back(now)
        self._give_up_silent(now)
        passed_s = now - self._ticked_at if self._ticked_at is not None else 0.0
        self._ticked_at = now
        for job in self._active() if self._returning is None else ():
            with self._defects.watch(job, "a tick"):
                # Trainers that wait until the log can be written do not hang.
                is_stuck = self._is_stuck(job)
                job.handle(s.Tick(asleep_s=passed_s if is_stuck and not asleep_s else asleep_s))
                self._injector.tick(job)
        self._after_change()
        self._sharing.hand_back_noticed()

    def _write_logs(self) -> None:
        """Write the events that disks did not accept before."""
        for job in self._jobs.values():
            with self._defects.watch(job, "writing the log"):
                job.retry_log()

    def _is_stuck(self, job: HostedJob) -> bool:
        """Whether a trainer of the job waits because its supervisor can keep no more messages."""
        facts = [self._workers.get(member.worker) for member in job.state.members.values()]
        return any(known is not None and known.is_stuck for known in facts)

    # --- what the pool tells ---

    def take_costs(self, costs: Sequence[NodeCost]) -> None:
        """Take in what the nodes have cost by now, for the logs of the jobs."""
        if self._returning is None:
            self._money.take(costs, self._active())

    def take_notice(self, worker: str, leaves_at: float) -> None:
        """Take in that the pool itself will end a worker's machine, and when (epoch seconds)."""
        facts = self._workers.get(worker)
        if facts is not None:
            self._notices.interrupt(facts, left_s=leaves_at - time.time())

    def warn(self, text: str) -> None:
        """Let whoever watches a job know."""
        for job in self._active():
            job.log(events.LogLine, level="warning", worker="", text=text)

    def halt(self, why: str) -> None:
        """Let all jobs save and stop, and take no more: there will be no more workers."""
        if self._halted:
            return
        self._halted = why
        what = "The job saves a checkpoint and stops; %etrain resume goes on from it"
        self.warn(f"{why.rstrip('.')}. {what}.")
        for job in self._active():
            job.handle(s.StopAsked(now=False))
        self._after_change()

    def is_busy(self, worker: str) -> bool:
        """Whether a job holds this worker; the pool may end the others when there are too many."""
        return self._returning is not None or any(
            job.state.of_worker(worker) for job in self._active()
        )

    def idle_s(self) -> float:
        """Return the seconds since the last job ended; 0.0 while one is active or uploaded."""
        if self._active() or any(job.is_uploading for job in self._jobs.values()):
            return 0.0
        return time.monotonic() - self._idle_since

    def _active(self) -> list[HostedJob]:
        return [job for job in self._jobs.values() if not job.state.is_ended]

    # --- workers ---

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: Any) -> None:
        """Take in that a worker's connection is gone. Called by the scheduler."""
        facts = self._workers.remove(worker)
        if facts is not None:
            self._records.forget_worker(facts.name)
            self._acknowledgements.forget(facts.name)
            cause = "preempted" if facts.leaves_at else f"worker process {facts.pid} is gone"
            self._lose(facts, cause)

    def _give_up_silent(self, now: float) -> None:
        """Do without workers whose supervisors are silent, though their connections stand."""
        for facts, silence_s in self._workers.give_up_silent(now):
            with self._defects.watch(None, f"killing {facts.name}"):
                self._nodes.kill(facts.name)
            self._lose(facts, f"silent for {silence_s:.1f} s", detected_s=silence_s)

    def _lose(self, facts: WorkerFacts, cause: str, detected_s: float = 0.0) -> None:
        if self._returning is not None:
            self._returning.forget(facts.name)
            return
        for job in self._active():
            job.handle(s.WorkerGone(worker=facts.name, cause=cause, detected_s=detected_s))
        self._allocate()

    def _take_report(self, message: Message, worker: str) -> None:
        """Take a message of a supervisor; ``worker`` is its address.

        Dask would close the connection upon an exception, and the worker would end itself.
        """
        with self._defects.watch(
            self._job_of(message), f"taking {message.get('op')!r} of {worker}"
        ):
            self._take(message, worker)

    def _job_of(self, message: Message) -> HostedJob | None:
        """Return the job whose trainer a message comes from, if it says so."""
        return self._jobs.get(str(message.get("trainer", "")).partition("/")[0])

    def _take(self, message: Message, worker: str) -> None:
        now = clock.now()
        if message["op"] == "supervisor":
            self._greet(message, worker, now)
            return
        known = self._workers.hear(worker, now)
        if known is None:
            self._reset(worker)
        elif message["op"] == "beat":
            known.is_stuck = message.get("is_stuck", False)
            for trainer, page in message["trainers"].items():
                for job in self._jobs_of(trainer, known):
                    job.take_progress(trainer, page)
        elif self._returning is not None:
            self._returning.hold(message, worker)  # its job is not complete yet
            return
        else:
            self._take_held(message, known)
        self._after_change()

    def _greet(self, message: Message, worker: str, now: float) -> None:
        facts = WorkerFacts(
            name=str(self._scheduler.workers[worker].name),
            address=worker,
            device=message["device"],
            pid=message["pid"],
            incarnation=message["incarnation"],
            fingerprint=message.get("fingerprint", {}),
        )
        if not self._workers.greet(facts, now):
            return
        standings = message.get("trainers", {})
        if self._returning is not None:
            self._returning.greet(facts.name, standings)
        else:
            self._dismiss_strangers(facts.name, standings)
            self._allocate()

    def _take_held(self, message: Message, worker: WorkerFacts) -> None:
        """Take a message that waits while workers are coming back."""
        if message["op"] == "notice":
            self._notices.take(message, worker)
        else:
            self._take_numbered(message, worker)

    def _take_numbered(self, message: Message, worker: WorkerFacts) -> None:
        """Take a message of a trainer, unless the scheduler before has."""
        number = message.get("n", 0)
        if number and not self._acknowledgements.is_new(worker.name, number):
            return
        jobs = self._jobs_of(message["trainer"], worker)
        try:
            for job in jobs:
                job.take_report(message["trainer"], message)
                self._injector.commit_planned(job)
        finally:
            # Also one that we fail to take: it would fail again each time.
            if number:
                self._acknowledgements.take(worker.name, number, jobs)

    def _acknowledge(self) -> None:
        """Tell the supervisors what they need not keep any more."""
        for worker, number in self._acknowledgements.collect().items():
            self._tell(worker, {"op": "ack", "n": number})

    # --- after the death of the scheduler before ---

    def _bring_back(self, now: float) -> None:
        """Go on with the jobs of the scheduler before, once all workers are back that can be."""
        returning = self._returning
        if returning is None:
            return
        alive = None
        if self._nodes.capacity() is not None:
            alive = {node["worker"] for node in self._nodes.nodes()}
        if not returning.is_over(alive):
            return
        self._returning = None
        for job in returning.jobs:
            with self._defects.watch(job, "adopting its trainers"):
                job.adopt(returning.standings, away_s=max(0.0, time.time() - returning.died_at))
        self._notices.recall(returning.notices, returning.at_risk)
        for message, worker in returning.held:
            known = self._workers.hear(worker, now)
            if known is not None:
                with self._defects.watch(self._job_of(message), f"taking {message.get('op')!r}"):
                    self._take_held(message, known)
        for worker, standings in returning.by_worker.items():
            self._dismiss_strangers(worker, standings)
        self._allocate()

    def _dismiss_strangers(self, worker: str, standings: Mapping[str, Any]) -> None:
        """Let those trainers of a worker end that no job here knows."""
        known = {name for job in self._active() for name in job.state.members}
        for name in standings:
            if name not in known:
                message = {"op": "release"}
                self._tell(worker, {"op": "tell", "trainer": name, "message": message})

    def _jobs_of(self, trainer: str, worker: WorkerFacts) -> list[HostedJob]:
        """Return the job whose trainer this is, if the worker is the one that it was started on."""
        return [
            job
            for job in self._active()
            if trainer in job.trainers and job.trainers[trainer].worker == worker.name
        ]

    def _reset(self, address: str) -> None:
        """Tell a supervisor that was given up to begin anew; it may be told several times."""
        incarnation = self._workers.given_up(address)
        stream = self._scheduler.stream_comms.get(address)
        if incarnation is not None and stream is not None:
            message = {"op": "reset", "incarnation": incarnation}
            stream.send({"op": "etrain_order", "message": message})

    def _tell(self, worker: str, message: Message) -> None:
        facts = self._workers.get(worker)
        stream = self._scheduler.stream_comms.get(facts.address) if facts else None
        if stream is not None:
            stream.send({"op": "etrain_order", "message": message})

    def _allocate(self) -> None:
        if self._returning is None:  # else nobody knows yet which workers are in use
            self._sharing.allocate()

    def _after_change(self) -> None:
        """Let go what is not needed any more."""
        ended = [job for job in self._jobs.values() if job.state.is_ended and not job.is_let_go]
        for job in ended:
            job.let_go()
            self._forget_bundle(job.order.bundle_digest)
            self._money.end(job)
            self._injector.end_chaos(job)
            self._idle_since = time.monotonic()
        for job in [job for job in self._jobs.values() if job.has_told_its_end and job.is_recorded]:
            # Until then, the next scheduler would have to find out how it ended.
            job.is_recorded = False
            self._records.remove(job.order.job_id)
        for job in self._active():
            self._records.note(job.order.job_id, job.wishes)
        # A job that was about to end, and goes on after all, has no workers to ask for.
        if ended or any(not j.state.assigned and not j.state.outcome for j in self._active()):
            self._allocate()

    def _forget_bundle(self, digest: str) -> None:
        """Let the workers remove a bundle, unless another job uses the same."""
        if all(job.order.bundle_digest != digest for job in self._active()):
            for facts in self._workers:
                self._tell(facts.name, {"op": "forget_bundle", "digest": digest})

    # --- what the kernel may call ---

    async def _submit(self, job: dict[str, Any]) -> dict[str, Any]:
        order = JobSpec.from_message(job)
        known = self._jobs.get(order.job_id)
        if known is not None and not (order.resumes and known.state.is_ended):
            raise RequestError(
                f"job {order.job_id} is here already: it is {known.state.status} at step "
                f"{known.state.step}. %etrain attach follows it; %etrain stop ends it with a "
                "checkpoint, and then it can be resumed."
            )
        if self._halted:
            raise RequestError(f"{self._halted}. Nothing was submitted. %etrain down ends the pool")
        self._requests.check_capacity(order.min_workers, "Nothing was submitted")
        if not await self._bundles.is_here(order):
            return {"wants_bundle": True}
        try:
            hosted = await self._open(order)
        except OSError as exc:
            raise RequestError(
                f"{exc.filename or order.run_dir} cannot be written: {exc.strerror or exc}. "
                "Nothing was submitted. Free space there, or set ETRAIN_RUNS to a folder elsewhere "
                "and restart the kernel"
            ) from exc
        self._jobs[order.job_id] = hosted
        self._allocate()
        return {"job_id": order.job_id}

    async def _open(self, order: JobSpec) -> HostedJob:
        """Write down a job that is submitted, and open its log.

        Raises:
            OSError: If a disk refuses that.
        """
        order.run_dir.mkdir(parents=True, exist_ok=True)
        opened = await asyncio.to_thread(open_run, order) if order.place else None
        try:
            self._records.add(order)
            return self._host(order, opened=opened)
        except BaseException as exc:
            self._records.remove(order.job_id)
            if isinstance(exc, OSError) and not order.resumes:
                order.log_path.unlink(missing_ok=True)  # nothing is in it: there is no such job
            raise

    async def _put_bundle(self, job: dict[str, Any], offset: int, data: bytes) -> dict[str, Any]:
        await self._bundles.put(JobSpec.from_message(job), offset, data)
        return {}

    async def _read_bundle(self, digest: str, offset: int) -> dict[str, Any]:
        return {"data": await self._bundles.read(digest, offset)}

    async def _jobs_list(self) -> dict[str, Any]:
        return {"jobs": [job.summary() for job in self._jobs.values()]}

    async def _events(
        self, job_id: str, since: int = 0, wait_s: float = 10.0, limit: int = 5000
    ) -> dict[str, Any]:
        job = self._job(job_id)
        if job.last_seq <= since and not job.has_told_its_end:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(job.changed.wait(), min(wait_s, 60.0))
        if wait_s and job.last_seq - since < limit:
            await self._pace(job_id)
        trouble = job.log_trouble
        if trouble and self._is_stuck(job):
            trouble += "; training waits for that"
        told = {"status": job.state.status, "trouble": trouble}
        return {"events": job.events_since(since, limit), **told}

    async def _pace(self, job_id: str) -> None:
        """Wait until news of a job may be told again; whoever asks meanwhile is told with it."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._told_at.get(job_id, -math.inf) + COALESCE_S - loop.time())
        if loop.time() >= self._told_at.get(job_id, -math.inf) + COALESCE_S:
            self._told_at[job_id] = loop.time()

    def _machine_of(self, worker: str) -> dict[str, Any]:
        """Return what is known of a worker's machine, as ``WorkerJoined`` has it."""
        facts = self._workers.get(worker)
        node: dict[str, Any] = next((n for n in self._nodes.nodes() if n["worker"] == worker), {})
        machine: dict[str, Any] = {"device": facts.device} if facts else {}
        if node.get("zone"):
            machine |= {
                "machine": node["type"],
                "zone": node["zone"],
                "lifecycle": node["lifecycle"],
                "usd_per_h": node["price_usd_per_h"],
            }
        return machine

    async def _workers_of(self, job_id: str) -> dict[str, Any]:
        records = self._job(job_id).members()
        for record in records:
            facts = self._workers.get(record["worker"])
            record["address"] = facts.address if facts else ""
            record["pid"] = facts.pid if facts else 0
            record |= self._machine_of(record["worker"]) | {"device": record["device"]}
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
        if self._returning is not None:
            raise RequestError(
                f"the scheduler of job {job.order.name} has been started again and waits for the "
                "workers to come back. Nothing was done, and training goes on. Try again in a "
                "moment."
            )
        num_before = self._defects.num_seen
        message = self._requests.do(job, request, args or {})
        self._after_change()
        if self._defects.num_seen > num_before:
            raise RequestError(
                f"{request} met a defect of etrain-jupyter and may be incomplete: "
                f"{self._defects.newest}. The traceback is in the scheduler's log"
            )
        return {"message": message}

    def _job(self, job_id: str) -> HostedJob:
        if job_id not in self._jobs:
            raise UnknownJobError(f"job {job_id} is not on this cluster")
        return self._jobs[job_id]


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
