"""The supervisor: a Dask worker plugin that starts, feeds, watches and kills trainers."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

from distributed import Worker, WorkerPlugin
from distributed.comm.addressing import get_address_host
from distributed.comm.core import CommClosedError

from etrain_jupyter.wire.channel import Message
from etrain_jupyter.wire.versions import read_fingerprint
from etrain_jupyter.worker.bundles import BundleFetchError, MachineBundles, folder_of
from etrain_jupyter.worker.outbox import Outbox, TrainerReport
from etrain_jupyter.worker.preemption_watch import OwnNotices
from etrain_jupyter.worker.trainer_process import TrainerProcess

logger = logging.getLogger("etrain.supervisor")

SPARE_DELAY_S = 4.0
"""How long after a spare was used the next one is started: its imports must not compete with a
job's first steps."""

RELEASE_TIMEOUT_S = 60.0
"""How long a released trainer may give no sign of life: it may be writing a checkpoint."""

RELEASE_LIMIT_S = 900.0
"""How long it may take to end by itself at most, signs or not."""


BEAT_S = 1.0
"""How often it tells that it lives, and how far its trainers are."""

FROZEN_S = 1.5
"""From which age of a trainer's pulse on the system is asked what has become of its process."""

FETCH_S = 30.0
"""Timeout in seconds of one piece of a bundle."""

FETCH_PATIENCE_S = 90.0
"""How long a piece is asked for again; longer than a scheduler takes to be started again."""

BY_SIGNAL = {"stop": signal.SIGSTOP, "segfault": signal.SIGSEGV}
"""Faults on purpose that need no help of the trainer; the others it commits itself."""


class Supervisor(WorkerPlugin):
    """Keeps one warm spare trainer and runs the trainers that the coordinator orders.

    It shares its process with nothing that computes, so that a trainer which holds the GIL or
    hangs does not make the machine look dead.

    Args:
        device: Where its trainers compute, as torch says it.
        rests: Whether it costs nothing until the coordinator wakes it: no spare, no sign of life.
            For workers that somebody else uses as well.
    """

    name = "etrain-supervisor"

    outlives_scheduler = False
    """Whether the trainers are kept when a connection ends, because this process will have another
    one; set by whoever sees to that."""

    def __init__(self, *, device: str = "cpu", rests: bool = False) -> None:
        self._device = device
        self._is_awake = not rests
        self._beating: asyncio.Task[None] | None = None
        self._trainers: dict[str, TrainerProcess] = {}
        self._ending: set[TrainerProcess] = set()
        self._spare: TrainerProcess | None = None
        self._incarnation = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing = False
        self._is_connected = False
        self._outbox = Outbox()
        self._notices = OwnNotices(self._send)
        self._bundles = MachineBundles(self._fetch_bundle)
        self._standings: dict[str, TrainerReport] = {}
        """Of the trainers that run, and of those whose end nobody has heard of."""
        self._may_read = asyncio.Event()
        """Whether what trainers say is read: no more than can be kept."""
        self._may_read.set()

    async def setup(self, worker: Worker) -> None:
        """Say hello to the coordinator, with what it has missed, and warm up a spare."""
        self._worker = worker
        worker.stream_handlers["etrain_order"] = self._take_order
        self._is_connected = True
        self._bundles.begin(folder_of(worker.local_directory))
        self._notices.start()
        self._say_hello()
        for message in self._outbox.unheard():
            self._send(message)
        if self._is_awake:
            self._beating = self._go(self._beat(worker))
            await self._start_spare()

    def _say_hello(self) -> None:
        facts = {"device": self._device, "pid": os.getpid(), "incarnation": self._incarnation}
        trainers = {name: known.to_dict() for name, known in self._standings.items()}
        versions = {"fingerprint": read_fingerprint()}
        self._send({"op": "supervisor", **facts, **versions, "trainers": trainers})
        self._notices.tell_again()

    async def teardown(self, worker: Worker) -> None:
        """Kill whatever trainers are left, unless only the connection ends."""
        self._is_connected = False
        if self.outlives_scheduler:
            return
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await self._notices.stop()
        running = [*self._trainers.values(), *self._ending, *([self._spare] if self._spare else [])]
        for trainer in running:
            trainer.kill("its worker is closing")
        for trainer in running:
            await trainer.wait()
        self._bundles.release_all()

    # --- orders ---

    def _take_order(self, message: Message) -> None:
        if self._closing:
            return  # the worker goes on without us, and orders may have been under way
        try:
            self._carry_out(message)
        except Exception:
            # Dask would close the connection, and end all trainers with it.
            logger.exception("the order %r could not be carried out", message.get("op"))

    def _carry_out(self, message: Message) -> None:
        op = message["op"]
        if op == "ack":
            self._take_acknowledgement(message["n"])
            return
        if op in ("wake", "rest"):
            self._wake() if op == "wake" else self._rest()
            return
        if op == "start":
            self._go(self._start_trainer(message))
            return
        if op == "forget_bundle":
            self._bundles.release(message["digest"])
            return
        if op == "reset":
            if message["incarnation"] == self._incarnation:
                self._incarnation += 1  # it may be told again before all trainers have ended
                self._go(self._begin_anew())
            return
        trainer = self._trainers.get(message["trainer"])
        if trainer is None:
            return
        if op == "kill":
            self._go(self._kill(trainer, message))
        elif op == "stacks":
            self._go(trainer.tell_stacks())
        elif op == "fault":
            _commit_fault(trainer, message["kind"])
        elif op == "tell":
            trainer.send(message["message"])
            if trainer.name in self._standings:
                self._standings[trainer.name].hear_order(message["message"])
            if message["message"]["op"] == "release":
                self._standings.pop(trainer.name, None)
                # It ends by itself, perhaps after a checkpoint; its end is no news any more.
                self._ending.add(self._trainers.pop(trainer.name))
                self._go(self._kill_later(trainer))

    def _wake(self) -> None:
        """Beat, and warm up a spare once the trainers that are ordered now have begun."""
        if not self._is_awake:
            self._is_awake = True
            self._beating = self._go(self._beat(self._worker))
            self._go(self._start_spare(SPARE_DELAY_S))

    def _rest(self) -> None:
        """Cost nothing until somebody has a job again."""
        self._is_awake = False
        if self._beating is not None:
            self._beating.cancel()
        spare, self._spare = self._spare, None
        if spare is not None:
            self._ending.add(spare)
            spare.kill("nobody needs it")

    def _take_acknowledgement(self, number: int) -> None:
        self._outbox.acknowledge(number)
        for name, known in list(self._standings.items()):
            if 0 < known.ended_with <= number:
                del self._standings[name]
        if not self._outbox.is_full:
            self._may_read.set()

    async def _kill(self, trainer: TrainerProcess, order: Message) -> None:
        try:
            if order["stacks"]:
                await trainer.tell_stacks()
        finally:  # the others wait for its end, whatever can be told of it
            trainer.kill(order["why"])

    async def _begin_anew(self) -> None:
        """End all trainers and come back as a new worker: this one was given up meanwhile."""
        logger.warning("given up by the coordinator: beginning anew")
        ending = [*self._trainers.values(), *self._ending]
        self._trainers.clear()
        self._standings.clear()
        self._ending.update(ending)
        for trainer in ending:
            trainer.kill("its worker was given up")
        for trainer in ending:
            await trainer.wait()
        self._bundles.release_all()
        self._say_hello()

    async def _kill_later(self, trainer: TrainerProcess) -> None:
        """End a trainer that was released and does not end, nor write its checkpoint any more."""
        deadline = time.monotonic() + RELEASE_LIMIT_S
        beats = -1
        while (page := trainer.progress()) is not None and page.beats != beats:
            beats = page.beats
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            await asyncio.sleep(min(RELEASE_TIMEOUT_S, left_s))
        if trainer.progress() is not None:
            trainer.say("warning", "it did not end when released: what it was saving is lost")
        trainer.kill("it did not end when released")

    async def _start_trainer(self, order: Message) -> None:
        trainer, self._spare = self._spare, None
        is_new = trainer is None
        trainer = trainer or self._new_trainer()
        trainer.name = order["trainer"]
        self._standings[trainer.name] = TrainerReport(started_at=time.time(), pid=trainer.pid)
        # Known before it runs: orders that come meanwhile wait for it, a kill is carried out.
        self._trainers[trainer.name] = trainer
        if is_new:
            try:
                await trainer.start()
            except OSError as exc:  # no memory, no process or no file descriptor is left
                logger.exception("trainer %s could not be started", trainer.name)
                self._on_exit(trainer, f"its process could not be started: {exc}")
                return
        try:
            path = await self._bundles.get(order["bundle"])
        except BundleFetchError as exc:
            trainer.kill(str(exc))
            return
        if self._trainers.get(trainer.name) is not trainer:
            trainer.kill("it was let go before it began")
            return
        host = get_address_host(self._worker.address)
        bundle = {"path": str(path), "digest": order["bundle"]["digest"]}
        trainer.send({**order, "bundle": bundle, "host": host})
        self._report({"op": "started", "trainer": trainer.name, "pid": trainer.pid})
        self._go(self._start_spare(SPARE_DELAY_S))

    async def _fetch_bundle(self, digest: str, offset: int) -> bytes:
        """Return the next piece of a bundle; a scheduler that has died is waited for."""
        deadline = time.monotonic() + FETCH_PATIENCE_S
        while True:
            try:
                asked = self._worker.scheduler.etrain_bundle(digest=digest, offset=offset)
                answer = await asyncio.wait_for(asked, FETCH_S)
                break
            except (OSError, TimeoutError) as exc:
                if time.monotonic() >= deadline:
                    raise BundleFetchError(
                        f"the scheduler did not send the job's bundle: nothing came for "
                        f"{FETCH_PATIENCE_S:.0f} s ({type(exc).__name__}: {exc})"
                    ) from exc
            await asyncio.sleep(BEAT_S)
        if "error" in answer:
            raise BundleFetchError(str(answer["message"]))
        data: bytes = answer["data"]
        return data

    async def _start_spare(self, delay_s: float = 0.0) -> None:
        await asyncio.sleep(delay_s)
        if self._spare is None and self._is_awake and not self._closing:
            self._spare = spare = self._new_trainer()
            try:
                await spare.start()
            except OSError as exc:
                logger.error("no spare trainer could be started: %s", exc)
                self._on_exit(spare, str(exc))  # which tries again later

    def _new_trainer(self) -> TrainerProcess:
        return TrainerProcess(
            on_message=self._on_message, on_exit=self._on_exit, may_read=self._may_read
        )

    # --- reports ---

    async def _beat(self, worker: Worker) -> None:
        while self._is_connected and self._worker is worker:
            try:
                pages = dict(self._pages())
            except Exception:
                # Without a beat the coordinator would give this worker up.
                logger.exception("the trainers' progress could not be read")
                pages = {}
            self._send({"op": "beat", "trainers": pages, "is_stuck": self._outbox.is_full})
            await asyncio.sleep(BEAT_S)

    def _pages(self) -> Iterator[tuple[str, Message]]:
        """Yield what the trainers' progress pages say, by name."""
        for name, trainer in self._trainers.items():
            progress = trainer.progress()
            if progress is not None:
                is_frozen = progress.alive_age_s > FROZEN_S
                process = trainer.process_state() if is_frozen else ""
                yield name, {**dataclasses.asdict(progress), "process": process}

    def _on_message(self, trainer: TrainerProcess, message: Message) -> None:
        if trainer.name:
            if trainer.name in self._standings:
                self._standings[trainer.name].hear_report(message)
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
            if trainer.name in self._standings:
                self._standings[trainer.name].ended_with = self._outbox.newest

    def _report(self, message: Message) -> None:
        """Say something that counts: it is kept until the coordinator has taken it in."""
        if self._closing:
            return
        numbered = self._outbox.put(message)
        if self._outbox.is_full:
            self._may_read.clear()
        self._send(numbered)

    def _send(self, message: Message) -> None:
        """Send a message, if anybody is there; who comes next gets those that count again."""
        if self._closing or not self._is_connected:
            return
        try:
            self._worker.batched_stream.send({"op": "etrain_report", "message": message})
        except CommClosedError:
            self._is_connected = False  # the worker is about to close, or to connect anew

    def _go(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)
        return task

    def _note_end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%r failed", task.get_coro(), exc_info=error)


def _commit_fault(trainer: TrainerProcess, kind: str) -> None:
    """Do on purpose what may happen to a trainer, or to this whole worker."""
    if kind == "kill_worker":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "kill":
        trainer.kill("ended by SIGKILL on purpose")
    elif kind in BY_SIGNAL:
        trainer.send_signal(BY_SIGNAL[kind])
    else:
        trainer.send({"op": "fault", "kind": kind})
