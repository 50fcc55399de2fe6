"""The supervisor as its coordinator sees it: beats, orders, and a new life after a silence."""

from __future__ import annotations

import asyncio
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from etrain_jupyter.cluster import supervisor as supervisor_module
from etrain_jupyter.cluster.supervisor import Supervisor
from etrain_jupyter.ranks.control.progress import TrainerProgress


class FakeTrainer:
    """A trainer process that does what it is told, and ends when it is killed."""

    made: list[FakeTrainer]

    def __init__(self, *, on_message: Any, on_exit: Any) -> None:
        self.name, self.pid = "", 4000 + len(self.made)
        self.did: list[Any] = []
        self._on_exit = on_exit
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

    def send(self, message: Any) -> None:
        self.did.append(message["op"])

    def send_signal(self, number: signal.Signals) -> None:
        self.did.append(number)

    async def tell_stacks(self) -> None:
        self.did.append("stacks")

    def kill(self, why: str = "") -> None:
        self.did.append(f"killed: {why}")
        asyncio.get_running_loop().call_soon(self._end, why)

    def _end(self, why: str) -> None:
        self._ended.set()
        self._on_exit(self, why)

    async def wait(self) -> None:
        await self._ended.wait()


class Rig:
    """A supervisor on a worker without a network."""

    def __init__(self) -> None:
        self.reports: list[dict[str, Any]] = []
        stream = SimpleNamespace(send=lambda envelope: self.reports.append(envelope["message"]))
        self.worker = SimpleNamespace(
            stream_handlers={}, batched_stream=stream, address="tls://127.0.0.1:1"
        )
        self.supervisor = Supervisor(device="cpu")

    def order(self, op: str, **values: Any) -> None:
        self.worker.stream_handlers["etrain_order"]({"op": op, **values})

    def said(self, op: str) -> list[dict[str, Any]]:
        return [message for message in self.reports if message["op"] == op]

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0.005)

    async def start(self, name: str) -> FakeTrainer:
        self.order("start", trainer=name)
        await self.until(lambda: any(m["trainer"] == name for m in self.said("started")))
        return next(trainer for trainer in FakeTrainer.made if trainer.name == name)


@pytest.fixture
async def rig(monkeypatch):
    FakeTrainer.made = []
    monkeypatch.setattr(supervisor_module, "TrainerProcess", FakeTrainer)
    monkeypatch.setattr(supervisor_module, "BEAT_S", 0.01)
    found = Rig()
    await found.supervisor.setup(found.worker)
    yield found
    await found.supervisor.teardown(found.worker)


async def test_beats_tell_how_far_the_trainers_are(rig):
    assert rig.said("supervisor") == [
        {"op": "supervisor", "device": "cpu", "pid": rig.said("supervisor")[0]["pid"]}
        | {"incarnation": 0}
    ]
    trainer = await rig.start("j/w1/1")
    await rig.until(lambda: rig.said("beat")[-1]["trainers"])
    page = rig.said("beat")[-1]["trainers"]["j/w1/1"]
    assert page == {
        **{"generation": 1, "step": 4, "collectives": 9, "beats": 7, "phase": "computing"},
        **{"alive_age_s": 0.1, "process": ""},
    }
    trainer.seen = TrainerProgress(
        generation=1, step=4, collectives=9, beats=7, phase="computing", alive_age_s=9.0
    )
    await rig.until(lambda: rig.said("beat")[-1]["trainers"]["j/w1/1"]["process"] == "stopped")


async def test_stacks_are_told_before_the_kill_if_that_is_wanted(rig):
    trainer = await rig.start("a")
    rig.order("stacks", trainer="a")
    await rig.until(lambda: "stacks" in trainer.did)
    rig.order("kill", trainer="a", why="no progress", stacks=True)
    await rig.until(lambda: rig.said("exited"))
    assert trainer.did == ["start", "stacks", "stacks", "killed: no progress"]
    assert rig.said("exited") == [{"op": "exited", "trainer": "a", "cause": "no progress"}]


async def test_faults_come_as_signals_or_by_the_trainer_itself(rig):
    trainer = await rig.start("a")
    for kind in ("stop", "segfault", "hang", "kill"):
        rig.order("fault", trainer="a", kind=kind)
    assert trainer.did[1:] == [
        signal.SIGSTOP,
        signal.SIGSEGV,
        "fault",
        "killed: ended by SIGKILL on purpose",
    ]


async def test_supervisor_that_was_given_up_ends_its_trainers_and_comes_back_as_a_new_one(rig):
    first, second = await rig.start("a"), await rig.start("b")
    rig.order("reset", incarnation=0)
    rig.order("reset", incarnation=0)  # it may be told several times
    await rig.until(lambda: len(rig.said("supervisor")) > 1)
    assert first.did[-1] == second.did[-1] == "killed: its worker was given up"
    assert rig.said("exited") == []  # nobody asks any more
    assert [hello["incarnation"] for hello in rig.said("supervisor")] == [0, 1]
    rig.order("reset", incarnation=0)  # an old one that comes late
    third = await rig.start("c")
    assert third.did == ["start"]


async def test_order_for_a_trainer_that_is_gone_is_dropped(rig):
    rig.order("kill", trainer="nobody", why="", stacks=True)
    rig.order("tell", trainer="nobody", message={"op": "release"})
    rig.order("fault", trainer="nobody", kind="kill")
