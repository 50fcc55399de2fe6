"""Processor time of the coordinator for each kind of message, without a network.

The messages of N supervisors and their trainers are passed to a real coordinator, which sends its
own messages nowhere. Unlike the rest of the benchmark ``scale``, this needs one process and no
other core, so it measures 1,000 workers on any machine.
"""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.scale.trainer import PLAN, VALUES
from etrain_jupyter.bundle.restore import HEADER
from etrain_jupyter.head.coordinator.coordinator import Coordinator
from etrain_jupyter.head.coordinator.nodes import NoNodes
from etrain_jupyter.wire import messages as m
from etrain_jupyter.wire import requests as q
from etrain_jupyter.wire.codec import encode
from etrain_jupyter.wire.versions import read_fingerprint

TICKS = 20
BUNDLE = HEADER.pack(13) + b'{"cells": {}}'


class Sent:
    """A connection that only counts."""

    num = 0

    def send(self, frame: Any) -> None:
        """Count a message."""
        Sent.num += 1


def measure_handlers(num: int) -> dict[str, float]:
    """Return processor seconds by phase, from the first hello to a recovery of ``num`` workers."""
    with tempfile.TemporaryDirectory(prefix="etrain-scale-") as folder:
        return asyncio.run(_Head(num).run(Path(folder)))


class _Head:
    def __init__(self, num: int) -> None:
        self._names = [f"w{number:04}" for number in range(num)]
        self._numbers = dict.fromkeys(self._names, 0)
        self._trainers: dict[str, str] = {}
        self._spent: dict[str, float] = {}
        coordinator = Coordinator(NoNodes(), cluster_id="c", on_shutdown=lambda: None)
        addresses = {f"tls://{name}": name for name in self._names}
        workers = {address: SimpleNamespace(name=name) for address, name in addresses.items()}
        streams = {address: Sent() for address in addresses}
        scheduler: Any = SimpleNamespace(
            workers=workers, stream_comms=streams, stream_handlers={}, handlers={}
        )
        coordinator.register(scheduler)
        self.coordinator: Any = coordinator

    async def run(self, folder: Path) -> dict[str, float]:
        """Pass the messages of all phases."""
        names, victim = self._names, self._names[len(self._names) // 2]
        hello = m.SupervisorHello(device="cpu", pid=1, fingerprint=read_fingerprint(), trainers={})
        self._time("hellos", lambda: self._say_all((name, hello) for name in names))
        (folder / "bundle").write_bytes(BUNDLE)
        job = {"job_id": "j", "name": "j", "run_dir": str(folder), "config": {}}
        bundle = {"bundle_digest": hashlib.sha256(BUNDLE).hexdigest(), "bundle_size": len(BUNDLE)}
        bounds = {"min_workers": 1, "max_workers": len(names)}
        await self.coordinator._kernel_requests.submit(q.SubmitJob(job={**job, **bundle, **bounds}))
        self._trainers = {x.worker: x.trainer for x in self._job.state.members.values()}
        warm = {"pid": 7, "device": "cpu", "warm_s": 1.0, "plan": PLAN}
        self._time("trainers' hellos", lambda: self._report(names, m.TrainerHello, **warm))
        self._form("first", names)
        beats = [(name, m.Heartbeat(trainers={self._trainers[name]: PAGE})) for name in names]
        self._time("heartbeats", lambda: self._say_all(beats))
        self._time("ticks", lambda: [self.coordinator.tick() for _ in range(TICKS)])
        left = [name for name in names if name != victim]
        self._time("loss", lambda: self._lose(f"tls://{victim}"))
        report = {"progress": (0, 0), "why": "failed", "undone": True}
        self._time("reports", lambda: self._report(left, m.GenerationLeft, **report))
        self._form("next", left)
        return self._spent

    @property
    def _job(self) -> Any:
        return self.coordinator._jobs["j"]

    def _form(self, which: str, names: list[str]) -> None:
        sent = Sent.num
        for topic, value in VALUES.items():
            keys = {"topic": topic, "value": value(len(names))}
            self._time(f"{which} keys", partial(self._report, names, m.RankKey, **keys))
        assert Sent.num - sent == 2 * len(names)
        joined = {"connect_s": 0.1, "wrap_s": 0.001}
        self._time(f"{which} joined", lambda: self._report(names, m.GenerationJoined, **joined))
        assert self._job.state.current.is_ready

    def _lose(self, address: str) -> None:
        if (wait := self.coordinator.remove_worker(None, address)) is not None:
            wait.close()  # no scheduler waits to tell the others

    def _time(self, phase: str, work: Callable[[], Any]) -> None:
        started = time.process_time()
        work()
        self._spent[phase] = self._spent.get(phase, 0.0) + time.process_time() - started

    def _report(self, names: Iterable[str], kind: type[m.TrainerReport], **values: Any) -> None:
        for name in names:
            self._numbers[name] += 1
            report = kind(
                trainer=self._trainers[name],
                generation=self._job.state.generation,
                number=self._numbers[name],
                **values,
            )
            self._say_all([(name, report)])

    def _say_all(self, messages: Iterable[tuple[str, m.Message]]) -> None:
        for name, message in messages:
            self.coordinator._receive(encode(message), f"tls://{name}")


PAGE = m.PageCopy(generation=1, step=0, collectives=3, beats=1, phase="computing", alive_age_s=0.1)
