"""A coordinator without a network: supervisors are names, their messages are typed in."""

from __future__ import annotations

import errno
import hashlib
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from etrain_jupyter.bundle.restore import HEADER
from etrain_jupyter.head.coordinator import clock
from etrain_jupyter.head.coordinator.coordinator import Coordinator
from etrain_jupyter.head.coordinator.defects import Defects
from etrain_jupyter.head.jobs.hosted_job import HostedJob
from etrain_jupyter.log.event_log import EventLog
from etrain_jupyter.log.events import Event, event_from_dict
from etrain_jupyter.storage.bucket_log.locations import spool_of
from etrain_jupyter.wire import codec
from etrain_jupyter.wire import messages as m
from etrain_jupyter.wire import requests as q
from etrain_jupyter.wire.versions import read_fingerprint
from tests.unit.log.spent import PLAIN_STEP

NO_CELLS = b'{"cells": {}}'
BUNDLE = HEADER.pack(len(NO_CELLS)) + NO_CELLS
HELLO: dict[str, Any] = {
    "device": "cpu",
    "pid": 1,
    "fingerprint": read_fingerprint(),
    "trainers": {},
}
PLAN = {
    "num_train_samples": 64,
    "num_eval_samples": 0,
    "global_batch_size": 16,
    "steps_per_epoch": 4,
    "total_steps": 8,
    "total_samples": 128,
    "num_parameters": 10,
    "num_trained_parameters": 10,
}


def put_bundle(order: dict[str, Any], data: bytes = BUNDLE) -> dict[str, Any]:
    """Write a job's bundle as the kernel does; return what the order says of it."""
    folder = spool_of(order["place"]) if order.get("place") else Path(order["run_dir"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bundle").write_bytes(data)
    return {"bundle_digest": hashlib.sha256(data).hexdigest(), "bundle_size": len(data)}


class Nodes:
    """A node source that only remembers."""

    replaces_early = False
    trains_after_notice = False
    finish_by_s: float | None = None

    def __init__(self) -> None:
        self.killed: list[str] = []
        self.released: list[str] = []
        self.noticed: list[tuple[str, str]] = []
        self.wanted = 0
        self.most: int | None = None
        self.records: list[dict[str, Any]] = []

    def want(self, count: int, *, reason: str) -> None:
        self.wanted = count

    def capacity(self) -> int | None:
        return self.most

    def nodes(self) -> list[dict[str, Any]]:
        return self.records

    def release(self, worker: str, *, drain_s: float) -> None:
        self.released.append(worker)

    def kill(self, worker: str) -> None:
        self.killed.append(worker)

    def note_notice(self, worker: str, *, kind: str, deadline: float = 0.0) -> None:
        self.noticed.append((worker, kind))


class Disk:
    """Refuses to write one log while it is full."""

    def __init__(self, monkeypatch: Any) -> None:
        self.is_full = False
        self.error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write = EventLog._write

        def refuse(log: EventLog, data: bytes) -> None:
            if self.is_full:
                os.write(log._file, data[: len(data) // 2])  # as a disk that is nearly full
                raise self.error
            write(log, data)

        monkeypatch.setattr(EventLog, "_write", refuse)


class Stream:
    """The scheduler's connection to one worker."""

    def __init__(self) -> None:
        self.orders: list[Any] = []

    def send(self, frame: dict[str, Any]) -> None:
        assert frame["op"] == "etrain_message"
        is_forwarded = m.FORWARDED.includes(order := frame["message"])
        vocabulary = m.FORWARDED if is_forwarded else m.TO_SUPERVISOR
        self.orders.append(vocabulary.decode(order))


def _refuse(self: Defects, job: HostedJob | None, doing: str, exc: Exception) -> None:
    """Let a test fail over a defect, which the product survives."""
    raise exc


TAKE_DEFECT = Defects.take
"""What the product does with a defect."""


class Rig:
    """One coordinator, its workers, and a clock that the test moves."""

    def __init__(self, folder: Path, monkeypatch: Any) -> None:
        self.now = 1000.0
        self.wall_ahead_s = 0.0
        """How far the wall clock was set ahead, or back."""
        monkeypatch.setattr(time, "time", lambda: self.now + self.wall_ahead_s)
        # Of another epoch, so that an instant of the wrong clock shows.
        monkeypatch.setattr(clock, "now", lambda: self.now + 500_000.0)
        monkeypatch.setattr(Defects, "take", _refuse)
        self._monkeypatch = monkeypatch
        self.folder = folder
        self.nodes = Nodes()
        self.streams: dict[str, Stream] = {}
        self.coordinator = Coordinator(self.nodes, cluster_id="c", on_shutdown=lambda: None)
        scheduler = SimpleNamespace(
            workers={}, stream_comms=self.streams, stream_handlers={}, handlers={}
        )
        self.coordinator.register(scheduler)  # type: ignore[arg-type]

    def survive_defects(self) -> None:
        """Let the coordinator do with a defect what the product does."""
        self._monkeypatch.setattr(Defects, "take", TAKE_DEFECT)

    def hello(self, *names: str, incarnation: int = 0, **more: Any) -> None:
        for name in names:
            self.coordinator._scheduler.workers[f"tls://{name}"] = SimpleNamespace(name=name)
            self.streams.setdefault(f"tls://{name}", Stream())
            self.say(name, m.SupervisorHello(**{**HELLO, "incarnation": incarnation, **more}))

    def say(self, worker: str, message: m.Message) -> None:
        self.coordinator._receive(codec.encode(message), f"tls://{worker}")

    async def submit(self, *, min_workers: int = 1, max_workers: int = 4, **values: Any) -> None:
        order = {
            **{"job_id": "j", "name": "job", "run_dir": str(self.folder / "j"), "config": {}},
            **{"min_workers": min_workers, "max_workers": max_workers},
            **values,
        }
        order |= put_bundle(order)
        submit = self.coordinator._handlers()[q.SubmitJob]  # of the coordinator, or of a guest
        reply = await submit(q.SubmitJob(job=order))
        assert reply == q.Submitted(job_id=order["job_id"])

    @property
    def job(self) -> HostedJob:
        return self.coordinator._jobs["j"]

    def trainer(self, worker: str) -> str:
        member = self.job.state.of_worker(worker)
        assert member is not None
        return member.trainer

    def tell(self, worker: str, kind: type[m.TrainerReport], **values: Any) -> None:
        """Have a worker's trainer send a report, in the current generation."""
        name = values.pop("trainer", None) or self.trainer(worker)
        common = {"generation": self.job.state.generation, "trainer": name}
        self.say(worker, kind(**{**common, **values}))

    def save(self, worker: str, step: int, **values: Any) -> None:
        """Have a worker's trainer, or a former one, report a checkpoint."""
        record = {"step": step, "manifest": "m", "size_bytes": 1, "stall_s": 0.0, "duration_s": 0.1}
        self.tell(worker, m.CheckpointWritten, record=record, **values)

    def warm(self, *workers: str, **values: Any) -> None:
        for worker in workers:
            told = {"pid": 7, "device": "cpu", "warm_s": 1.0, "plan": PLAN}
            self.tell(worker, m.TrainerHello, **{**told, **values})

    async def start(self, *workers: str, **values: Any) -> None:
        """Submit a job that trains on these workers."""
        self.hello(*workers)
        await self.submit(max_workers=len(workers), **values)
        self.warm(*workers)
        for worker in workers:
            self.tell(worker, m.GenerationJoined, connect_s=0.01, sync_s=0.0, wrap_s=0.001)

    def commit(self, worker: str, *steps: int) -> None:
        records = [self.step_record(step) for step in steps]
        self.tell(worker, m.StepsTrained, records=tuple(records))

    def report(self, worker: str, step: int, why: str = "failed") -> None:
        self.tell(worker, m.GenerationLeft, progress=(step, 0), why=why, undone=False)

    def beat(self, worker: str, **page: Any) -> None:
        generation = self.job.state.generation
        seen = {"generation": generation, "step": 0, "collectives": 0, "beats": 0}
        told = {**seen, "phase": "computing", "alive_age_s": 0.1, "process": "", **page}
        self.say(worker, m.Heartbeat(trainers={self.trainer(worker): m.PageCopy(**told)}))

    def tick(self, seconds: float = 0.25) -> None:
        self.now += seconds
        self.coordinator.tick()

    def orders(self, worker: str, kind: type[m.Message]) -> list[Any]:
        """Return the messages of one kind that a worker's supervisor got."""
        sent = self.streams[f"tls://{worker}"].orders
        return [message for message in sent if isinstance(message, kind)]

    told = orders

    async def control(self, request: str, args: dict[str, Any] | None = None) -> str:
        """Send the job a request, as a kernel does."""
        control = q.ControlJob(job_id="j", request=request, args=args)
        return (await self.coordinator._kernel_requests.control(control)).message

    async def fetch(self, since: int = 0, **values: Any) -> q.EventBatch:
        """Fetch events of the job, as a kernel does."""
        request = q.FetchEvents(job_id="j", since=since, **values)
        return await self.coordinator._kernel_requests.fetch_events(request)

    def step_record(self, step: int) -> dict[str, Any]:
        """Return the record of one step, of the current generation."""
        return {
            **{"generation": self.job.state.generation, "time": self.now, "step": step},
            **{"epoch": 0, "first": 0, "samples": 16, "sample_checksum": 1, "loss": 1.0},
            **{"lr": 0.1, "world_size": 2, "samples_per_s": 160.0, **PLAIN_STEP},
        }

    def events(self, kind: type[Event]) -> list[Any]:
        found = [event_from_dict(data) for data in self.job.job_log.since(0, 10_000)]
        return [event for event in found if isinstance(event, kind)]
