"""The first process of a fake instance. It starts the user-data, takes in orphans, and ends all.

It reads one line of JSON, ``{"command": [...], "environment": {...}, "folder": "...",
"console": "..."}``, and runs it, with what it prints in the file ``console``. From then on its
standard input is its power: when that ends, because the harness cut it or died, it kills every
process of the machine and then itself. As on EC2, the machine runs on when the user-data has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time

PR_SET_CHILD_SUBREAPER = 36
MAX_KILL_S = 10.0


def descendants(root: int) -> list[int]:
    """Return the processes that stem from one, children before their own."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                # The name of the program, in parentheses, may itself have any character.
                state, parent = file.read().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state not in "ZX":
            children.setdefault(int(parent), []).append(int(name))
    found: list[int] = []
    waiting = [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def kill_all() -> None:
    """Kill every process that stems from this one, also those that are made meanwhile."""
    ends_at = time.monotonic() + MAX_KILL_S
    while (alive := descendants(os.getpid())) and time.monotonic() < ends_at:
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        reap()


def reap() -> None:
    """Take the exit states of those that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def main() -> None:
    """Run the machine."""
    # Orphans become ours, so that none escapes the end of the machine.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    line = sys.stdin.buffer.readline()
    if not line:
        return
    order = json.loads(line)
    with open(order["console"], "ab") as console:
        try:
            subprocess.Popen(
                order["command"],
                cwd=order["folder"],
                env=order["environment"],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,
                preexec_fn=restore_signals,
            )
        except OSError as exc:
            console.write(f"cloud-init: the user-data did not start: {exc}\n".encode())
    while not select.select([sys.stdin], [], [], 0.5)[0]:
        reap()
    kill_all()


def restore_signals() -> None:
    """Give the user-data the signals back that the first process ignores."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    main()
