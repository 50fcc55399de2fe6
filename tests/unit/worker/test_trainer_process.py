"""The end of a trainer is noticed at once, whatever it leaves behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import msgpack
import psutil
import pytest

from etrain_jupyter.log.events import STACKS_HEADER
from etrain_jupyter.worker import trainer_process
from etrain_jupyter.worker.trainer_process import TrainerProcess

CHILD_HOLDS_THE_PIPES = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
print(child.pid, flush=True)
time.sleep(3600)
"""


HOLDS_THE_LOCK = """
import ctypes
from etrain_jupyter.trainer.main import open_page

def hold_it_for_ever():
    sleep = ctypes.PyDLL(None).sleep
    print("holding", flush=True)
    while True:
        sleep(1000)

page = open_page(PAGE_FD)
page.begin(3)
hold_it_for_ever()
"""

WRITES_ITS_PROGRESS = """
import time
from etrain_jupyter.trainer.main import open_page

page = open_page(PAGE_FD)
page.begin(3)
page.count_collective()
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def script(monkeypatch, tmp_path):
    """Let the trainer run a script instead of training."""

    def use(text: str) -> None:
        path = tmp_path / "fake.py"
        path.write_text("import sys\nFD, PAGE_FD = map(int, sys.argv[1:])\n" + text)
        real = asyncio.create_subprocess_exec

        async def start(program, *args, **options):
            return await real(program, "-u", str(path), *args[-2:], **options)

        monkeypatch.setattr(trainer_process.asyncio, "create_subprocess_exec", start)

    return use


async def run(act) -> tuple[list[str], str]:
    """Start a trainer, let ``act`` do something to it, and return its lines and cause."""
    lines: list[str] = []
    over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    trainer = TrainerProcess(
        on_message=lambda _, message: lines.append(message["text"]),
        on_exit=lambda _, cause: over.set_result(cause),
    )
    await trainer.start()
    await act(trainer, lines)
    return lines, await asyncio.wait_for(over, 60)


async def test_killed_trainer_is_detected_although_its_children_hold_its_pipes(script, monkeypatch):
    script(CHILD_HOLDS_THE_PIPES)
    exit_code = TrainerProcess._exit_code
    # Whoever waits for the time-out, which is for a process that would not end, waits in vain.
    monkeypatch.setattr(TrainerProcess, "_exit_code", lambda self: exit_code(self, 3600.0))
    children = []

    async def kill(trainer, lines):
        await until(lambda: lines)
        children.append(psutil.Process(int(lines[0])))
        os.kill(trainer.pid, signal.SIGKILL)

    try:
        _, cause = await run(kill)
        assert "SIGKILL" in cause
        assert children[0].is_running(), "its child still held the pipes"
    finally:
        for child in children:
            child.kill()


async def test_output_of_a_crash_is_delivered_before_its_exit(script):
    script("print('last words', flush=True)\nsys.exit(7)")

    async def nothing(trainer, lines):
        pass

    lines, cause = await run(nothing)
    assert lines == ["last words"]
    assert "exited with code 7" in cause


async def until(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


async def test_stacks_show_what_holds_the_gil(script):
    script(HOLDS_THE_LOCK)

    async def look_and_kill(trainer, lines):
        await until(lambda: "holding" in lines)
        await until(lambda: trainer.progress().alive_age_s > 1.0)
        await trainer.log_stacks()
        assert trainer.process_state() == "sleeping"
        trainer.kill("it held the GIL")

    lines, cause = await run(look_and_kill)
    assert lines[1] == STACKS_HEADER
    assert any("in hold_it_for_ever" in line for line in lines)
    assert cause == "it held the GIL"


async def test_stopped_trainer_shows_its_progress_and_its_state_instead_of_stacks(script):
    script(WRITES_ITS_PROGRESS)

    async def stop_and_kill(trainer, lines):
        await until(lambda: "ready" in lines)
        trainer.send_signal(signal.SIGSTOP)
        await until(lambda: trainer.process_state() == "stopped")
        await until(lambda: trainer.progress().alive_age_s > 1.0)
        seen = trainer.progress()
        assert (seen.generation, seen.collectives, seen.phase) == (3, 1, "forming")
        await trainer.log_stacks()
        trainer.kill("it was stopped")

    lines, cause = await run(stop_and_kill)
    assert "is stopped: the stacks of its threads cannot be logged" in lines[-1]
    assert cause == "it was stopped"


async def test_trainer_that_is_still_starting_is_not_asked_for_stacks(script):
    script("import time\nprint('here', flush=True)\ntime.sleep(60)")

    async def ask_and_kill(trainer, lines):
        await until(lambda: lines)
        await trainer.log_stacks()  # the signal would end it
        assert trainer.process_state() == "sleeping"
        trainer.kill("enough")

    lines, cause = await run(ask_and_kill)
    assert "cannot be logged" in lines[-1]
    assert cause == "enough"


async def test_progress_page_is_closed_when_a_trainer_has_exited(script):
    script(WRITES_ITS_PROGRESS)
    descriptors = psutil.Process().num_fds()

    async def kill(trainer, lines):
        await until(lambda: lines)
        trainer.kill("enough")
        kill.trainer = trainer

    await run(kill)
    assert kill.trainer.progress() is None
    await until(lambda: psutil.Process().num_fds() <= descriptors)


async def test_trainer_killed_while_it_starts_exits(script):
    script("import time\ntime.sleep(60)")
    over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    trainer = TrainerProcess(
        on_message=lambda *_: None, on_exit=lambda _, cause: over.set_result(cause)
    )
    starting = asyncio.create_task(trainer.start())
    await asyncio.sleep(0)
    trainer.kill("nobody wants it any more")
    await starting
    assert await asyncio.wait_for(over, 20) == "nobody wants it any more"


def test_trainer_raises_its_descriptor_limit():
    # Review S3: strangers' connections use descriptors, and gloo ends the process at the limit.
    code = """
import resource
from etrain_jupyter.trainer.main import MAX_DESCRIPTORS, raise_descriptor_limit

_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
raise_descriptor_limit()
soft, after = resource.getrlimit(resource.RLIMIT_NOFILE)
most = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
assert (soft, after) == (most, hard), (soft, after, hard)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


async def test_text_that_cannot_be_encoded_is_printed_escaped(script):
    """Review R4: printing a file name that is not UTF-8 ended the trainer."""
    script(
        "from etrain_jupyter.trainer.main import print_any_text\n"
        "print_any_text()\nprint('caf\\udce9', flush=True)"
    )

    async def nothing(trainer, lines):
        pass

    lines, cause = await run(nothing)
    assert lines == ["caf\\udce9"]
    assert "exited with code 0" in cause


@pytest.mark.parametrize(("kills", "cause"), [(0, ""), (1, " (out of memory?)")])
async def test_kill_is_put_down_to_memory_only_if_linux_has_killed_for_memory(
    script, monkeypatch, tmp_path, kills, cause
):
    script("import time; time.sleep(60)")
    counters = tmp_path / "vmstat"
    counters.write_text("pgfault 7\noom_kill 3\n")
    monkeypatch.setattr(trainer_process, "VMSTAT", counters)

    async def kill(trainer, lines):
        counters.write_text(f"pgfault 9\noom_kill {3 + kills}\n")
        os.kill(trainer.pid, signal.SIGKILL)

    _, shown = await run(kill)
    assert shown.endswith(f"was killed by SIGKILL{cause}")


async def test_trainer_with_undecodable_messages_is_killed_and_its_exit_is_reported(script):
    """The task that reads them ended silently, and nobody heard of the trainer any more."""
    script(
        "import socket, time\n"
        "socket.socket(fileno=FD).sendall(bytes([0, 0, 0, 1, 0xc1]))\n"
        "time.sleep(60)"
    )

    async def nothing(trainer, lines):
        pass

    _, cause = await run(nothing)
    assert cause.startswith("its message cannot be decoded: ")


@pytest.mark.parametrize(
    ("hello", "words"),
    [
        ({"kind": "SpareReady", "pid": 1, "wire_version": 99}, "it uses wire version 99, and"),
        ({"kind": "SpareReady", "is_new": 1, "wire_version": 99}, "it uses wire version 99, and"),
    ],
)
async def test_trainer_of_another_wire_version_is_killed_with_the_reason(script, hello, words):
    body = msgpack.packb(hello)
    script(
        "import socket, time\n"
        f"socket.socket(fileno=FD).sendall({len(body).to_bytes(4, 'big') + body!r})\n"
        "time.sleep(60)"
    )

    async def nothing(trainer, lines):
        pass

    _, cause = await run(nothing)
    assert cause.startswith(words)
    assert "etrain-jupyter was updated on this machine while the worker was running." in cause
    assert "The trainer was killed. Restart the worker" in cause


@pytest.mark.parametrize("kind", ["TrainerExited", "Heartbeat", "SupervisorHello", "RunCode"])
async def test_trainer_that_sends_a_kind_reserved_for_its_supervisor_is_killed(script, kind):
    body = msgpack.packb({"kind": kind, "text": "forwarded"})
    script(
        "import socket, time\n"
        f"socket.socket(fileno=FD).sendall({len(body).to_bytes(4, 'big') + body!r})\n"
        "time.sleep(60)"
    )

    async def nothing(trainer, lines):
        pass

    lines, cause = await run(nothing)
    assert lines == []
    assert (
        f"its message cannot be decoded: MalformedMessageError: unknown message '{kind}'" in cause
    )
