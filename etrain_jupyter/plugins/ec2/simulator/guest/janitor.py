"""Remove what a harness created on this machine, no matter how the harness ended.

``python janitor.py FOLDER [BRIDGE CABLES]``: waits until standard input closes, gives the instances
a moment to end by themselves (each has its own pipe to the harness), then removes the bridge, the
cables (all names with that prefix) and the folder. The instances' namespaces disappear with their
processes.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time

MAX_WAIT_S = 15.0


def has_processes(folder: str) -> bool:
    """Return whether a process has its working directory in the folder."""
    # Every machine runs in its own folder below it.
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) != os.getpid():
            try:
                where = os.readlink(f"/proc/{name}/cwd")
            except OSError:
                continue
            if where == folder or where.startswith(f"{folder}/"):
                return True
    return False


def main() -> None:
    """Wait, then remove everything."""
    folder, *names = sys.argv[1:]
    sys.stdin.buffer.read()  # blocks until the harness closes the pipe or exits
    ends_at = time.monotonic() + MAX_WAIT_S
    while has_processes(folder) and time.monotonic() < ends_at:
        time.sleep(0.05)
    for _, link in socket.if_nameindex() if names else []:
        if link == names[0] or link.startswith(names[1]):
            subprocess.run(["ip", "link", "del", link], capture_output=True, check=False)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
