"""Which scheduler a worker connects to next, when its connection has ended."""

from __future__ import annotations

import asyncio
import json
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from etrain_jupyter.plugins.ec2.machine.node_worker import (
    SCHEDULER_FILE,
    parse_arguments,
)
from etrain_jupyter.worker import lifecycle
from etrain_jupyter.worker.lifecycle import (
    RecordFinder,
    WorkerLifecycle,
    WorkerOptions,
    noting_its_end,
)
from tests.unit.pools.standins import SUPERVISOR

CUT = "worker-handle-scheduler-connection-broken"
DISMISSED = "scheduler-remove-worker"


@dataclass
class Record:
    address: str = "tls://a:1"
    num_lives: int = 1
    is_serving: bool = True


@dataclass
class Finder:
    record: Record | None
    is_remote: bool
    away_s: float = 60.0
    num_looks: int = 0

    def look(self) -> Record | None:
        self.num_looks += 1
        return self.record


class Worker:
    """A Dask worker whose connection ends for a reason, and is closed then."""

    def __init__(self, reason: str = "") -> None:
        self.close_reason = reason
        self.status = SimpleNamespace(name="closed" if reason else "running")
        self.closed = False

    async def finished(self) -> None:
        if not self.close_reason:
            await asyncio.Event().wait()

    async def close(self, **_: object) -> None:
        self.closed = True


class Life(WorkerLifecycle):
    """Connects to whoever is there: an exception in the plan is one that does not answer."""

    def __init__(self, finder: Finder, *plan: Worker | Exception) -> None:
        options = WorkerOptions(
            **{"name": "w1", "device": "cpu", "supervisor": SUPERVISOR},
            **{"scheduler": "tls://a:1", "num_lives": 1, "tls": Path("t"), "scratch": Path("s")},
        )
        super().__init__(options, finder)
        self._supervisor.teardown = self._teardown
        self.plan = list(plan)
        self.tried: list[str] = []
        self.torn_down = 0

    async def _teardown(self, worker: object) -> None:
        self.torn_down += 1

    async def _connect(self, timeout_s: int = 15) -> Worker:
        self.tried.append(self._address)
        if not self.plan:
            signal.raise_signal(signal.SIGTERM)
            return Worker()
        found = self.plan.pop(0)
        if isinstance(found, Exception):
            raise found
        return found


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(lifecycle, "POLL_EVERY_S", 0.001)
    monkeypatch.setattr(lifecycle, "DISMISSED_S", 0.05)


async def test_lost_connection_to_a_remote_scheduler_is_reestablished():
    life = Life(Finder(Record(), is_remote=True), Worker(CUT), OSError("no"), OSError("no"))
    await life.run()
    assert life.tried == ["tls://a:1"] * 4


def wrapped(cause: Exception) -> RuntimeError:
    """Return what Dask makes of it."""
    error = RuntimeError("Worker failed to start.")
    error.__cause__ = cause
    return error


async def test_worker_waits_for_a_restarting_remote_scheduler_and_follows_it():
    finder = Finder(Record(), is_remote=True)
    life = Life(finder, wrapped(ConnectionError()), TimeoutError("3 s"), Worker(DISMISSED))
    finder.record = Record("tls://b:2", num_lives=2)
    await life.run()
    assert life.tried == ["tls://a:1", "tls://b:2", "tls://b:2"]


@pytest.mark.parametrize("cause", [ValueError("a bad day"), FileNotFoundError("no such file")])
async def test_failing_supervisor_ends_the_worker_immediately(cause):
    life = Life(Finder(Record(), is_remote=True), wrapped(cause))
    with pytest.raises(RuntimeError):
        await life.run()
    assert len(life.tried) == 1


async def test_unreachable_local_scheduler_ends_the_worker_immediately():
    life = Life(Finder(Record(), is_remote=False), wrapped(ConnectionError()))
    with pytest.raises(RuntimeError):
        await life.run()


async def test_remote_scheduler_is_found_at_its_new_address():
    finder = Finder(Record(), is_remote=True)
    life = Life(finder, Worker(CUT))
    finder.record = Record("tls://b:2", num_lives=2)
    await life.run()
    assert life.tried == ["tls://a:1", "tls://b:2"]


async def test_worker_dismissed_by_a_remote_scheduler_exits_with_its_trainers():
    life = Life(Finder(Record(), is_remote=True), Worker(DISMISSED))
    await life.run()
    assert (life.tried, life.torn_down) == (["tls://a:1"], 1)
    assert life._supervisor.outlives_scheduler is False


async def test_connection_closed_by_a_live_local_scheduler_ends_the_worker():
    life = Life(Finder(Record(), is_remote=False), Worker(CUT))
    await life.run()
    assert (life.tried, life.torn_down) == (["tls://a:1"], 1)


async def test_local_worker_waits_for_the_next_scheduler_and_ends_with_the_cluster():
    finder = Finder(Record(is_serving=False), is_remote=False)
    life = Life(finder, Worker(CUT))
    running = asyncio.ensure_future(life.run())
    while finder.num_looks < 100:
        await asyncio.sleep(0.001)
    finder.record = Record("tls://c:3", num_lives=2)
    life.plan.append(Worker(CUT))
    while len(life.tried) < 2:
        await asyncio.sleep(0.001)
    finder.record = None
    await running
    assert life.tried == ["tls://a:1", "tls://c:3"]


async def test_worker_gives_up_if_no_scheduler_is_found_in_time(caplog):
    finder = Finder(Record(is_serving=False), is_remote=False, away_s=0.05)
    await Life(finder, Worker(CUT)).run()
    assert "no scheduler was found within 0.05 s" in caplog.text


async def test_first_reason_for_closing_is_kept():
    reasons: list[str] = []

    class Server:
        async def close(self, *, reason: str) -> str:
            reasons.append(reason)
            return "closed"

    server = noting_its_end(Server)()
    assert await server.close(reason=DISMISSED) == "closed"
    await server.close(reason=CUT)
    assert (server.close_reason, reasons) == (DISMISSED, [DISMISSED, CUT])


def test_node_worker_finds_the_scheduler_in_the_file_of_its_agent(tmp_path):
    told = {"scheduler": "tls://10.0.0.4:8786", "num_lives": 3}
    (tmp_path / SCHEDULER_FILE).write_text(json.dumps(told))
    found = RecordFinder(tmp_path / SCHEDULER_FILE, away_s=9.0).look()
    assert (found.address, found.num_lives, found.is_serving) == ("tls://10.0.0.4:8786", 3, True)
    words = [str(tmp_path), "--name", "i-1", "--device", "cpu", "--supervisor", "a:B"]
    assert parse_arguments([*words, "--host", "10.0.0.9", "--away-s", "9"]).away_s == 9.0


class Batch(Life):
    """A worker of a batch job, which gets SIGTERM as soon as it is connected."""

    def __init__(self, finder: Finder, *, has_trainers: bool, kill_wait_s: float = 1000.0) -> None:
        super().__init__(finder)
        self._options = replace(self._options, kill_wait_s=kill_wait_s)
        self._supervisor.has_trainers = has_trainers
        self._supervisor.note_interruption = self._note
        self.noticed: list[float] = []

    def _note(self, left_s: float) -> None:
        self.noticed.append(left_s)
        asyncio.get_running_loop().call_later(0.01, self._leave)

    def _leave(self) -> None:
        self._supervisor.has_trainers = False


async def test_sigterm_of_a_batch_system_is_a_notice_and_the_worker_exits_once_it_is_idle():
    life = Batch(Finder(Record(), is_remote=True), has_trainers=True)
    await life.run()
    assert life.noticed == [1000.0]
    assert life._supervisor.has_trainers is False


async def test_worker_whose_trainers_do_not_leave_exits_before_sigkill():
    life = Batch(Finder(Record(), is_remote=True), has_trainers=True, kill_wait_s=0.05)
    life._leave = lambda: None  # type: ignore[method-assign]
    await life.run()
    assert (life.noticed, life._supervisor.has_trainers) == ([0.05], True)


@pytest.mark.parametrize(
    ("record", "has_trainers", "kill_wait_s"),
    [(Record(), False, 30.0), (None, True, 30.0), (Record(), True, 0.0)],
    ids=["idle", "the cluster has ended", "not a batch job"],
)
async def test_other_workers_exit_at_sigterm(record, has_trainers, kill_wait_s):
    finder = Finder(record, is_remote=True)
    life = Batch(finder, has_trainers=has_trainers, kill_wait_s=kill_wait_s)
    await life.run()
    assert life.noticed == []
