"""A warm spare forks trainers, which share nothing with each other and do not outlive it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from etrain_jupyter.process import installed
from etrain_jupyter.wire.codec import Encoded, encode
from etrain_jupyter.wire.fork_records import MAX_MODULES_BYTES, RECORD, Kind
from etrain_jupyter.wire.messages import ShutDownTrainer
from etrain_jupyter.worker import forks as forks_module
from etrain_jupyter.worker import trainer_process
from etrain_jupyter.worker.forks import Forks, SpareModules
from etrain_jupyter.worker.trainer_process import TrainerProcess

SPARE = """
import os, sys, types
import numpy, torch
from etrain_jupyter.trainer import main

def leave_traces_or_find_some(channel, page):
    '''Stand for a job with any user code.'''
    found = [name for name, is_found in {
        "module": "notebook_module" in sys.modules,
        "environment": "OF_THE_JOB" in os.environ,
        "folder": os.getcwd() == "/",
        "dtype": torch.get_default_dtype() != torch.float32,
        "torch's seed": torch.initial_seed() == 7,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "file": os.path.exists(f"/proc/self/fd/{FAR_FD}"),
    }.items() if is_found]
    print("found:", *found, flush=True)
    names = os.environ.get("ETRAIN_SPARE_MODULES")
    print("imported:", "colorsys" in sys.modules, names, flush=True)
    print("drawn:", numpy.random.random(), flush=True)
    sys.modules["notebook_module"] = types.ModuleType("notebook_module")
    os.environ["OF_THE_JOB"] = "1"
    os.chdir("/")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(7)
    torch.use_deterministic_algorithms(True)
    os.dup2(1, FAR_FD)
    for message in channel.messages():
        break
    print("ends", flush=True)
    sys.exit("an error of the job")

FAR_FD = 500
main.run_trainer = leave_traces_or_find_some
main.exit_after(lambda: main.run_spare(*map(int, sys.argv[1:])))
"""


class Watched(TrainerProcess):
    """A process of which the lines and the cause of the end are kept."""

    def __init__(self, modules: tuple[str, ...] = ()) -> None:
        super().__init__(on_message=self._keep, on_exit=self._note_exit, modules=modules)
        self.lines: list[str] = []
        self.cause = ""

    def _keep(self, _: TrainerProcess, message: Encoded) -> None:
        if message["kind"] == "TextLogged":
            self.lines.append(message["text"])

    def _note_exit(self, _: TrainerProcess, cause: str) -> None:
        self.cause = cause


async def until(condition) -> None:
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
def spare_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let a spare run ``SPARE`` instead of training, with the product's own forks."""
    path = tmp_path / "spare.py"
    path.write_text(SPARE)
    real = asyncio.create_subprocess_exec

    async def start(program, *args, **options):
        return await real(program, "-u", str(path), *args[-3:], **options)

    monkeypatch.setattr(trainer_process.asyncio, "create_subprocess_exec", start)


async def forked_from(spare: TrainerProcess) -> Watched:
    trainer = Watched()
    await trainer.start(spare)
    await until(lambda: len(trainer.lines) == 3)
    return trainer


@pytest.mark.skipif(sys.platform != "linux", reason="forks are used on Linux only")
async def test_forked_jobs_are_isolated_from_each_other_and_end_with_the_spare(spare_script):
    spare = Watched(modules=("no_such_module", "pyarrow", "colorsys"))
    await spare.start()
    await until(lambda: spare.can_fork)

    first = await forked_from(spare)
    assert first.lines[:2] == ["found:", "imported: True None"]
    assert first.progress().alive_age_s < 60, "it pulses on its own page"
    assert os.getpgid(first.pid) == first.pid != spare.pid
    assert spare.has_forks
    first.send(encode(ShutDownTrainer(trainer="")))
    await until(lambda: first.cause)
    assert first.cause.endswith("exited with code 1")
    assert (first.lines[3], first.lines[-1]) == ("ends", "SystemExit: an error of the job")

    second = await forked_from(spare)
    assert second.lines[0] == "found:"
    assert second.lines[2] != first.lines[2], "numpy's generator was seeded"
    second.send_signal(signal.SIGSTOP)
    await until(lambda: second.process_state() == "stopped")
    third = await forked_from(spare)

    spare.kill("enough")
    await until(lambda: spare.cause and second.cause and third.cause)
    assert "SIGKILL" in second.cause
    assert not spare.can_fork
    assert not spare.has_forks
    await until(lambda: not any(psutil.pid_exists(t.pid) for t in (spare, second, third)))
    with pytest.raises(OSError, match="spare"):
        await Watched().start(spare)


CAN_FORK = """
import os, threading, time
import torch
from etrain_jupyter.trainer import spare

print(spare.can_fork())
torch.cuda._is_in_bad_fork = lambda: True
print(spare.can_fork(), "after CUDA was initialized")
torch.cuda._is_in_bad_fork = lambda: False
spare.PROBE_S = 0.1
os.register_at_fork(after_in_child=lambda: hangs and time.sleep(60))
hangs = True
print(spare.can_fork(), "if a fork hangs")
hangs, spare.PROBE_S = False, 60.0
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print(spare.can_fork(), "with another thread", flush=True)
os._exit(0)
"""


def test_spare_does_not_fork_if_a_fork_would_not_work() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CAN_FORK], check=True, timeout=120, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == [
        "True",
        "False after CUDA was initialized",
        "False if a fork hangs",
        "False with another thread",
    ]


async def test_fork_without_an_answer_fails_and_a_late_one_is_killed(monkeypatch) -> None:
    monkeypatch.setattr(forks_module, "FORK_S", 0.05)
    forks = Forks()
    spare_end = os.dup(forks.spare_fd)
    forks.begin()
    with pytest.raises(TimeoutError):
        await forks.fork([0, 0])
    assert forks.is_in_use, "its answer is still expected"

    late = subprocess.Popen(["sleep", "60"])
    with socket.socket(fileno=spare_end) as spare:
        pidfd = os.pidfd_open(late.pid)
        socket.send_fds(spare, [RECORD.pack(Kind.FORKED, late.pid, 0)], [pidfd])
        os.close(pidfd)
        code = await asyncio.to_thread(late.wait, 60)
        assert code == -signal.SIGKILL
        spare.send(RECORD.pack(Kind.EXITED, late.pid, code))
        await until(lambda: not forks.is_in_use)
    forks.close()


async def test_fork_fails_if_no_descriptor_is_left_to_supervise_the_trainer() -> None:
    forks = Forks()
    spare_end = os.dup(forks.spare_fd)
    forks.begin()
    request = asyncio.create_task(forks.fork([0, 0]))
    await asyncio.sleep(0)
    child = subprocess.Popen(["sleep", "60"])
    with socket.socket(fileno=spare_end) as spare:
        spare.send(RECORD.pack(Kind.FORKED, child.pid, 0))  # the kernel has dropped the pidfd
        with pytest.raises(OSError, match="Too many open files"):
            await request
        assert child.wait(60) == -signal.SIGKILL
        spare.send(RECORD.pack(Kind.EXITED, child.pid, -signal.SIGKILL))
        await until(lambda: not forks.is_in_use)
    forks.close()


def test_installation_of_a_package_is_detected(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(installed.site, "getusersitepackages", lambda: str(tmp_path))
    before = installed.read_installed()
    assert installed.read_installed() == before
    (tmp_path / "timm-1.0.dist-info").mkdir()
    os.utime(tmp_path, ns=(1, 1))  # some file systems have a coarse clock
    assert installed.read_installed() != before


def test_modules_of_several_jobs_add_up_in_order_and_each_is_imported_once() -> None:
    modules = SpareModules()

    assert modules.learn(["b", "a"])
    assert modules.learn(["a", "c"])
    assert not modules.learn(["c", "b"])

    assert modules.current == ("b", "a", "c")


def test_refused_modules_are_not_learned_again_and_the_others_remain() -> None:
    modules = SpareModules()
    modules.learn(["a"])
    modules.learn(["threads", "a"])

    modules.refuse_newest()

    assert modules.current == ("a",)
    assert not modules.learn(["threads"])
    assert modules.learn(["threads", "b"])
    assert modules.current == ("a", "b")


def test_more_modules_than_fit_into_a_variable_are_not_learned() -> None:
    modules = SpareModules()
    modules.learn(["a"])

    assert not modules.learn(["x" * MAX_MODULES_BYTES])

    assert modules.current == ("a",)
