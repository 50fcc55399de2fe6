"""A whole cluster in one event loop; only Dask's connections are replaced.

The coordinator, the supervisors and their messages, the trainer processes, gloo and the signals are
the product's. The messages that Dask would transport are delivered within this process, encoded
with msgpack as on the wire. A trainer is forked from a process that has imported torch. It starts
in 50 ms instead of 4 s, which makes hundreds of schedules affordable.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest

from etrain_jupyter import launch
from etrain_jupyter.config import parse_mapping
from etrain_jupyter.head.coordinator.coordinator import Coordinator
from etrain_jupyter.head.jobs.hosted_job import HostedJob
from etrain_jupyter.log.event_log import read_events
from etrain_jupyter.log.events import Event
from etrain_jupyter.notebook.job.plan import Plan
from etrain_jupyter.rules.membership import stalls
from etrain_jupyter.testing import FaultPlan
from etrain_jupyter.testing.invariants import assert_invariants
from etrain_jupyter.wire import codec
from etrain_jupyter.wire import messages as m
from etrain_jupyter.wire import requests as q
from etrain_jupyter.wire.versions import WIRE_VERSION
from etrain_jupyter.worker import supervisor
from etrain_jupyter.worker.supervisor import Supervisor
from etrain_jupyter.worker.trainer_process import TrainerProcess
from tests.chaos.trainers import Trainers

PATIENCE_S = 150.0
"""Timeout of every wait: the machine may be busy, and spawned trainers import for seconds."""
START_S = 0.02
"""Start time of a new worker, as on a machine that is already running."""

Message = dict[str, Any]


class RigWorker:
    """The part of Dask's ``Worker`` that a supervisor uses, and the processes it has started."""

    def __init__(self, rig: Rig, name: str, number: int) -> None:
        self.name = name
        self.address = f"tcp://127.0.0.1:{10_000 + number}"
        self.local_directory = str(rig._folder / name)
        self.stream_handlers: dict[str, Callable[..., Any]] = {}
        self.batched_stream = self
        self.supervisor = Supervisor(device="cpu")
        self.supervisor.forks = rig.trainers.forks()
        self.is_gone = False
        self._rig = rig

    async def start(self) -> None:
        """Start its supervisor, which sends hello."""
        await self.supervisor.setup(self)  # type: ignore[arg-type]
        self.stream_handlers["etrain_message"] = self._receive

    def _receive(self, message: Message) -> None:
        """Handle a message without the product's net, so that the rig sees what goes wrong."""
        if self.supervisor._closing:
            return
        if m.FORWARDED.includes(message):
            self.supervisor._forward(message)
        else:
            self.supervisor._handle(m.TO_SUPERVISOR.decode(message))

    def send(self, message: Message) -> None:
        """Send to the scheduler; messages of a removed worker are dropped."""
        rig = self._rig
        rig.deliver(message, self, rig.scheduler.stream_handlers, {"worker": self.address})

    def kill_processes(self) -> None:
        """Kill its trainers, as the loss of a machine would."""
        for trainer in [*self.supervisor._trainers.values(), *self.supervisor._ending]:
            trainer.kill()

    async def close(self) -> None:
        """Stop the worker and all its processes."""
        self.is_gone = True
        trainers = self.supervisor._trainers
        while any(trainer._writer is None for trainer in trainers.values()):
            await asyncio.sleep(0.01)  # cancelling a start would leave a socket open
        await self.supervisor.teardown(self)  # type: ignore[arg-type]


@dataclasses.dataclass
class ToWorker:
    """The scheduler's connection to one worker."""

    rig: Rig
    worker: RigWorker

    def send(self, message: Message) -> None:
        """Send to the worker."""
        self.rig.deliver(message, self.worker, self.worker.stream_handlers, {})


class RigScheduler:
    """The part of Dask's ``Scheduler`` that the coordinator uses."""

    def __init__(self) -> None:
        self.stream_handlers: dict[str, Callable[..., Any]] = {}
        self.handlers: dict[str, Callable[..., Any]] = {}
        self.workers: dict[str, RigWorker] = {}
        self.stream_comms: dict[str, ToWorker] = {}


class Rig:
    """A cluster of up to ``slots`` workers; also the node source of its coordinator."""

    replaces_early = False
    trains_after_notice = False
    finish_by_s: float | None = None

    def __init__(self, folder: Path, trainers: Trainers, *, slots: int = 4) -> None:
        self.scheduler = RigScheduler()
        self.coordinator = Coordinator(self, cluster_id="rig", on_shutdown=lambda: None)
        self.slots = slots
        self.trainers = trainers
        self._folder = folder
        self._workers: dict[str, RigWorker] = {}
        self._numbers = itertools.count()
        self._num_jobs = itertools.count(1)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closing = False
        self.failures: list[BaseException] = []
        """Errors of background work, which ``until`` and ``close`` raise."""
        defects = self.coordinator._defects
        defects.take = self._note_defect  # type: ignore[method-assign]

    def _note_defect(self, job: HostedJob | None, doing: str, exc: Exception) -> None:
        """Record an error that the coordinator tolerates but a test must not."""
        self.failures.append(exc)

    def deliver(
        self,
        message: Message,
        worker: RigWorker,
        handlers: Mapping[str, Callable[..., Any]],
        more: Mapping[str, str],
    ) -> None:
        """Deliver a message from or to a worker like a connection: later, in order, by value."""
        packed = msgpack.packb(message)

        def arrive() -> None:
            if not worker.is_gone:
                content = msgpack.unpackb(packed, strict_map_key=False)
                try:
                    handlers[content.pop("op")](**content, **more)
                except Exception as exc:
                    self.failures.append(exc)

        asyncio.get_running_loop().call_soon(arrive)

    def go(self, work: Any) -> None:
        """Run a coroutine in the background."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._take_end)

    def _take_end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (exc := task.exception()) is not None:
            self.failures.append(exc)

    # --- the node source ---

    def want(self, count: int, *, reason: str) -> None:
        """Start the missing workers."""
        for _ in range(min(count, self.slots) - len(self._workers)):
            number = next(self._numbers)
            worker = self._workers[f"w{number}"] = RigWorker(self, f"w{number}", number)
            self.go(self._start(worker))

    def capacity(self) -> int | None:
        """Return the maximum number of workers."""
        return self.slots

    def nodes(self) -> list[dict[str, Any]]:
        """Return one record per worker."""
        return [{"worker": w.name, "pid": 0, "state": "running"} for w in self._workers.values()]

    def release(self, worker: str, *, drain_s: float) -> None:
        """Release a worker; here the same as killing it."""
        self.kill(worker)

    def note_notice(self, worker: str, *, kind: str, deadline: float = 0.0) -> None:
        """Do nothing: the number of slots is fixed."""

    def kill(self, worker: str) -> None:
        """Kill a worker and all its processes."""
        found = self._workers.pop(worker, None)
        if found is not None:
            found.is_gone = True
            self.go(self._end(found))

    async def _start(self, worker: RigWorker) -> None:
        await asyncio.sleep(START_S)
        if not worker.is_gone and not self._is_closing:
            self.scheduler.workers[worker.address] = worker
            self.scheduler.stream_comms[worker.address] = ToWorker(self, worker)
            await worker.start()

    async def _end(self, worker: RigWorker) -> None:
        worker.kill_processes()
        self.scheduler.stream_comms.pop(worker.address, None)
        self.coordinator.remove_worker(self.scheduler, worker.address)
        self.scheduler.workers.pop(worker.address, None)
        await worker.close()

    # --- jobs ---

    async def submit(self, keys: Mapping[str, Any], *, faults: Sequence[Message] = ()) -> RigJob:
        """Submit a job as ``job.held_jobs`` does."""
        plan = plan_of(keys)
        if self.trainers.warms_up:
            await self._warm_up(plan.config.max_workers() or self.slots)
        number = next(self._num_jobs)
        order = {
            "job_id": f"job-{number}",
            "name": "job",
            "run_dir": str(self._folder / f"job-{number}"),
            "config": plan.config.model_dump(mode="json"),
            **self._put_bundle(plan, f"job-{number}"),
            "pool": "rig",
            "cwd": "",
            "min_workers": plan.config.workers.min,
            "max_workers": plan.config.max_workers(),
            **({"faults": list(faults)} if faults else {}),
        }
        await self.ask(q.SubmitJob(job=order))
        return RigJob(self, order["job_id"], folder=self._folder)

    async def _warm_up(self, count: int) -> None:
        """Start workers and wait for their imports, as in a cluster that is already running."""
        self.want(count, reason="a job is about to come")
        async with asyncio.timeout(PATIENCE_S):
            while not all(w.supervisor.forks.is_ready for w in self._workers.values()):
                await asyncio.sleep(0.02)

    async def resume(self, job: RigJob, keys: Mapping[str, Any], **values: Any) -> RigJob:
        """Resume a job of this rig or of a crashed rig, as ``job.resume`` does."""
        plan = plan_of(keys)
        order = {
            "job_id": job.id,
            "name": "job",
            "run_dir": str(self._folder / job.id),
            "config": plan.config.model_dump(mode="json"),
            **self._put_bundle(plan, job.id),
            "pool": "rig",
            "cwd": "",
            "min_workers": plan.config.workers.min,
            "max_workers": plan.config.max_workers(),
            "resumes": True,
            **values,
        }
        await self.ask(q.SubmitJob(job=order))
        return RigJob(self, job.id, folder=self._folder)

    def _put_bundle(self, plan: Any, job_id: str) -> Message:
        """Write a job's bundle as the kernel does; return the bundle's fields of the order."""
        folder = self._folder / job_id
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "bundle").write_bytes(data := plan.bundle.data)
        return {"bundle_digest": plan.bundle.digest, "bundle_size": len(data)}

    def crash(self, job: RigJob) -> None:
        """Simulate the death of the scheduler process for a job; then close this rig.

        No more events are written, the lock on the log is released as the operating system would
        do, and later messages of the workers are lost.
        """
        job.hosted.job_log.close()
        del self.coordinator._jobs[job.id]

    async def ask(self, request: q.Request[q.R]) -> q.R:
        """Send the coordinator a request, as a kernel does."""
        handler = self.scheduler.handlers[request.op]
        return q.decode_reply(
            request, await handler(**codec.encode_fields(request), wire_version=WIRE_VERSION)
        )

    async def close(self) -> None:
        """Stop everything; raise the first recorded error."""
        self._is_closing = True
        await self.coordinator.close()
        for worker in list(self._workers.values()):
            worker.is_gone = True
            await worker.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await _wait_for_readers()
        if self.failures:
            raise self.failures[0]


class RigJob:
    """A job of the rig: the coordinator's object and the durable log."""

    def __init__(self, rig: Rig, job_id: str, *, folder: Path) -> None:
        self.id = job_id
        self.folder = folder / job_id
        self._rig = rig

    @property
    def hosted(self) -> HostedJob:
        """The coordinator's own object."""
        return self._rig.coordinator._jobs[self.id]

    @property
    def step(self) -> int:
        """Newest step in the log."""
        return self.hosted.record.logged_step

    @property
    def status(self) -> str:
        """The job's status."""
        return self.hosted.state.status

    @property
    def ranks(self) -> list[str]:
        """Workers of the current generation in rank order; empty if it is not training."""
        state = self.hosted.state
        members = [state.members.get(name) for name in self.hosted.messages.step_clock.ranks]
        if state.phase != "running" or not all(m and m.formed for m in members):
            return []
        return [m.worker for m in members if m]

    @property
    def is_ended(self) -> bool:
        """Whether it has ended."""
        return self.hosted.state.is_ended

    def events(self) -> list[Event]:
        """Return all events of the durable log."""
        return list(read_events(self.folder / "events.jsonl"))

    def found(self, kind: type[Event]) -> list[Any]:
        """Return the events of one kind."""
        return [event for event in self.events() if isinstance(event, kind)]

    async def request(self, request: str, **args: Any) -> str:
        """Send a request to the job."""
        control = q.ControlJob(job_id=self.id, request=request, args=args)
        return (await self._rig.ask(control)).message

    async def until(self, condition: Callable[[], Any], patience_s: float = PATIENCE_S) -> Any:
        """Wait until a condition holds; it is evaluated whenever the log grows."""
        deadline = time.monotonic() + patience_s
        while not (found := condition()):
            if self._rig.failures:
                raise self._rig.failures[0]
            left = deadline - time.monotonic()
            assert left > 0, f"still {self.status} at step {self.step}: {self.describe()}"
            changed = self.hosted.job_log.changed
            try:
                await asyncio.wait_for(changed.wait(), min(left, 0.25))
            except TimeoutError:
                continue
        return found

    async def end(self, patience_s: float = PATIENCE_S) -> list[Event]:
        """Wait until the job has ended and return its log."""
        await self.until(lambda: self.is_ended, patience_s)
        return self.events()

    def describe(self) -> str:
        """Return the last lines of the log, for a failure message."""
        lines = [
            f"{e.time % 1000:7.3f} g{e.generation} {e}"[:300]
            for e in self.events()
            if e.kind not in ("StepCompleted", "WeightsHashed")
        ]
        return "\n".join(["", str(self.hosted.state), *lines[-60:]])


MakeRig = Callable[..., AbstractAsyncContextManager[Rig]]
"""Type of ``make_rig``, for tests that open several rigs."""


@asynccontextmanager
async def make_rig(trainers: Trainers, folder: Path, *, slots: int = 4) -> AsyncIterator[Rig]:
    """Provide a cluster; at the end all its processes must have exited."""
    rig = Rig(folder, trainers, slots=slots)
    limits = trainers.limits
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervisor, "_commit_fault", _commit_fault)
        patch.setattr(supervisor, "BEAT_S", limits.beat_s)
        patch.setattr(stalls, "RESTORE_PATIENCE", limits.restore_patience)
        patch.setattr(stalls, "WARM_UP_PATIENCE", limits.warm_up_patience)
        try:
            await rig.coordinator.start(rig.scheduler)  # type: ignore[arg-type]
            yield rig
        finally:
            try:
                await rig.close()
            finally:
                await trainers.detach()


_commit_fault_of_trainer = supervisor._commit_fault


def _commit_fault(trainer: TrainerProcess, kind: str) -> None:
    """Leave killing a whole worker to the node source: here all workers are in this process."""
    if kind != "kill_worker":
        _commit_fault_of_trainer(trainer, kind)


async def _wait_for_readers() -> None:
    """Wait until all output of the trainers has been read."""
    reading = [t for t in asyncio.all_tasks() if "TrainerProcess." in t.get_coro().__qualname__]
    if reading:
        await asyncio.wait(reading, timeout=10)


_plans: dict[str, Plan] = {}


def plan_of(keys: Mapping[str, Any]) -> Plan:
    """Validate and bundle a job; the result is cached by its keys."""
    text = repr(sorted(keys.items(), key=lambda item: item[0]))
    if text not in _plans:
        _plans[text] = launch.plan_job(parse_mapping(dict(keys), {}), {})
    return _plans[text]


async def run_job(rig: Rig, body: dict[str, Any], faults: FaultPlan | None = None) -> RigJob:
    """Train a job to its end, and assert that it has finished with a valid log."""
    job = await rig.submit(body, faults=faults.to_list() if faults is not None else ())
    await job.end()
    assert job.status == "finished", job.describe()
    assert_invariants(job.events())
    return job
