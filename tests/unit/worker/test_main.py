"""A worker process never outlives the head, also where the kernel does not see to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from etrain_jupyter.process.processes import wait_until

ROOT = Path(__file__).parents[3]
CHILD = """if True:
    import os, subprocess, sys, time
    from etrain_jupyter.process import entry
    entry.die_with_parent(int(sys.argv[1]))
    child = subprocess.Popen(["sleep", "60"])
    print(child.pid, os.path.sameopenfile(0, os.open(os.devnull, os.O_RDONLY)), flush=True)
    time.sleep(60)
"""


def start(parent: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        process_group=0,
    )


def test_closed_pipe_kills_the_worker_and_its_process_group() -> None:
    with start(os.getpid()) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        child_pid, reads_nothing = worker.stdout.readline().split()
        child = psutil.Process(int(child_pid))

        worker.stdin.close()

        assert worker.wait(5) == -signal.SIGKILL
    assert reads_nothing == "True"
    assert wait_until(
        lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, timeout_s=5.0
    )


def test_worker_exits_immediately_if_its_parent_is_already_dead() -> None:
    with start(parent=1) as worker:
        assert worker.wait(10) == 1
