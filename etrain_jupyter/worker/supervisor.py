"""Supervisor: a Dask worker plugin that starts, monitors and kills trainers."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
import time
from collections.abc import Iterator
from typing import Any, assert_never

from distributed import Worker, WorkerPlugin
from distributed.comm.addressing import get_address_host

from etrain_jupyter.wire import messages as m
from etrain_jupyter.wire.codec import KIND, Encoded, encode
from etrain_jupyter.wire.requests import call_scheduler
from etrain_jupyter.wire.stream import MessageStream
from etrain_jupyter.wire.versions import read_fingerprint
from etrain_jupyter.worker.bundles import BundleFetchError, MachineBundles, folder_of
from etrain_jupyter.worker.forks import Forks
from etrain_jupyter.worker.outbox import Outbox, TrainerStatus
from etrain_jupyter.worker.preemption_watch import PreemptionWatch
from etrain_jupyter.worker.trainer_process import TrainerProcess

logger = logging.getLogger("etrain.supervisor")

IMPORT_DELAY_S = 4.0
"""Delay in seconds before the fork server imports the modules of a job. These imports must not
compete with the job's first steps."""

RELEASE_TIMEOUT_S = 60.0
"""Heartbeat timeout in seconds for a released trainer, which may be writing a checkpoint."""

RELEASE_LIMIT_S = 900.0
"""Maximum time in seconds for a released trainer to exit, even if it sends heartbeats."""

BEAT_S = 1.0
"""Heartbeat interval in seconds, unless the coordinator sets another one."""

FROZEN_S = 1.5
"""Age in seconds of a trainer's pulse above which the supervisor checks its process state."""

BY_SIGNAL = {"stop": signal.SIGSTOP, "segfault": signal.SIGSEGV}
"""Faults injected with a signal; the trainer injects the others itself."""


class Supervisor(WorkerPlugin):
    """Run the trainers that the coordinator launches.

    Trainers are separate processes, so the supervisor sends heartbeats even if a trainer hangs or
    holds the GIL.

    Args:
        device: Torch device on which its trainers compute.
        rests: True to stay idle, with no fork server or heartbeats, until the coordinator wakes it.
            For workers of a Dask cluster shared with other users.
    """

    name = "etrain-supervisor"

    outlives_scheduler = False
    """True to keep the trainers when the connection ends, because this process will reconnect; set
    by ``worker.lifecycle``."""

    forks: Forks
    """Forks the trainers; ``worker.lifecycle`` replaces it if this machine has a fork server."""

    def __init__(self, *, device: str = "cpu", rests: bool = False) -> None:
        self._device = device
        self._is_awake = not rests
        self._beating: asyncio.Task[None] | None = None
        self._beat_s = BEAT_S
        self._trainers: dict[str, TrainerProcess] = {}  # by name: launched and not released
        self._ending: set[TrainerProcess] = set()  # released or killed, still running
        self.forks = Forks()
        self._incarnation = 0  # number of resets; fences reports from before the last reset
        self._tasks: set[asyncio.Task[Any]] = set()  # asyncio itself keeps only weak references
        self._closing = False
        self._is_connected = False
        self._stream: MessageStream | None = None  # to the coordinator
        self._outbox = Outbox()
        self._notices = PreemptionWatch(self._send)
        self._bundles = MachineBundles(lambda piece: call_scheduler(self._worker.scheduler, piece))
        # By trainer, for trainers that are running or whose exit is not yet acknowledged.
        self._statuses: dict[str, TrainerStatus] = {}
        # Cleared while the outbox is full. While it is cleared, the trainers' channels are not
        # read, and the trainers wait.
        self._may_read = asyncio.Event()
        self._may_read.set()

    @property
    def has_trainers(self) -> bool:
        """True while a trainer is running."""
        return bool(self._trainers or self._ending)

    def note_interruption(self, left_s: float) -> None:
        """Report that this machine will be reclaimed in ``left_s`` seconds, if a job uses it."""
        # Trainers that have been released are about to exit anyway.
        if self._trainers:
            self._notices.take(left_s)

    async def setup(self, worker: Worker) -> None:
        """Send the coordinator a hello and all unacknowledged reports."""
        self._worker = worker
        self._beat_s = BEAT_S  # a coordinator that wants another interval sets it after the hello
        worker.stream_handlers["etrain_message"] = self._receive
        self._is_connected = True
        self._bundles.begin(folder_of(worker.local_directory))
        self._notices.start()
        # Send the hello first, because a coordinator drops reports from unknown supervisors.
        self._send_hello()
        for report in self._outbox.unacknowledged():
            self._send_encoded(report)
        if self._is_awake:
            self._wake()

    def _wake(self) -> None:
        """Send heartbeats, and import torch before the first trainer needs it."""
        self._is_awake = True
        self._beating = self._go(self._beat(self._worker))
        self.forks.warm_up()

    def _send_hello(self) -> None:
        self._send(
            m.SupervisorHello(
                device=self._device,
                pid=os.getpid(),
                incarnation=self._incarnation,
                fingerprint=read_fingerprint(),
                trainers={name: known.summary() for name, known in self._statuses.items()},
            )
        )
        self._notices.send_again()

    async def teardown(self, worker: Worker) -> None:
        """Kill all trainers, unless only the connection is closing."""
        self._is_connected = False
        if self.outlives_scheduler:
            return  # tasks keep running, and reports wait in the outbox
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await self._notices.stop()
        running = [*self._trainers.values(), *self._ending]
        for trainer in running:
            trainer.kill("its worker is closing")
        for trainer in running:
            await trainer.wait()
        self.forks.close()
        self._bundles.release_all()

    # --- messages from the coordinator ---

    def _receive(self, message: Any) -> None:
        """Handle a message from the coordinator. Called by Dask."""
        if self._closing:
            return  # the Dask worker continues without this plugin, and messages may be in flight
        try:
            if m.FORWARDED.includes(message):
                self._forward(message)
            else:
                self._handle(m.TO_SUPERVISOR.decode(message))
        except Exception:
            # Otherwise Dask would close the connection, and all trainers would be killed.
            logger.exception("a message from the coordinator could not be handled")

    def _forward(self, message: Encoded) -> None:
        """Send a message on to its trainer, which checks the fields."""
        trainer = self._trainers.get(message["trainer"])
        if trainer is None:
            return
        trainer.send(message)
        match m.FORWARDED.class_of(message):
            case m.JoinGeneration:
                self._statuses[trainer.name].enter(message["generation"])
            case m.ShutDownTrainer:
                # It exits by itself, perhaps after a checkpoint. Its exit is no longer reported.
                self._statuses.pop(trainer.name)
                self._ending.add(self._trainers.pop(trainer.name))
                self._go(self._kill_later(trainer))

    def _handle(self, message: m.ToSupervisor) -> None:
        match message:
            case m.AcknowledgeReports():
                self._outbox.acknowledge(message.number)
                for name, known in list(self._statuses.items()):
                    if 0 < known.ended_with <= message.number:  # the coordinator logged its exit
                        del self._statuses[name]
                if not self._outbox.is_full:
                    self._may_read.set()
            case m.WakeSupervisor():
                if not self._is_awake:
                    self._wake()
            case m.RestSupervisor():
                self._rest()
            case m.SetHeartbeatInterval():
                self._beat_s = message.interval_s
            case m.RemoveBundle():
                self._bundles.release(message.digest)
            case m.ResetSupervisor():
                # The coordinator sends a reset for each message from a fenced incarnation, so
                # several may arrive; only the first is for the current incarnation.
                if message.incarnation == self._incarnation:
                    self._incarnation += 1
                    self._go(self._start_over())
            case m.LaunchTrainer():
                self._go(self._launch(message))
            case m.TerminateTrainer():
                if (trainer := self._trainers.get(message.trainer)) is not None:
                    self._go(self._terminate(trainer, message))
            case m.LogStacks():
                if (trainer := self._trainers.get(message.trainer)) is not None:
                    self._go(trainer.log_stacks())
            case m.InjectFault():
                if (trainer := self._trainers.get(message.trainer)) is not None:
                    _commit_fault(trainer, message)
            case _:
                assert_never(message)

    def _rest(self) -> None:
        """Stop the heartbeats and the fork server until the next job."""
        self._is_awake = False
        if self._beating is not None:
            self._beating.cancel()
        self.forks.rest()

    async def _terminate(self, trainer: TrainerProcess, message: m.TerminateTrainer) -> None:
        try:
            if message.dumps_stacks:
                await trainer.log_stacks()
        finally:  # the other ranks wait for its exit, even if log_stacks fails
            trainer.kill(message.why)

    async def _start_over(self) -> None:
        """Kill all trainers and register again after the coordinator declared this worker dead."""
        # coordinator   declares it dead ... gets a message: ResetSupervisor(0)    hello 1: in use
        # supervisor    frozen ............ heartbeat of 0       kills, waits, hello 1
        #
        # The other workers have kept training without its trainers, which are in an old generation.
        logger.warning("declared dead by the coordinator: registering again")
        ending = [*self._trainers.values(), *self._ending]
        self._trainers.clear()
        self._statuses.clear()
        self._ending.update(ending)
        for trainer in ending:
            trainer.kill("its worker was declared dead")
        for trainer in ending:
            await trainer.wait()
        self._bundles.release_all()
        self._send_hello()

    async def _kill_later(self, trainer: TrainerProcess) -> None:
        """Kill a released trainer that neither exits nor makes progress on its checkpoint."""
        # Check once a minute. As long as ``beats`` increases, the trainer is still writing, and is
        # not killed before RELEASE_LIMIT_S.
        deadline = time.monotonic() + RELEASE_LIMIT_S
        beats = -1
        while (page := trainer.progress()) is not None and page.beats != beats:
            beats = page.beats
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            await asyncio.sleep(min(RELEASE_TIMEOUT_S, left_s))
        if trainer.progress() is not None:
            trainer.log(
                "warning", "it did not exit after its release: a checkpoint in progress is lost"
            )
        trainer.kill("it did not exit after its release")

    async def _launch(self, message: m.LaunchTrainer) -> None:
        # LaunchTrainer -- process starts -- bundle is fetched --> sent to the trainer
        #       ShutDownTrainer or TerminateTrainer meanwhile --> not sent: the trainer is killed
        trainer = self._new_trainer(message.trainer)
        self._statuses[trainer.name] = status = TrainerStatus(started_at=time.time())
        # Registered before the first await, so that messages that arrive in the meantime find it.
        self._trainers[trainer.name] = trainer
        try:
            await trainer.start()
        except OSError as exc:  # out of memory, processes or file descriptors
            logger.exception("trainer %s could not be started", trainer.name)
            self._on_exit(trainer, f"its process could not be started: {exc}")
            return
        status.pid = trainer.pid
        try:
            path = await self._bundles.get(message.bundle)
        except BundleFetchError as exc:
            trainer.kill(str(exc))
            return
        if self._trainers.get(trainer.name) is not trainer:  # released or lost during an await
            trainer.kill("it was released before it began")
            return
        bundle = dataclasses.replace(message.bundle, path=str(path))
        host = get_address_host(self._worker.address)
        trainer.send(encode(dataclasses.replace(message, bundle=bundle, host=host)))
        self._report(trainer, encode(m.TrainerStarted(pid=trainer.pid)))

    def _new_trainer(self, name: str) -> TrainerProcess:
        return TrainerProcess(
            name,
            on_message=self._on_message,
            on_exit=self._on_exit,
            may_read=self._may_read,
            forks=self.forks,
        )

    # --- reports ---

    async def _beat(self, worker: Worker) -> None:
        # ``setup`` starts this for each connection; it stops when its connection ends.
        while self._is_connected and self._worker is worker:
            try:
                pages = dict(self._pages())
            except Exception:
                # Send the heartbeat anyway; without it, the coordinator would declare this worker
                # dead.
                logger.exception("the trainers' progress could not be read")
                pages = {}
            self._send(m.Heartbeat(trainers=pages, is_stuck=self._outbox.is_full))
            await asyncio.sleep(self._beat_s)

    def _pages(self) -> Iterator[tuple[str, m.PageCopy]]:
        """Yield copies of the trainers' progress pages, by name."""
        for name, trainer in self._trainers.items():
            progress = trainer.progress()
            if progress is not None:
                # Reading the state takes a system call for each trainer, so read it only if the
                # pulse is late.
                is_frozen = progress.alive_age_s > FROZEN_S
                process = trainer.process_state() if is_frozen else ""
                yield name, m.PageCopy(**vars(progress), process=process)

    def _on_message(self, trainer: TrainerProcess, message: Encoded) -> None:
        if message[KIND] == m.SpareReady.__name__:
            return  # its wire version was checked when it was read
        if message[KIND] == m.PackagesImported.__name__:
            imported = m.FROM_TRAINER.decode(message)
            assert isinstance(imported, m.PackagesImported)
            loop = asyncio.get_running_loop()
            loop.call_later(IMPORT_DELAY_S, self.forks.learn, imported.modules)
            return
        if (status := self._statuses.get(trainer.name)) is not None:
            status.note_report(message)
        self._report(trainer, message)

    def _on_exit(self, trainer: TrainerProcess, cause: str) -> None:
        self._ending.discard(trainer)
        if self._trainers.pop(trainer.name, None) is not None:
            self._report(trainer, encode(m.TrainerExited(cause=cause)))
            if (status := self._statuses.get(trainer.name)) is not None:
                status.ended_with = self._outbox.newest

    def _report(self, trainer: TrainerProcess, report: Encoded) -> None:
        """Send a report, and keep it until the coordinator acknowledges it."""
        if self._closing:
            return
        numbered = self._outbox.put(report, trainer=trainer.name)
        if self._outbox.is_full:
            self._may_read.clear()
        self._send_encoded(numbered)

    def _send(self, message: m.FromSupervisor) -> None:
        self._send_encoded(encode(message))

    def _send_encoded(self, message: Encoded) -> None:
        """Send a message if a coordinator is connected; the next one gets all kept reports."""
        if self._closing or not self._is_connected:
            return
        stream = self._stream
        if stream is None or stream.batched is not self._worker.batched_stream:
            stream = self._stream = MessageStream(self._worker.batched_stream, "etrain_report")
        if stream.is_closed:
            self._is_connected = False  # the worker is about to close, or to reconnect
        else:
            stream.send(message)  # it is lost if the connection ends before it is written

    def _go(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)
        return task

    def _note_end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%r failed", task.get_coro(), exc_info=error)


def _commit_fault(trainer: TrainerProcess, fault: m.InjectFault) -> None:
    """Inject a fault into a trainer, or into this whole worker."""
    kind = fault.kind_of_fault
    if kind == "kill_worker":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "kill":
        trainer.kill("killed by fault injection (SIGKILL)")
    elif kind in BY_SIGNAL:
        trainer.send_signal(BY_SIGNAL[kind])
    else:
        trainer.send(encode(fault))
