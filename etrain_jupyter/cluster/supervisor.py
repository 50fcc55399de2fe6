"""The supervisor: a Dask worker plugin that starts, feeds, watches and kills trainers."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

from distributed import Worker, WorkerPlugin
from distributed.comm.addressing import get_address_host

from etrain_jupyter.cluster.trainer_process import TrainerProcess
from etrain_jupyter.ranks.channel import Message

logger = logging.getLogger("etrain.supervisor")

SPARE_DELAY_S = 4.0
"""How long after a spare was used the next one is started: its imports must not compete with a
job's first steps."""

RELEASE_TIMEOUT_S = 60.0
"""How long a released trainer may take to end by itself: it may be writing a checkpoint."""


class Supervisor(WorkerPlugin):
    """Keeps one warm spare trainer and runs the trainers that the coordinator orders.

    It shares its process with nothing that computes, so that a trainer which holds the GIL or
    hangs does not make the machine look dead.
    """

    name = "etrain-supervisor"

    def __init__(self, *, device: str = "cpu") -> None:
        self._device = device
        self._trainers: dict[str, TrainerProcess] = {}
        self._ending: set[TrainerProcess] = set()
        self._spare: TrainerProcess | None = None
        self._spare_pid = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing = False

    async def setup(self, worker: Worker) -> None:
        """Say hello to the coordinator and warm up a spare."""
        self._worker = worker
        worker.stream_handlers["etrain_order"] = self._take_order
        self._report({"op": "supervisor", "device": self._device, "pid": os.getpid()})
        await self._start_spare()

    async def teardown(self, worker: Worker) -> None:
        """Kill whatever trainers are left; the worker is closing."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        running = [*self._trainers.values(), *self._ending, *([self._spare] if self._spare else [])]
        for trainer in running:
            trainer.kill("its worker is closing")
        for trainer in running:
            await trainer.wait()

    # --- orders ---

    def _take_order(self, message: Message) -> None:
        op = message["op"]
        if op == "start":
            self._go(self._start_trainer(message))
            return
        trainer = self._trainers.get(message["trainer"])
        if trainer is None:
            return
        if op == "kill":
            trainer.kill(message["why"])
        elif op == "tell":
            trainer.send(message["message"])
            if message["message"]["op"] == "release":
                # It ends by itself, perhaps after a checkpoint; its end is no news any more.
                self._ending.add(self._trainers.pop(trainer.name))
                self._go(self._kill_later(trainer))

    async def _kill_later(self, trainer: TrainerProcess) -> None:
        await asyncio.sleep(RELEASE_TIMEOUT_S)
        trainer.kill("it did not end when released")

    async def _start_trainer(self, order: Message) -> None:
        trainer, self._spare = self._spare, None
        if trainer is None:
            trainer = await self._spawn()
        trainer.name = order["trainer"]
        self._trainers[trainer.name] = trainer
        host = get_address_host(self._worker.address)
        trainer.send({**order, "host": host})
        self._report({"op": "started", "trainer": trainer.name, "pid": trainer.pid})
        self._go(self._start_spare(SPARE_DELAY_S))

    async def _start_spare(self, delay_s: float = 0.0) -> None:
        await asyncio.sleep(delay_s)
        if self._spare is None and not self._closing:
            self._spare = TrainerProcess(on_message=self._on_message, on_exit=self._on_exit)
            await self._spare.start()

    async def _spawn(self) -> TrainerProcess:
        trainer = TrainerProcess(on_message=self._on_message, on_exit=self._on_exit)
        await trainer.start()
        return trainer

    # --- reports ---

    def _on_message(self, trainer: TrainerProcess, message: Message) -> None:
        if trainer.name:
            self._report({**message, "trainer": trainer.name})
        elif message["op"] == "log":
            logger.warning("spare trainer %d: %s", trainer.pid, message["text"])

    def _on_exit(self, trainer: TrainerProcess, cause: str) -> None:
        self._ending.discard(trainer)
        if trainer is self._spare:
            self._spare = None
            self._go(self._start_spare(SPARE_DELAY_S))
        if self._trainers.pop(trainer.name, None) is not None:
            self._report({"op": "exited", "trainer": trainer.name, "cause": cause})

    def _report(self, message: Message) -> None:
        if not self._closing:
            self._worker.batched_stream.send({"op": "etrain_report", "message": message})

    def _go(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
