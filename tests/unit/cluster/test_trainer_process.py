"""The end of a trainer is noticed at once, whatever it leaves behind."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import psutil
import pytest

from etrain_jupyter.cluster import trainer_process
from etrain_jupyter.cluster.trainer_process import TrainerProcess

CHILD_HOLDS_THE_PIPES = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])
print(child.pid, flush=True)
time.sleep(30)
"""


@pytest.fixture
def script(monkeypatch, tmp_path):
    """Let the trainer run a script instead of training."""

    def use(text: str) -> None:
        path = tmp_path / "fake.py"
        path.write_text("import sys\nFD = int(sys.argv[1])\n" + text)
        real = asyncio.create_subprocess_exec

        async def start(program, *args, **options):
            return await real(program, "-u", str(path), args[-1], **options)

        monkeypatch.setattr(trainer_process.asyncio, "create_subprocess_exec", start)

    return use


async def run(act) -> tuple[list[str], str, float]:
    """Start a trainer, let ``act`` do something to it, and return its lines, cause and delay."""
    lines: list[str] = []
    over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    trainer = TrainerProcess(
        on_message=lambda _, message: lines.append(message["text"]),
        on_exit=lambda _, cause: over.set_result(cause),
    )
    await trainer.start()
    await act(trainer, lines)
    started = time.monotonic()
    cause = await asyncio.wait_for(over, 20)
    return lines, cause, time.monotonic() - started


async def test_killed_trainer_is_noticed_although_its_children_hold_its_pipes(script):
    script(CHILD_HOLDS_THE_PIPES)

    async def kill(trainer, lines):
        while not lines:
            await asyncio.sleep(0.01)
        os.kill(trainer.pid, signal.SIGKILL)

    lines, cause, delay_s = await run(kill)
    psutil.Process(int(lines[0])).kill()
    assert "SIGKILL" in cause
    assert delay_s < 4  # not the time-out for a process that would not end


async def test_what_a_crash_printed_comes_before_its_end(script):
    script("print('last words', flush=True)\nsys.exit(7)")

    async def nothing(trainer, lines):
        pass

    lines, cause, _ = await run(nothing)
    assert lines == ["last words"]
    assert "exited with code 7" in cause
