"""The first process of a simulated instance: runs the user-data, adopts orphans, and ends them all.

It reads one line of JSON, ``{"command": [...], "environment": {...}, "folder": "...",
"console": "..."}``, and runs the command with its output in the file ``console``. Its standard
input represents the power supply: when that closes, because the harness closed it or died, the
process kills all processes of the machine and itself. As on EC2, the machine keeps running after
the user-data has finished.
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
    """Return the descendants of a process, children before their own children."""
    children: dict[int, list[int]] = {}
    # From /proc, since psutil is not available here.
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                # The program name, in parentheses, may contain any character.
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
    """Kill all descendants of this process, including those created in the meantime."""
    # Repeat until none is left, because a process may fork between the scan and its kill. Reap as
    # well, because orphans become our children.
    ends_at = time.monotonic() + MAX_KILL_S
    while (alive := descendants(os.getpid())) and time.monotonic() < ends_at:
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        reap()


def reap() -> None:
    """Reap child processes that have exited."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def main() -> None:
    """Run the machine."""
    # Adopt orphans, so that no process survives the machine.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    # Only EOF on standard input, or SIGKILL, ends the machine.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    line = sys.stdin.buffer.readline()
    if not line:
        return
    task = json.loads(line)
    with open(task["console"], "ab") as console:
        try:
            subprocess.Popen(
                task["command"],
                cwd=task["folder"],
                env=task["environment"],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,
                preexec_fn=restore_signals,
            )
        except OSError as exc:
            console.write(f"cloud-init: the user-data did not start: {exc}\n".encode())
    # No more input follows, so standard input becomes readable only when it is closed.
    while not select.select([sys.stdin], [], [], 0.5)[0]:
        reap()
    kill_all()


def restore_signals() -> None:
    """Restore the default signal handlers, because children inherit ignored signals."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    main()
