"""The supervisor as its coordinator sees it: beats, orders, and a new life after a silence."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import itertools
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from etrain_jupyter.wire import codec
from etrain_jupyter.wire import messages as m
from etrain_jupyter.wire.progress_page import TrainerProgress
from etrain_jupyter.wire.requests import BundlePiece, FetchBundle, RefusedRequestError, handler_of
from etrain_jupyter.wire.versions import read_fingerprint
from etrain_jupyter.worker import bundles
from etrain_jupyter.worker import supervisor as supervisor_module
from etrain_jupyter.worker.outbox import Outbox
from etrain_jupyter.worker.supervisor import Supervisor

BUNDLE = bytes(range(256)) * 10


class FakeTrainer:
    """A trainer process that does what it is told, and ends when it is killed."""

    made: list[FakeTrainer]

    def __init__(
        self, name: str, *, on_message: Any, on_exit: Any, may_read: Any, forks: Any
    ) -> None:
        self.name, self.pid = name, 4000 + len(self.made)
        self.did: list[Any] = []
        self._on_message, self._on_exit, self.may_read = on_message, on_exit, may_read
        self._ended = asyncio.Event()
        self.seen = TrainerProgress(
            generation=1, step=4, collectives=9, beats=7, phase="computing", alive_age_s=0.1
        )
        self.made.append(self)

    async def start(self) -> None:
        pass

    def progress(self) -> TrainerProgress | None:
        return None if self._ended.is_set() else self.seen

    def process_state(self) -> str:
        return "stopped"

    def send(self, message: codec.Encoded) -> None:
        self.did.append(type(m.TO_TRAINER.decode(message)))

    def report(self, message: m.Message) -> None:
        """Report something, as its process does through the channel."""
        self._on_message(self, codec.encode(message))

    def send_signal(self, number: signal.Signals) -> None:
        self.did.append(number)

    async def log_stacks(self) -> None:
        self.did.append("stacks")

    def log(self, level: str, text: str) -> None:
        self.did.append(f"{level}: {text}")

    def kill(self, why: str = "") -> None:
        self.did.append(f"killed: {why}")
        asyncio.get_running_loop().call_soon(self._end, why)

    def _end(self, why: str) -> None:
        self._ended.set()
        self._on_exit(self, why)

    async def wait(self) -> None:
        await self._ended.wait()


class FakeForks:
    """Forks that note what they are asked."""

    def __init__(self) -> None:
        self.did: list[Any] = []

    def warm_up(self) -> None:
        self.did.append("imports torch")

    def learn(self, modules: tuple[str, ...]) -> None:
        self.did.append(modules)

    def rest(self) -> None:
        self.did.append("rests")

    def close(self) -> None:
        self.did.append("ends")


class Rig:
    """A supervisor on a worker without a network."""

    def __init__(self, folder: Path) -> None:
        self.reports: list[Any] = []
        self.failures: list[Exception] = []
        """How the next requests for the bundle fail."""
        self.asked: list[int] = []
        """Offsets in the bundle that the scheduler was asked for."""
        stream = SimpleNamespace(send=self._receive)
        self.worker = SimpleNamespace(
            stream_handlers={},
            batched_stream=stream,
            address="tls://127.0.0.1:1",
            local_directory=str(folder / "worker-1"),
            scheduler=SimpleNamespace(etrain_bundle=self.etrain_bundle),
        )
        self.folder = folder
        self.use(Supervisor(device="cpu"))

    def use(self, supervisor: Supervisor) -> None:
        self.supervisor, self.forks = supervisor, FakeForks()
        supervisor.forks = self.forks

    def _receive(self, frame: dict[str, Any]) -> None:
        assert frame["op"] == "etrain_report"
        self.reports.append(m.FROM_SUPERVISOR.decode(frame["message"]))

    async def etrain_bundle(self, **arguments: Any) -> dict[str, Any]:
        async def reply(request: FetchBundle) -> BundlePiece:
            self.asked.append(request.offset)
            return await self.answer(request.digest, request.offset)

        try:
            return await handler_of(FetchBundle, reply)(**arguments)
        finally:
            if self.failures:
                raise self.failures.pop()

    async def answer(self, digest: str, offset: int) -> BundlePiece:
        return BundlePiece(data=BUNDLE[offset : offset + 1000])

    def bundle_in(self, folder: Path) -> m.BundleRef:
        """Return a bundle whose file is in this folder."""
        (folder / "bundle").write_bytes(BUNDLE)
        return dataclasses.replace(self.bundle_elsewhere(), path=str(folder / "bundle"))

    def bundle_elsewhere(self) -> m.BundleRef:
        digest = hashlib.sha256(BUNDLE).hexdigest()
        return m.BundleRef(digest=digest, size=len(BUNDLE), path="/not/here/bundle")

    def order(self, message: m.Message) -> None:
        self.worker.stream_handlers["etrain_message"](codec.encode(message))

    def launch(self, trainer: str, bundle: m.BundleRef | None = None) -> None:
        bundle = bundle or self.bundle_in(self.folder)
        self.order(
            m.LaunchTrainer(trainer=trainer, config={}, bundle=bundle, cwd="", checkpoints="")
        )

    def said(self, kind: type[m.Message]) -> list[Any]:
        return [message for message in self.reports if isinstance(message, kind)]

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0.005)

    async def start(self, name: str) -> FakeTrainer:
        self.launch(name)
        await self.until(lambda: any(s.trainer == name for s in self.said(m.TrainerStarted)))
        return next(trainer for trainer in FakeTrainer.made if trainer.name == name)


@pytest.fixture
async def rig(monkeypatch, tmp_path):
    FakeTrainer.made = []
    monkeypatch.setattr(supervisor_module, "TrainerProcess", FakeTrainer)
    monkeypatch.setattr(supervisor_module, "BEAT_S", 0.01)
    monkeypatch.setattr(bundles, "RETRY_S", 0.01)
    found = Rig(tmp_path)
    await found.supervisor.setup(found.worker)
    yield found
    await found.supervisor.teardown(found.worker)


async def test_heartbeats_contain_the_progress_of_the_trainers(rig):
    assert rig.said(m.SupervisorHello) == [
        m.SupervisorHello(
            device="cpu",
            pid=os.getpid(),
            incarnation=0,
            trainers={},
            fingerprint=read_fingerprint(),
        )
    ]
    trainer = await rig.start("j/w1/1")
    await rig.until(lambda: rig.said(m.Heartbeat)[-1].trainers)
    page = rig.said(m.Heartbeat)[-1].trainers["j/w1/1"]
    assert page == m.PageCopy(
        generation=1, step=4, collectives=9, beats=7, phase="computing", alive_age_s=0.1
    )
    trainer.seen = TrainerProgress(
        generation=1, step=4, collectives=9, beats=7, phase="computing", alive_age_s=9.0
    )
    await rig.until(lambda: rig.said(m.Heartbeat)[-1].trainers["j/w1/1"].process == "stopped")


async def test_stacks_are_logged_before_the_kill_if_requested(rig):
    trainer = await rig.start("a")
    rig.order(m.LogStacks(trainer="a"))
    await rig.until(lambda: "stacks" in trainer.did)
    rig.order(m.TerminateTrainer(trainer="a", why="no progress", dumps_stacks=True))
    await rig.until(lambda: rig.said(m.TrainerExited))
    assert trainer.did == [m.LaunchTrainer, "stacks", "stacks", "killed: no progress"]
    [exited] = rig.said(m.TrainerExited)
    assert (exited.trainer, exited.cause) == ("a", "no progress")


async def test_faults_are_injected_by_a_signal_or_by_the_trainer_itself(rig):
    trainer = await rig.start("a")
    for kind in ("stop", "segfault", "hang", "kill"):
        rig.order(m.InjectFault(trainer="a", kind_of_fault=kind))
    assert trainer.did[1:] == [
        signal.SIGSTOP,
        signal.SIGSEGV,
        m.InjectFault,
        "killed: killed by fault injection (SIGKILL)",
    ]


async def test_evicted_supervisor_kills_its_trainers_and_registers_as_a_new_one(rig):
    first, second = await rig.start("a"), await rig.start("b")
    rig.order(m.ResetSupervisor(incarnation=0))
    rig.order(m.ResetSupervisor(incarnation=0))  # it may be told several times
    await rig.until(lambda: len(rig.said(m.SupervisorHello)) > 1)
    assert first.did[-1] == second.did[-1] == "killed: its worker was declared dead"
    assert rig.said(m.TrainerExited) == []  # nobody asks any more
    assert [hello.incarnation for hello in rig.said(m.SupervisorHello)] == [0, 1]
    rig.order(m.ResetSupervisor(incarnation=0))  # an old one that comes late
    third = await rig.start("c")
    assert third.did == [m.LaunchTrainer]


async def test_order_for_an_unknown_trainer_is_dropped(rig):
    trainer = await rig.start("j/w1/1")
    did, num_reports = list(trainer.did), len(rig.reports)
    rig.order(m.TerminateTrainer(trainer="nobody", why="", dumps_stacks=True))
    rig.order(m.ShutDownTrainer(trainer="nobody"))
    rig.order(m.InjectFault(trainer="nobody", kind_of_fault="kill"))
    rig.order(m.TerminateTrainer(trainer="j/w1/1", why="last", dumps_stacks=False))
    await rig.until(lambda: rig.said(m.TrainerExited))
    assert trainer.did == [*did, "killed: last"]
    assert [type(r) for r in rig.reports[num_reports:] if not isinstance(r, m.Heartbeat)] == [
        m.TrainerExited
    ]


async def test_released_trainer_may_continue_while_its_checkpoint_progresses(rig, monkeypatch):
    monkeypatch.setattr(supervisor_module, "RELEASE_TIMEOUT_S", 0.02)
    trainer = await rig.start("j/w1/1")
    looks = 0

    def progress() -> TrainerProgress | None:
        nonlocal looks
        looks += 1
        beats = min(looks, 20)  # then it writes no more
        return dataclasses.replace(trainer.seen, beats=beats)

    trainer.progress = progress
    rig.order(m.ShutDownTrainer(trainer=trainer.name))
    await rig.until(lambda: "killed: it did not exit after its release" in trainer.did)
    assert looks > 20
    assert (
        "warning: it did not exit after its release: a checkpoint in progress is lost"
        in trainer.did
    )


async def test_released_trainer_that_never_exits_is_killed_despite_its_progress(rig, monkeypatch):
    monkeypatch.setattr(supervisor_module, "RELEASE_TIMEOUT_S", 0.01)
    monkeypatch.setattr(supervisor_module, "RELEASE_LIMIT_S", 0.1)
    trainer = await rig.start("j/w1/1")
    beats = itertools.count()
    trainer.progress = lambda: dataclasses.replace(trainer.seen, beats=next(beats))
    rig.order(m.ShutDownTrainer(trainer=trainer.name))
    await rig.until(lambda: "killed: it did not exit after its release" in trainer.did)


async def test_trainers_survive_a_scheduler_and_missed_reports_are_sent_to_the_next(rig):
    supervisor = rig.supervisor
    supervisor.outlives_scheduler = True
    trainer = await rig.start("j/w1/1")
    rig.order(
        m.JoinGeneration(
            trainer="j/w1/1",
            generation=3,
            rank=0,
            world_size=1,
            behind=(),
            restore=False,
            logged_step=0,
            log_end=0,
            backend="gloo",
        )
    )
    rig.order(m.AcknowledgeReports(number=rig.said(m.TrainerStarted)[0].number))
    await supervisor.teardown(rig.worker)
    trainer.report(m.StepsTrained(generation=3, records=()))
    assert rig.said(m.StepsTrained) == []
    assert not any(str(did).startswith("killed") for did in trainer.did)

    after = Rig(rig.folder)
    await supervisor.setup(after.worker)
    assert [type(report) for report in after.reports[:2]] == [m.SupervisorHello, m.StepsTrained]
    known = after.reports[0].trainers["j/w1/1"]
    assert (known.generation, known.left) == (3, None)
    supervisor.outlives_scheduler = False


async def test_trainers_are_not_read_while_too_many_reports_are_unacknowledged(rig):
    rig.supervisor._outbox = Outbox(most=3)
    trainer = await rig.start("a")
    for number in range(2):
        trainer.report(m.TextLogged(level="info", text=str(number)))
    assert not trainer.may_read.is_set()
    rig.order(m.AcknowledgeReports(number=2))
    assert trainer.may_read.is_set()
    assert [line.text for line in rig.said(m.TextLogged)] == ["0", "1"]


async def test_fork_server_imports_torch_at_once_and_the_modules_of_a_job_later(rig, monkeypatch):
    monkeypatch.setattr(supervisor_module, "IMPORT_DELAY_S", 0.0)
    assert rig.forks.did == ["imports torch"]
    trainer = await rig.start("job-1/w1/1")

    trainer.report(m.PackagesImported(modules=("sklearn", "scipy")))

    assert rig.forks.did == ["imports torch"]
    await rig.until(lambda: rig.forks.did[1:] == [("sklearn", "scipy")])


# --- a guest among others ---


async def test_resting_supervisor_starts_no_process_until_it_is_woken(rig, tmp_path):
    guest = Rig(tmp_path)
    guest.use(Supervisor(device="cpu", rests=True))
    await guest.supervisor.setup(guest.worker)
    await asyncio.sleep(0.05)
    assert [type(report) for report in guest.reports] == [m.SupervisorHello]
    assert guest.forks.did == []

    guest.order(m.WakeSupervisor())
    guest.order(m.WakeSupervisor())
    await guest.until(lambda: len(guest.said(m.Heartbeat)) > 2)
    assert guest.forks.did == ["imports torch"]

    guest.order(m.RestSupervisor())
    await asyncio.sleep(0.05)
    num_beats = len(guest.said(m.Heartbeat))
    await asyncio.sleep(0.05)
    assert len(guest.said(m.Heartbeat)) == num_beats

    guest.order(m.WakeSupervisor())
    assert guest.forks.did == ["imports torch", "rests", "imports torch"]
    await guest.supervisor.teardown(guest.worker)
    assert guest.forks.did[3:] == ["ends"]


async def test_orders_after_the_teardown_are_ignored(rig):
    await rig.supervisor.setup(rig.worker)
    await rig.supervisor.teardown(rig.worker)
    made = len(FakeTrainer.made)
    rig.launch("t1")
    await asyncio.sleep(0.01)
    assert len(FakeTrainer.made) == made


async def test_notice_is_reported_immediately_and_again_to_the_next_coordinator(rig):
    supervisor = rig.supervisor
    supervisor.outlives_scheduler = True
    os.kill(os.getpid(), signal.SIGUSR1)
    await rig.until(lambda: rig.said(m.MachineNotice))
    await supervisor.teardown(rig.worker)

    after = Rig(rig.folder)
    await supervisor.setup(after.worker)
    assert [type(report) for report in after.reports[:2]] == [m.SupervisorHello, m.MachineNotice]
    assert after.reports[1].left_s <= rig.said(m.MachineNotice)[0].left_s
    supervisor.outlives_scheduler = False


async def test_interruption_by_a_batch_system_is_reported_while_a_job_uses_the_worker(rig):
    supervisor = rig.supervisor
    supervisor.note_interruption(30.0)
    assert (supervisor.has_trainers, rig.said(m.MachineNotice)) == (False, [])

    trainer = await rig.start("j/w1/1")
    assert supervisor.has_trainers
    supervisor.note_interruption(30.0)
    [notice] = rig.said(m.MachineNotice)
    assert (notice.notice, round(notice.left_s)) == ("interruption", 30)

    # A released trainer is about to exit.
    rig.order(m.ShutDownTrainer(trainer=trainer.name))
    supervisor.note_interruption(10.0)
    assert supervisor.has_trainers
    assert len(rig.said(m.MachineNotice)) == 1


# --- silent endings (review R2) ---


async def test_trainer_whose_process_cannot_be_started_is_reported_as_exited(rig, monkeypatch):
    """The coordinator waited for it for ever."""

    async def fail(self):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(FakeTrainer, "start", fail)
    rig.launch("j/w1/2")
    await rig.until(lambda: rig.said(m.TrainerExited))

    [told] = rig.said(m.TrainerExited)
    assert told.trainer == "j/w1/2"
    assert told.cause == ("its process could not be started: [Errno 12] Cannot allocate memory")


async def test_invalid_order_does_not_close_the_connection(rig):
    receive = rig.worker.stream_handlers["etrain_message"]
    receive({"kind": "LaunchTrainer"})  # without a name
    receive({"kind": "Unknown"})
    receive(None)
    trainer = await rig.start("j/w1/1")
    rig.order(m.RequestCheckpoint(trainer=trainer.name))
    assert trainer.did[-1] == m.RequestCheckpoint


async def test_supervisor_sends_heartbeats_even_if_the_progress_cannot_be_read(rig, monkeypatch):
    """Without beats the worker was given up after 10 s."""
    trainer = await rig.start("j/w1/1")

    def fail():
        raise ValueError("a mistake")

    monkeypatch.setattr(trainer, "progress", fail)
    rig.reports.clear()
    await rig.until(lambda: len(rig.said(m.Heartbeat)) > 2)
    assert rig.said(m.Heartbeat)[-1].trainers == {}
    monkeypatch.undo()


async def test_coordinator_sets_the_heartbeat_interval(rig):
    await rig.until(lambda: rig.said(m.Heartbeat))
    rig.order(m.SetHeartbeatInterval(interval_s=60.0))
    await rig.until(lambda: rig.supervisor._beat_s == 60.0)
    rig.reports.clear()
    await asyncio.sleep(0.1)
    assert len(rig.said(m.Heartbeat)) <= 1  # after the interval that had begun


async def test_heartbeat_reports_a_full_outbox(rig, monkeypatch):
    monkeypatch.setattr(rig.supervisor, "_outbox", Outbox(most=1))
    trainer = await rig.start("j/w1/1")
    assert not trainer.may_read.is_set()
    rig.reports.clear()
    await rig.until(lambda: rig.said(m.Heartbeat))
    assert rig.said(m.Heartbeat)[-1].is_stuck
    rig.order(m.AcknowledgeReports(number=rig.supervisor._outbox.newest))
    rig.reports.clear()
    await rig.until(lambda: rig.said(m.Heartbeat))
    assert not rig.said(m.Heartbeat)[-1].is_stuck


# --- bundles (review R6) ---


async def test_bundle_in_an_inaccessible_folder_is_fetched_from_the_scheduler(rig):
    rig.launch("a", rig.bundle_elsewhere())
    rig.launch("b", rig.bundle_elsewhere())
    await rig.until(lambda: len(rig.said(m.TrainerStarted)) == 2)
    assert rig.asked == [0, 1000, 2000], "once for both"
    folder = supervisor_module.folder_of(rig.worker.local_directory)
    assert len(list(folder.iterdir())) == 2
    rig.order(m.RemoveBundle(digest=rig.bundle_elsewhere().digest))
    assert list(folder.iterdir()) == []


async def test_failed_bundle_request_is_retried(rig, monkeypatch):
    rig.failures = [OSError("connection lost"), TimeoutError()]
    rig.launch("a", rig.bundle_elsewhere())
    await rig.until(lambda: rig.said(m.TrainerStarted))
    assert rig.asked == [0, 0, 0, 1000, 2000]


async def test_trainer_without_its_bundle_exits_with_the_reason(rig):
    async def refuse(digest: str, offset: int) -> BundlePiece:
        raise RefusedRequestError("request", "the bundle is gone. Stop the job")

    rig.answer = refuse
    rig.launch("a", rig.bundle_elsewhere())
    await rig.until(lambda: rig.said(m.TrainerExited))
    [exited] = rig.said(m.TrainerExited)
    assert (exited.trainer, exited.cause) == ("a", "the bundle is gone. Stop the job")
    assert rig.said(m.TrainerStarted) == []


async def test_trainer_released_while_its_bundle_is_fetched_never_starts(rig):
    is_released = asyncio.Event()
    answer = rig.answer

    async def wait(digest: str, offset: int) -> BundlePiece:
        await is_released.wait()
        return await answer(digest, offset)

    rig.answer = wait
    rig.launch("a", rig.bundle_elsewhere())
    await rig.until(lambda: rig.asked)
    trainer = next(t for t in FakeTrainer.made if t.name == "a")
    rig.order(m.ShutDownTrainer(trainer="a"))
    is_released.set()
    await rig.until(lambda: "killed: it was released before it began" in trainer.did)
    assert m.LaunchTrainer not in trainer.did


# --- messages that are only forwarded ---


async def test_reports_are_forwarded_undecoded_with_the_sender_that_the_supervisor_knows(rig):
    trainer = await rig.start("j/w1/1")
    sent: list[codec.Encoded] = []
    rig.worker.batched_stream.send = lambda frame: sent.append(frame["message"])
    report = {"kind": "StepsTrained", "trainer": "j/w2/1", "number": 77, "records": "malformed"}
    trainer._on_message(trainer, report)
    assert {**report, "trainer": "j/w1/1", "number": 2} in sent


@pytest.mark.parametrize("kind", ["TrainerHello", "GenerationLeft", "UserCodeFailed"])
async def test_malformed_report_that_the_supervisor_reads_itself_is_refused(rig, kind):
    trainer = await rig.start("j/w1/1")
    num_reports = rig.supervisor._outbox.newest
    with pytest.raises(codec.MalformedMessageError, match=f"{kind} lacks"):
        trainer._on_message(trainer, {"kind": kind})
    assert rig.supervisor._outbox.newest == num_reports


async def test_next_coordinator_is_informed_how_a_trainer_left_its_generation(rig):
    trainer = await rig.start("j/w1/1")
    left = m.GenerationLeft(generation=3, progress=(7, 0), why="failed", undone=True)
    trainer.report(left)
    await rig.supervisor.setup(rig.worker)
    known = rig.said(m.SupervisorHello)[-1].trainers["j/w1/1"]
    assert (known.left, known.progress) == (left, (7, 0))
