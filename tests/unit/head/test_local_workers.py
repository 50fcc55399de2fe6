"""Which worker processes run, with small real processes in place of workers."""

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
from etrain_jupyter.head.local_workers import (
    LocalNodes,
    Slot,
    back_off_s,
    finish_gpu_query,
    make_slots,
    parse_gpu_list,
    start_gpu_query,
    torch_has_cuda,
    visible_gpus,
)

SLEEP = ("sleep", "60")
DIE = ("false",)


class Bench:
    """Nodes whose workers are harmless commands; ``command`` is what the next one runs."""

    def __init__(self, num_slots: int = 3, linger_s: float = 0.05) -> None:
        self.command: tuple[str, ...] = SLEEP
        self.connected: set[str] = set()
        self.spawned: list[str] = []
        self.nodes = LocalNodes(
            [Slot(index=i) for i in range(num_slots)],
            self.spawn,
            is_connected=self.connected.__contains__,
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


async def test_as_many_as_wanted_run_up_to_the_slots(bench: Bench) -> None:
    bench.nodes.want(2, reason="test")
    assert bench.names == ["w1", "w2"]

    bench.nodes.want(9, reason="test")
    assert bench.names == ["w1", "w2", "w3"]


async def test_held_workers_stay_when_the_jobs_want_none(bench: Bench) -> None:
    bench.nodes.hold(1, reason="test")
    bench.nodes.want(2, reason="test")
    bench.nodes.want(0, reason="test")

    await until(lambda: bench.names == ["w1"])
    await asyncio.sleep(0.15)  # three times as long as surplus workers linger
    assert bench.names == ["w1"]


async def test_a_state_tells_whether_the_scheduler_knows_the_worker(bench: Bench) -> None:
    bench.nodes.want(2, reason="test")
    bench.connected.add("w2")

    assert [node["state"] for node in bench.nodes.nodes()] == ["starting", "running"]


async def test_a_dead_worker_is_replaced_in_its_slot_under_a_new_name(bench: Bench) -> None:
    bench.nodes.want(3, reason="test")

    psutil.Process(bench.pid("w2")).kill()

    await until(lambda: bench.names == ["w1", "w3", "w4"])
    assert [node["slot"] for node in bench.nodes.nodes()] == [0, 2, 1]


async def test_a_released_worker_is_replaced_before_it_has_ended(bench: Bench) -> None:
    bench.nodes.want(1, reason="test")
    psutil.Process(bench.pid("w1")).suspend()

    bench.nodes.release("w1", drain_s=60)

    assert [node["state"] for node in bench.nodes.nodes()] == ["draining", "starting"]
    bench.nodes.kill("w1")
    await until(lambda: bench.names == ["w2"])


async def test_asking_again_for_a_release_does_not_put_off_its_deadline(bench: Bench) -> None:
    bench.nodes.want(1, reason="test")
    psutil.Process(bench.pid("w1")).suspend()
    bench.nodes.release("w1", drain_s=0.05)

    def is_gone_though_asked_again() -> bool:
        bench.nodes.release("w1", drain_s=60)
        return "w1" not in bench.names

    await until(is_gone_though_asked_again)


async def test_workers_that_die_at_their_start_are_retried_with_growing_pauses(
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


async def test_no_worker_is_started_during_a_pause(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_workers, "back_off_s", lambda num_failures: 3600.0)
    bench.command = DIE
    bench.nodes.want(1, reason="test")
    await until(lambda: bench.names == [])

    bench.nodes.want(2, reason="test")

    assert bench.spawned == ["w1"]


async def test_a_worker_that_is_killed_on_purpose_counts_as_no_failure(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_workers, "FIRST_BACK_OFF_S", 3600.0)
    monkeypatch.setattr(local_workers, "MAX_BACK_OFF_S", 3600.0)
    bench.nodes.want(1, reason="test")
    for number in range(1, 6):
        bench.nodes.kill(f"w{number}")
        await until(lambda expected=[f"w{number + 1}"]: bench.names == expected)


async def test_surplus_workers_are_kept_while_nobody_knows_which_a_job_uses(bench: Bench) -> None:
    bench.nodes.want(3, reason="test")
    bench.nodes.want(1, reason="test")
    await asyncio.sleep(0.15)
    assert bench.names == ["w1", "w2", "w3"]

    bench.nodes.want(0, reason="test")
    await until(lambda: bench.names == [])


async def test_surplus_workers_that_no_job_uses_go_the_newest_first(bench: Bench) -> None:
    bench.nodes.is_busy = lambda name: name == "w3"
    bench.nodes.want(3, reason="test")
    bench.nodes.want(1, reason="test")

    await until(lambda: bench.names == ["w3"])


async def test_workers_that_are_wanted_again_in_time_are_kept(bench: Bench) -> None:
    bench.nodes.want(2, reason="test")
    bench.nodes.want(0, reason="test")
    bench.nodes.want(2, reason="test")
    await asyncio.sleep(0.15)

    assert bench.names == ["w1", "w2"]


async def test_what_a_dead_worker_left_in_its_group_is_ended(bench: Bench, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    bench.command = ("sh", "-c", f"sleep 60 & echo $! > {note}; wait")
    bench.nodes.want(1, reason="test")
    await until(lambda: note.exists() and note.read_text().strip() != "")
    child = psutil.Process(int(note.read_text()))

    bench.nodes.want(0, reason="test")
    bench.nodes.kill("w1")

    await until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


async def test_close_takes_those_that_do_not_listen(bench: Bench) -> None:
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


def test_without_gpus_slots_share_the_cores_with_one_thread_each() -> None:
    slots = make_slots([], max_cpu_slots=2)

    assert [(slot.index, slot.device) for slot in slots] == [(0, "cpu"), (1, "cpu")]
    assert slots[0].environment["OMP_NUM_THREADS"] == "1"
    assert slots[0].environment["CUDA_VISIBLE_DEVICES"] == ""


def test_each_gpu_is_a_slot_that_sees_only_itself() -> None:
    slots = make_slots([("GPU-1f", "NVIDIA H200"), ("GPU-2e", "NVIDIA H200")], max_cpu_slots=8)

    assert [slot.device for slot in slots] == ["cuda:0", "cuda:0"]
    assert [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in slots] == ["GPU-1f", "GPU-2e"]


def test_slots_of_gpus_divide_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    # Review G7: eight trainers used to start a thread per core each.
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(local_workers, "num_usable_cores", lambda: 16)

    slots = make_slots([(f"GPU-{n}", "NVIDIA H200") for n in range(8)], max_cpu_slots=8)
    assert {slot.environment["OMP_NUM_THREADS"] for slot in slots} == {"2"}

    monkeypatch.setattr(local_workers, "num_usable_cores", lambda: 4)
    slots = make_slots([(f"GPU-{n}", "NVIDIA H200") for n in range(8)], max_cpu_slots=8)
    assert {slot.environment["OMP_NUM_THREADS"] for slot in slots} == {"1"}

    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    (slot,) = make_slots([("GPU-1f", "NVIDIA H200")], max_cpu_slots=8)
    assert slot.environment["OMP_NUM_THREADS"] == "6"


def test_workers_share_a_gpu_only_when_there_are_more_workers_than_gpus() -> None:
    slots = make_slots([("GPU-1f", "A"), ("GPU-2e", "B")], max_cpu_slots=8, workers_per_gpu=2)

    assert [slot.index for slot in slots] == [0, 1, 2, 3]
    assert [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in slots] == [
        *("GPU-1f", "GPU-2e"),
        *("GPU-1f", "GPU-2e"),
    ]
    assert slots[0].type == "A, shared"


def test_the_drivers_list_is_read_with_the_parts_of_a_cut_gpu() -> None:
    text = (
        "GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-aa)\n"
        "  MIG 3g.20gb     Device  0: (UUID: MIG-b0)\n"
        "  MIG 1g.5gb      Device  1: (UUID: MIG-b1)\n"
        "GPU 1: NVIDIA H200 (UUID: GPU-cc)\n"
    )

    assert parse_gpu_list(text) == [
        ("MIG-b0", "NVIDIA A100-SXM4-40GB MIG 3g.20gb"),
        ("MIG-b1", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"),
        ("GPU-cc", "NVIDIA H200"),
    ]
    assert parse_gpu_list("No devices were found\n") == []


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["GPU-aa", "GPU-bb"]),
        ("", []),
        ("1,0", ["GPU-bb", "GPU-aa"]),
        ("GPU-b", ["GPU-bb"]),
        ("0,7,1", ["GPU-aa"]),
        ("-1", []),
    ],
)
def test_only_gpus_that_this_process_may_use_become_slots(
    visible: str | None, expected: list[str]
) -> None:
    gpus = [("GPU-aa", "A"), ("GPU-bb", "B")]

    assert [uuid for uuid, _ in visible_gpus(gpus, visible)] == expected


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put an ``nvidia-smi`` that runs these shell commands in front of the path."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(local_workers, "torch_has_cuda", lambda: True)

    def write(commands: str) -> None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{commands}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)

    return write


def test_the_driver_is_asked_for_its_gpus(driver: Callable[[str], None]) -> None:
    driver('echo "GPU 0: NVIDIA H200 (UUID: GPU-1f)"')

    assert finish_gpu_query(start_gpu_query(), timeout_s=5.0) == [("GPU-1f", "NVIDIA H200")]


@pytest.mark.parametrize("commands", ["exec sleep 60", "echo it has failed; exit 9"])
def test_a_driver_that_hangs_or_fails_has_no_gpus(
    driver: Callable[[str], None], commands: str
) -> None:
    driver(commands)

    assert finish_gpu_query(start_gpu_query(), timeout_s=0.3) == []


def test_a_torch_without_cuda_has_no_gpus(
    driver: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver("exit 0")
    monkeypatch.setattr(local_workers, "torch_has_cuda", lambda: False)

    assert finish_gpu_query(start_gpu_query(), timeout_s=0.3) == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("cuda: Optional[str] = None", False),
        ("cuda: Optional[str] = '12.8'", True),
        ("cuda = None", False),
    ],
)
def test_what_torch_was_built_for_is_read_and_not_imported(
    line: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "torch" / "version.py").write_text(f"debug = False\n{line}\nhip = None\n")
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.syspath_prepend(tmp_path)

    assert torch_has_cuda() is expected


async def test_worker_that_the_system_cannot_start_is_tried_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Review R2: the exception ended the scheduler, or the tick of a job that wanted workers."""
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
