"""Simulated workers of the benchmark ``scale``: real supervisors whose trainers only sleep.

A worker has the two connections of a Dask worker (its stream, and the RPCs for Dask's heartbeats)
and a real ``Supervisor``. Its trainer is an object in this process, which sends what a trainer
sends. Several hundred workers share a process.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dask.config
from distributed.batched import BatchedSend
from distributed.comm.core import connect
from distributed.core import rpc

from benchmarks.scale.trainer import SleepingTrainer, Steps
from etrain_jupyter.process.entry import collect_garbage_rarely
from etrain_jupyter.process.peers import (
    FrameReader,
    decode_plain,
    pinned_to_scheduler,
    read_plain_values_only,
)
from etrain_jupyter.process.tls import configure_dask, read_security
from etrain_jupyter.worker.forks import Forks
from etrain_jupyter.worker.supervisor import Supervisor

_DASK: Any = SimpleNamespace(BatchedSend=BatchedSend, connect=connect, rpc=rpc)  # without types

CONNECT_TIMEOUT = "120s"
"""Hundreds of TLS handshakes share two cores, perhaps with other processes."""

CONNECTING = 8
"""Workers of a process that connect at the same time."""

METRICS: dict[str, Any] = {
    **{"memory": 1e8, "cpu": 1.0, "time": 0.0, "managed_bytes": 0, "event_loop_interval": 0.02},
    **{"host_net_io": {"read_bps": 0.0, "write_bps": 0.0}, "digests_total_since_heartbeat": {}},
    **{"task_counts": {}, "executing": {}, "spilled_bytes": {"memory": 0, "disk": 0}, "num_fds": 9},
    "transfer": {
        **{"incoming_bytes": 0, "incoming_count": 0, "incoming_count_total": 0},
        **{"outgoing_bytes": 0, "outgoing_count": 0, "outgoing_count_total": 0},
    },
    "bandwidth": {"total": 1e8, "workers": {}, "types": {}},
}
"""What a Dask worker reports with each of its own heartbeats."""


class NoForks(Forks):
    """Starts no fork server."""

    def warm_up(self) -> None:
        """Do nothing."""


class SimulatedSupervisor(Supervisor):
    """A supervisor whose trainers are objects in this process."""

    def __init__(self, steps: Steps) -> None:
        super().__init__()
        self.steps = steps
        self.forks = NoForks()

    def _new_trainer(self, name: str) -> Any:
        return SleepingTrainer(name, self._on_message, self._on_exit, self.steps)


class SimulatedWorker:
    """The part of a Dask worker that a supervisor uses."""

    def __init__(
        self, number: int, scheduler: str, arguments: dict[str, Any], steps: Steps
    ) -> None:
        self.name = f"w{number:04}"
        self.address = f"tls://127.0.0.1:{20_000 + number}"
        self.local_directory = "/nonexistent"
        self.stream_handlers: dict[str, Any] = {}
        self.batched_stream = _DASK.BatchedSend(interval="2ms")
        self.num_received = 0
        self.supervisor = SimulatedSupervisor(steps)
        self._where, self._arguments = scheduler, arguments
        self.scheduler = _DASK.rpc(scheduler, connection_args=arguments)

    async def connect(self) -> None:
        """Register with the scheduler, and start the supervisor."""
        self.comm = comm = await _DASK.connect(self._where, **self._arguments)
        await comm.write(
            {
                **{"op": "register-worker", "reply": False, "address": self.address},
                **{"status": "running", "nthreads": 1, "name": self.name, "now": time.time()},
                **{"resources": {}, "memory_limit": 0, "local_directory": "", "services": {}},
                **{"nanny": None, "pid": os.getpid(), "versions": {}, "extra": {}},
                **{"stimulus_id": self.name, "server_id": self.name, "metrics": METRICS},
            },
            serializers=["msgpack"],
        )
        answer = await comm.read(deserializers=["msgpack"])
        assert answer["status"] == "OK", answer
        self.batched_stream.start(comm)
        await self.supervisor.setup(self)  # type: ignore[arg-type]
        self._tasks = [asyncio.create_task(work()) for work in (self._read, self._beat)]

    async def _read(self) -> None:
        # As the workers' own cost is not measured, the cheapest way: they share the machine.
        reader = FrameReader(self.comm, decode_plain)
        while True:
            try:
                messages = await reader.read()
            except OSError:
                return
            for message in messages if isinstance(messages, list | tuple) else (messages,):
                self.num_received += 1
                if message.get("op") == "etrain_message":
                    self.stream_handlers["etrain_message"](message["message"])

    async def _beat(self) -> None:
        """Send Dask's own heartbeats, at the interval that the scheduler sets."""
        interval_s = 1.0
        await asyncio.sleep(int(self.name[1:]) % 50 / 50)
        while True:
            reply = await self.scheduler.heartbeat_worker(
                address=self.address,
                now=time.time(),
                metrics=METRICS,
                executing={},
                extensions={},
            )
            interval_s = reply.get("heartbeat-interval", interval_s)
            await asyncio.sleep(interval_s)

    def kill(self) -> None:
        """Close the connection, like a worker process that is killed with its trainer."""
        self.supervisor._closing = True
        for task in (*self._tasks, *self.supervisor._tasks):
            task.cancel()
        self.comm.abort()


async def serve(folder: Path, scheduler: str, first: int, count: int, steps: Steps) -> None:
    """Connect the workers, then obey the commands on standard input."""
    arguments = pinned_to_scheduler(
        read_security(folder / "tls", "worker").get_connection_args("worker")
    )
    workers = {}
    slots = asyncio.Semaphore(CONNECTING)

    async def begin(number: int) -> None:
        worker = SimulatedWorker(number, scheduler, dict(arguments), steps)
        async with slots:
            await worker.connect()
        workers[worker.name] = worker

    await asyncio.gather(*(begin(number) for number in range(first, first + count)))
    print(json.dumps({"connected": count}), flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command = json.loads(line)
        reply: dict[str, Any] = {}
        match command["do"]:
            case "kill":
                workers.pop(command["worker"]).kill()
                reply = {"killed_at": time.time()}
            case "rate":
                steps.rate, steps.records = command["rate"], command["records"]
            case "counts":
                seen = [worker.num_received for worker in workers.values()]
                sent = sum(worker.supervisor._outbox.newest for worker in workers.values())
                reply = {"received": sum(seen), "reports": sent, "beats": steps.num_beats}
                reply |= {"last": steps.last, "generation": steps.generation}
        print(json.dumps(reply), flush=True)


def main() -> None:
    """Run until the parent closes this process's standard input."""
    folder, scheduler, first, count, rate, *keys = sys.argv[1:]
    configure_dask(Path(folder) / "scratch")
    dask.config.set({"distributed.comm.timeouts.connect": CONNECT_TIMEOUT})
    read_plain_values_only()
    collect_garbage_rarely()
    steps = Steps(float(rate), has_keys=bool(keys))
    asyncio.run(serve(Path(folder), scheduler, int(first), int(count), steps))


if __name__ == "__main__":
    main()
