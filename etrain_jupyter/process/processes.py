"""Identify, find, and kill the processes of a cluster.

A process is identified by its pid *and* its start time, because pids are reused.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

MARKER = "ETRAIN_CLUSTER_ID"
"""Environment variable inherited by all of a cluster's processes; used to find leftovers."""


def stamp_of(pid: int) -> str | None:
    """Return a string that identifies the current process with this pid; None if there is none.

    On Linux it consists of the boot id and the start time in clock ticks, because psutil's start
    time shifts when the system clock is set.
    """
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        if sys.platform != "linux":
            return repr(process.create_time())
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # The name in parentheses may contain spaces and parentheses; the start time is the 20th
        # field after it.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return f"{boot}:{fields[19]}"
    except (psutil.Error, OSError):
        return None


def processes_of(cluster_id: str) -> list[psutil.Process]:
    """Return a cluster's head and all of its descendants, including reparented ones."""
    # Search by inherited environment, as an orphan has another parent, and may have its own
    # session.
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            is_other = process.pid == os.getpid() or process.uids().real != os.getuid()
            if is_other or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.environ().get(MARKER) == cluster_id:
                found.append(process)
    return found


def kill_processes_of(cluster_id: str, *, timeout_s: float = 2.0) -> list[psutil.Process]:
    """Send SIGKILL to a cluster's processes; return those still running after ``timeout_s``."""

    def kill_again() -> bool:
        # Rescan each time, because a process may have started a child since the previous scan.
        left[:] = processes_of(cluster_id)
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        return not left

    left: list[psutil.Process] = []  # the result of the latest scan
    wait_until(kill_again, timeout_s=timeout_s)
    return left


def wait_until(is_done: Callable[[], bool], *, timeout_s: float) -> bool:
    """Poll ``is_done`` every 20 ms; return False if it is still false after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not is_done():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
    return True


def num_usable_cores() -> int:
    """Return the number of cores that this process may use; containers often restrict it."""
    affinity = getattr(os, "sched_getaffinity", None)  # missing on macOS
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
