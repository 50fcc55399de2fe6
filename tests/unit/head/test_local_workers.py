"""Worker processes of a local cluster, with small shell commands in place of workers."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from etrain_jupyter.head import local_workers
from etrain_jupyter.head.local_workers import LocalNodes, back_off_s
from etrain_jupyter.head.slots import Slot

SLEEP = ("sleep", "60")
DIE = ("false",)


class Bench:
    """A node source whose workers are shell commands; ``command`` is what the next worker runs."""

    def __init__(self, num_slots: int = 3, linger_s: float = 0.05) -> None:
        self.command: tuple[str, ...] = SLEEP
        self.connected: set[str] = set()
        self.busy: set[str] = set()
        self.spawned: list[str] = []
        self.nodes = LocalNodes(
            [Slot(index=i) for i in range(num_slots)],
            self.spawn,
            is_connected=self.connected.__contains__,
            is_busy=self.busy.__contains__,
            linger_s=linger_s,
        )

    def spawn(self, name: str, slot: Slot) -> subprocess.Popen[bytes]:
        self.spawned.append(name)
        return subprocess.Popen(self.command, stdin=subprocess.PIPE, process_group=0)

    @property
    def names(self) -> list[str]:
        return [node["worker"] for node in self.nodes.nodes()]

    def pid(self, name: str) -> int:
        return next(node["pid"] for node in self.nodes.nodes() if node["worker"] == name)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGCHLD, bench.nodes.reap)
    yield bench
    await bench.nodes.close(grace_s=5.0)
    loop.remove_signal_handler(signal.SIGCHLD)
    assert bench.names == []


async def until(is_so: Callable[[], bool], timeout_s: float = 30.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not is_so():
            await asyncio.sleep(0.01)


async def test_wanted_workers_run_up_to_the_number_of_slots(bench: Bench) -> None:
    bench.nodes.want(2, reason="test")
    assert bench.names == ["w1", "w2"]

    bench.nodes.want(9, reason="test")
    assert bench.names == ["w1", "w2", "w3"]


async def test_held_workers_stay_when_jobs_want_none(bench: Bench) -> None:
    bench.nodes.hold(1, reason="test")
    bench.nodes.want(2, reason="test")
    bench.nodes.want(0, reason="test")

    await until(lambda: bench.names == ["w1"])
    await asyncio.sleep(0.15)  # three times as long as surplus workers linger
    assert bench.names == ["w1"]


async def test_worker_is_starting_until_it_connects_to_the_scheduler(bench: Bench) -> None:
    bench.nodes.want(2, reason="test")
    bench.connected.add("w2")

    assert [node["state"] for node in bench.nodes.nodes()] == ["starting", "running"]


async def test_dead_worker_is_replaced_in_its_slot_under_a_new_name(bench: Bench) -> None:
    bench.nodes.want(3, reason="test")

    psutil.Process(bench.pid("w2")).kill()

    await until(lambda: bench.names == ["w1", "w3", "w4"])
    assert [node["slot"] for node in bench.nodes.nodes()] == [0, 2, 1]


async def test_released_worker_is_replaced_before_it_exits(bench: Bench) -> None:
    bench.nodes.want(1, reason="test")
    psutil.Process(bench.pid("w1")).suspend()

    bench.nodes.release("w1", drain_s=60)

    assert [node["state"] for node in bench.nodes.nodes()] == ["draining", "starting"]
    bench.nodes.kill("w1")
    await until(lambda: bench.names == ["w2"])


async def test_second_release_does_not_postpone_the_deadline(bench: Bench) -> None:
    bench.nodes.want(1, reason="test")
    psutil.Process(bench.pid("w1")).suspend()
    bench.nodes.release("w1", drain_s=0.05)

    def is_gone_after_second_release() -> bool:
        bench.nodes.release("w1", drain_s=60)
        return "w1" not in bench.names

    await until(is_gone_after_second_release)


async def test_workers_that_die_at_start_are_retried_with_growing_back_off(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_workers, "FIRST_BACK_OFF_S", 0.01)
    pauses_s: list[float] = []

    def noted_back_off_s(num_failures: int) -> float:
        pauses_s.append(back_off_s(num_failures))
        return pauses_s[-1]

    monkeypatch.setattr(local_workers, "back_off_s", noted_back_off_s)
    bench.command = DIE

    bench.nodes.want(1, reason="test")

    await until(lambda: len(bench.spawned) >= 6)
    assert pauses_s[:5] == [0.0, 0.01, 0.02, 0.04, 0.08]


async def test_no_worker_starts_during_the_back_off(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_workers, "back_off_s", lambda num_failures: 3600.0)
    bench.command = DIE
    bench.nodes.want(1, reason="test")
    await until(lambda: bench.names == [])

    bench.nodes.want(2, reason="test")

    assert bench.spawned == ["w1"]


async def test_worker_killed_on_purpose_does_not_count_as_a_failure(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_workers, "FIRST_BACK_OFF_S", 3600.0)
    monkeypatch.setattr(local_workers, "MAX_BACK_OFF_S", 3600.0)
    bench.nodes.want(1, reason="test")
    for number in range(1, 6):
        bench.nodes.kill(f"w{number}")
        await until(lambda expected=[f"w{number + 1}"]: bench.names == expected)


async def test_idle_surplus_workers_are_released_newest_first(bench: Bench) -> None:
    bench.busy.add("w3")
    bench.nodes.want(3, reason="test")
    bench.nodes.want(1, reason="test")

    await until(lambda: bench.names == ["w3"])


async def test_workers_wanted_again_within_the_linger_time_are_kept(bench: Bench) -> None:
    bench.nodes.want(2, reason="test")
    bench.nodes.want(0, reason="test")
    bench.nodes.want(2, reason="test")
    await asyncio.sleep(0.15)

    assert bench.names == ["w1", "w2"]


async def test_leftover_children_of_a_dead_worker_are_killed(bench: Bench, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    bench.command = ("sh", "-c", f"sleep 60 & echo $! > {note}; wait")
    bench.nodes.want(1, reason="test")
    await until(lambda: note.exists() and note.read_text().strip() != "")
    child = psutil.Process(int(note.read_text()))

    bench.nodes.want(0, reason="test")
    bench.nodes.kill("w1")

    await until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


async def test_close_kills_workers_that_ignore_sigterm(bench: Bench) -> None:
    bench.command = (
        sys.executable,
        "-c",
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)",
    )
    bench.nodes.want(1, reason="test")
    pid = bench.pid("w1")

    await bench.nodes.close(grace_s=0.2)

    assert not psutil.pid_exists(pid)
    bench.nodes.want(2, reason="too late")
    assert bench.names == []


def test_back_off_grows_and_is_bounded() -> None:
    assert [back_off_s(n) for n in (0, 1, 2, 3, 4, 8, 99)] == [0.0, 0.0, 0.5, 1.0, 2.0, 30.0, 30.0]


async def test_failed_fork_of_a_worker_is_retried(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exception used to end the scheduler, or the tick of a job that wanted workers."""
    monkeypatch.setattr(local_workers, "FIRST_BACK_OFF_S", 0.01)
    spawn, refusals = bench.nodes._spawn, [OSError(12, "Cannot allocate memory")] * 3

    def spawn_sometimes(name: str, slot: Slot) -> subprocess.Popen[bytes]:
        if refusals:
            raise refusals.pop()
        return spawn(name, slot)

    bench.nodes._spawn = spawn_sometimes
    bench.nodes.want(2, reason="test")
    assert bench.names == []
    await until(lambda: len(bench.names) == 2)
