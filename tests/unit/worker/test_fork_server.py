"""The machine's fork server forks warm spares, which share nothing and outlive it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from etrain_jupyter.head.fork_server import MAX_FAILURES, ForkServerProcess
from etrain_jupyter.process import installed
from etrain_jupyter.worker import forks as forks_module
from etrain_jupyter.worker.forks import UNKNOWN_STATUS, ForkServer
from etrain_jupyter.worker.trainer_process import TrainerProcess

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks are used on Linux only")


class Spare(TrainerProcess):
    """A process whose printed lines and cause of exit are kept."""

    def __init__(self, server: ForkServer | None) -> None:
        super().__init__(on_message=self._keep, on_exit=self._note_exit, server=server)
        self.lines: list[str] = []
        self.cause = ""

    def _keep(self, _: TrainerProcess, message) -> None:
        if message["kind"] == "TextLogged":
            self.lines.append(message["text"])

    def _note_exit(self, _: TrainerProcess, cause: str) -> None:
        self.cause = cause


async def until(condition) -> None:
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


def connected(process: ForkServerProcess) -> ForkServer:
    connection = process.connect()
    assert connection is not None
    return ForkServer(connection.detach())


async def warm_spare(server: ForkServer | None) -> Spare:
    spare = Spare(server)
    await spare.start()
    await until(lambda: spare.can_fork)
    return spare


def is_running(pid: int) -> bool:
    """Return False for a zombie too: in a container, init may not reap orphans."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def server_pid(spare: TrainerProcess) -> int:
    return psutil.Process(spare.pid).ppid()


async def test_workers_share_one_import_and_their_spares_outlive_the_server(
    process: ForkServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = connected(process), connected(process)
    monkeypatch.setenv("OF_THE_FIRST", "1")
    one = await warm_spare(first)
    monkeypatch.delenv("OF_THE_FIRST")
    other = await warm_spare(second)

    pid = server_pid(one)
    assert pid == server_pid(other) != os.getpid()
    assert os.getpgid(one.pid) == one.pid, "it has its own process group"
    assert one.progress() is not None
    # A trainer forked from the spare prints to its own pipes, and has the worker's environment.
    trainer = Spare(first)
    await trainer.start(one)
    assert server_pid(trainer) == one.pid
    inherited = [
        os.readlink(f"/proc/{other.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{other.pid}/fd")
    ]
    theirs = [os.readlink(f"/proc/{one.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{one.pid}/fd")]
    assert not {path for path in inherited if path.startswith(("socket", "pipe"))} & set(theirs)

    os.kill(pid, signal.SIGKILL)
    await until(lambda: server_pid(one) != pid)
    assert not trainer.cause
    assert one.can_fork, "it needs the server only for its own start"
    late = await warm_spare(first)
    assert server_pid(late) == os.getpid(), "without a server, it was spawned"

    for spare in (one, other, late):
        spare.kill("enough")
    await until(lambda: one.cause and other.cause and late.cause and trainer.cause)
    first.close()
    second.close()


async def test_exit_status_of_a_spare_is_reported(process: ForkServerProcess) -> None:
    server = connected(process)
    spare = await warm_spare(server)

    os.kill(spare.pid, signal.SIGSEGV)
    await until(lambda: spare.cause)

    assert "SIGSEGV" in spare.cause
    assert not server.is_in_use
    server.close()


async def test_exit_after_the_server_is_detected_without_a_status(
    process: ForkServerProcess,
) -> None:
    server = connected(process)
    spare = await warm_spare(server)
    os.kill(server_pid(spare), signal.SIGKILL)
    await until(lambda: not server.is_in_use)

    os.kill(spare.pid, signal.SIGTERM)
    await until(lambda: spare.cause)

    assert str(UNKNOWN_STATUS) in spare.cause


async def test_server_kills_the_spares_of_an_exited_worker_even_if_they_are_stopped(
    process: ForkServerProcess,
) -> None:
    leaving, staying = connected(process), connected(process)
    stopped, other = await warm_spare(leaving), await warm_spare(staying)
    stopped.send_signal(signal.SIGSTOP)

    leaving.close()  # as the kernel does when the worker exits

    await until(lambda: stopped.cause)
    assert other.can_fork
    other.kill()
    await until(lambda: other.cause)
    staying.close()


async def test_server_ends_with_the_keeper_and_with_its_last_worker(
    process: ForkServerProcess, keeper: list[int]
) -> None:
    server = connected(process)
    spare = await warm_spare(server)
    pid = server_pid(spare)

    os.close(keeper[1])
    keeper[1] = os.dup(keeper[0])
    await until(lambda: spare.cause and process._process.poll() == 0)

    assert not is_running(spare.pid)
    assert not is_running(pid)
    server.close()


async def test_server_survives_the_head_and_ends_with_its_last_worker(
    process: ForkServerProcess,
) -> None:
    server = connected(process)
    running = process._process
    process._retire()  # the kernel closes the head's connection too
    with pytest.raises(subprocess.TimeoutExpired):
        running.wait(0.5)

    server.close()

    assert running.wait(60) == 0


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
    monkeypatch.setattr(installed.site, "getusersitepackages", lambda: str(tmp_path / "packages"))
    server = connected(process)
    pid = process._process.pid
    assert not server.is_outdated
    (tmp_path / "packages").mkdir()

    assert server.is_outdated
    again = connected(process)

    assert process._process.pid != pid
    assert not again.is_outdated
    again.close()
    server.close()


async def test_spare_is_spawned_if_the_server_does_not_answer(
    process: ForkServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forks_module, "SERVER_FORK_S", 0.05)
    server = connected(process)
    process._process.send_signal(signal.SIGSTOP)

    spare = await warm_spare(server)

    assert server_pid(spare) == os.getpid()
    spare.kill()
    await until(lambda: spare.cause)
    server.close()
