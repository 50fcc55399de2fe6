"""A fork server forks trainers, which share nothing with each other and outlive it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from etrain_jupyter.process import fork_server
from etrain_jupyter.process.fork_server import MAX_FAILURES, ForkServerProcess
from etrain_jupyter.wire.codec import Encoded, encode
from etrain_jupyter.wire.fork_records import RECORD, Kind
from etrain_jupyter.wire.messages import ShutDownTrainer
from etrain_jupyter.worker import forks as forks_module
from etrain_jupyter.worker.forks import UNKNOWN_STATUS, Forks, ForkServer
from etrain_jupyter.worker.trainer_process import TrainerProcess

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks are used on Linux only")

SERVER = """
import os, sys, types
import numpy, torch
from etrain_jupyter.trainer import main

def leave_traces_or_find_some(channel_fd, page_fd):
    '''Stand for a job with any user code.'''
    page = main.open_page(page_fd)
    channel = main.Channel(main.socket.socket(fileno=channel_fd))
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
    print("drawn:", numpy.random.random(), flush=True)
    print("imported:", *(n for n in MODULES if n in sys.modules), os.environ.get("SET_BY_ABC"))
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
MODULES = ("installed_abc", "threads_abc", "ends_abc", "pyclbr", "pyarrow")
main.run_trainer = leave_traces_or_find_some
sys.argv[1:1] = ["--serve"]
main.main()
"""


class Watched(TrainerProcess):
    """A process of which the lines and the cause of the end are kept."""

    def __init__(self, forks: Forks | None) -> None:
        super().__init__(on_message=self._keep, on_exit=self._note_exit, forks=forks)
        self.lines: list[str] = []
        self.cause = ""
        self.is_ready = False

    def _keep(self, _: TrainerProcess, message: Encoded) -> None:
        if message["kind"] == "TextLogged":
            self.lines.append(message["text"])
        self.is_ready |= message["kind"] == "SpareReady"

    def _note_exit(self, _: TrainerProcess, cause: str) -> None:
        self.cause = cause


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
def keeper() -> Iterator[list[int]]:
    """Provide the ends of a keeper's pipe: read, write. A test may close the write end."""
    ends = list(os.pipe())
    yield ends
    for end in ends:
        os.close(end)


@pytest.fixture
def process(keeper: list[int], tmp_path: Path) -> Iterator[ForkServerProcess]:
    process = ForkServerProcess(
        parent_pipe=keeper[0], log=tmp_path / "forks.log", environment={"OMP_NUM_THREADS": "1"}
    )
    yield process
    process.close()


def connected(process: ForkServerProcess) -> Forks:
    connection = process.connect()
    assert connection is not None
    return Forks(connection.detach())


async def started(forks: Forks | None) -> Watched:
    trainer = Watched(forks)
    await trainer.start()
    await until(lambda: trainer.is_ready)
    return trainer


def is_running(pid: int) -> bool:
    """Return False for a zombie too: in a container, init may not reap orphans."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def parent_of(trainer: TrainerProcess) -> int:
    return psutil.Process(trainer.pid).ppid()


async def test_workers_share_one_import_and_their_trainers_outlive_the_server(
    process: ForkServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = connected(process), connected(process)
    first.warm_up()
    await until(lambda: first.is_ready)
    one, other = await started(first), await started(second)

    pid = parent_of(one)
    assert pid == parent_of(other) == process._process.pid
    assert os.getpgid(one.pid) == one.pid, "it has its own process group"
    assert one.progress().alive_age_s < 60, "it pulses on its own page"
    inherited = [
        os.readlink(f"/proc/{other.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{other.pid}/fd")
    ]
    theirs = [os.readlink(f"/proc/{one.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{one.pid}/fd")]
    assert not {path for path in inherited if path.startswith(("socket", "pipe"))} & set(theirs)

    os.kill(pid, signal.SIGKILL)
    await until(lambda: parent_of(one) != pid)
    late = await started(first)
    assert parent_of(late) == first._own._process.pid, "the worker has started its own server"
    assert not one.cause
    assert not other.cause
    os.kill(one.pid, signal.SIGTERM)
    await until(lambda: one.cause)
    assert str(UNKNOWN_STATUS) in one.cause
    os.kill(late.pid, signal.SIGSEGV)
    await until(lambda: late.cause)
    assert "SIGSEGV" in late.cause

    other.kill()
    await until(lambda: other.cause)
    own = first._own._process
    first.close()
    second.close()
    assert own.poll() is not None


async def job_of(forks: Forks) -> Watched:
    trainer = Watched(forks)
    await trainer.start()
    await until(lambda: len(trainer.lines) == 3)
    return trainer


async def test_forked_jobs_are_isolated_from_each_other(
    process: ForkServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {
        "installed_abc": "import os; os.environ['SET_BY_ABC'] = '1'",
        "threads_abc": "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
        "ends_abc": "import os; os._exit(0)",
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "server.py").write_text(SERVER)
    process.command = (str(tmp_path / "server.py"),)
    forks = connected(process)

    first = await job_of(forks)
    assert (first.lines[0], first.lines[2]) == ("found:", "imported: None")
    first.send(encode(ShutDownTrainer(trainer="")))
    await until(lambda: first.cause)
    assert first.cause.endswith("exited with code 1")
    assert (first.lines[3], first.lines[-1]) == ("ends", "SystemExit: an error of the job")

    second = await job_of(forks)
    assert second.lines[0] == "found:"
    assert second.lines[1] != first.lines[1], "numpy's generator was seeded"
    second.kill()

    # Modules of the previous jobs are imported, except where this would prevent forks.
    forks.learn(["threads_abc"])
    await until(lambda: "threads_abc" in (tmp_path / "forks.log").read_text())
    forks.learn(["no_such_module", "installed_abc", "pyarrow", "pyclbr"])
    forks.learn(["threads_abc"])
    third = second
    async with asyncio.timeout(120):
        while "pyclbr" not in third.lines[2]:
            third = await job_of(forks)
            third.kill()
    assert third.lines[2] == "imported: installed_abc pyclbr pyarrow 1"
    forks.learn(["ends_abc"])
    await until(lambda: "ends_abc" in (tmp_path / "forks.log").read_text())
    last = await job_of(forks)
    assert last.lines[2] == third.lines[2]
    last.kill()
    await until(lambda: last.cause and third.cause and second.cause)
    forks.close()


async def test_server_kills_the_trainers_of_an_exited_worker_even_if_they_are_stopped(
    process: ForkServerProcess,
) -> None:
    leaving, staying = connected(process), connected(process)
    stopped, other = await started(leaving), await started(staying)
    stopped.send_signal(signal.SIGSTOP)

    leaving.close()  # as the kernel does when the worker exits

    await until(lambda: stopped.cause)
    assert not other.cause
    other.kill()
    await until(lambda: other.cause)
    staying.close()


async def test_server_ends_with_the_keeper_and_with_its_last_worker(
    process: ForkServerProcess, keeper: list[int]
) -> None:
    forks = connected(process)
    trainer = await started(forks)
    pid = parent_of(trainer)

    os.close(keeper[1])
    keeper[1] = os.dup(keeper[0])
    await until(lambda: trainer.cause and process._process.poll() == 0)

    assert not is_running(trainer.pid)
    assert not is_running(pid)
    forks.close()


async def test_server_survives_the_head_and_ends_with_its_last_worker(
    process: ForkServerProcess,
) -> None:
    forks = connected(process)
    running = process._process
    process.retire()  # the kernel closes the head's connection too
    with pytest.raises(subprocess.TimeoutExpired):
        running.wait(0.5)

    forks.close()

    assert running.wait(60) == 0


async def test_resting_worker_ends_its_own_server_after_the_trainers() -> None:
    forks = Forks()
    trainer = await started(forks)
    server = forks._own._process

    forks.rest()
    with pytest.raises(subprocess.TimeoutExpired):
        server.wait(0.5)
    trainer.kill("enough")
    await until(lambda: trainer.cause)

    await until(lambda: server.poll() == 0)
    forks.close()


async def test_server_that_keeps_failing_is_not_restarted(
    process: ForkServerProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PYTHONHOME", "/nowhere")  # the interpreter does not even start
    for _ in range(MAX_FAILURES):
        connection = process.connect()
        assert connection is not None
        connection.close()
        assert process._process.wait(60) != 0

    assert process.connect() is None
    assert "forks.log" in caplog.text


async def test_installed_package_replaces_the_server(
    process: ForkServerProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fork_server.site, "getusersitepackages", lambda: str(tmp_path / "packages"))
    forks = connected(process)
    before, server = process._process.pid, forks._server
    assert server.is_usable
    (tmp_path / "packages").mkdir()
    assert not server.is_usable

    again = connected(process)
    forks.warm_up()

    assert process._process.pid != before
    assert again._server.is_usable
    assert forks._server is not server
    assert forks._server.is_usable
    again.close()
    forks.close()


async def test_trainer_is_spawned_if_the_server_does_not_answer(
    process: ForkServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forks_module, "IMPORT_S", 0.05)
    forks = connected(process)
    process._process.send_signal(signal.SIGSTOP)

    trainer = await started(forks)

    assert parent_of(trainer) == os.getpid()
    assert forks._server is None, "the next trainer gets another server"
    trainer.kill()
    await until(lambda: trainer.cause)
    forks.close()


CAN_FORK = """
import os, threading, time
import torch
from etrain_jupyter.trainer import fork_server

print(fork_server.can_fork())
torch.cuda._is_in_bad_fork = lambda: True
print(fork_server.can_fork(), "after CUDA was initialized")
torch.cuda._is_in_bad_fork = lambda: False
fork_server.PROBE_S = 0.1
os.register_at_fork(after_in_child=lambda: hangs and time.sleep(60))
hangs = True
print(fork_server.can_fork(), "if a fork hangs")
hangs, fork_server.PROBE_S = False, 60.0
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print(fork_server.can_fork(), "with another thread", flush=True)
os._exit(0)
"""


def test_server_does_not_fork_if_a_fork_would_not_work() -> None:
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
    monkeypatch.setattr(forks_module, "IMPORT_S", 0.05)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = ForkServer(ours)
    with pytest.raises(TimeoutError):
        await server.fork([0, 0])
    server.retire()
    assert server.is_in_use, "its answer is still expected"

    late = subprocess.Popen(["sleep", "60"])
    with theirs:
        pidfd = os.pidfd_open(late.pid)
        socket.send_fds(theirs, [RECORD.pack(Kind.FORKED, late.pid, 0)], [pidfd])
        os.close(pidfd)
        code = await asyncio.to_thread(late.wait, 60)
        assert code == -signal.SIGKILL
        theirs.send(RECORD.pack(Kind.EXITED, late.pid, code))
        await until(lambda: not server.is_in_use)
    assert not server.is_usable, "it has closed its connection"


async def test_fork_fails_if_no_descriptor_is_left_to_supervise_the_trainer() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = ForkServer(ours)
    request = asyncio.create_task(server.fork([0, 0]))
    await asyncio.sleep(0)
    child = subprocess.Popen(["sleep", "60"])
    with theirs:
        theirs.send(RECORD.pack(Kind.FORKED, child.pid, 0))  # the kernel has dropped the pidfd
        with pytest.raises(OSError, match="Too many open files"):
            await request
        assert child.wait(60) == -signal.SIGKILL
        theirs.send(RECORD.pack(Kind.EXITED, child.pid, -signal.SIGKILL))
        await until(lambda: not server.is_in_use)
    server.close()


def test_installation_of_a_package_is_detected(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(fork_server.site, "getusersitepackages", lambda: str(tmp_path))
    before = fork_server.read_installed()
    assert fork_server.read_installed() == before
    (tmp_path / "timm-1.0.dist-info").mkdir()
    os.utime(tmp_path, ns=(1, 1))  # some file systems have a coarse clock
    assert fork_server.read_installed() != before
