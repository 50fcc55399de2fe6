"""Machines that can vanish: workers in network namespaces of their own, on a bridge of the test's.

A bridge is the network, a namespace with one virtual cable is a machine. ``Machine.vanish`` takes
the cable's near end down: from then on everything that the machine sends or is sent is dropped, and
no connection is ever closed. That is what a worker looks like whose host has lost its network or
its power. Needs root and ``ip`` (iproute2).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NETWORK = "10.213.77"
"""Of a private range; the bridge has the address ``.1``."""


def ip(*words: str) -> None:
    """Run ``ip`` with these words."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One namespace with an address, and the name of its cable's near end."""

    name: str
    address: str
    cable: str

    def vanish(self) -> None:
        """Drop all its traffic from now on; it does not notice."""
        ip("link", "set", self.cable, "down")

    def return_(self) -> None:
        """Let its traffic through again."""
        ip("link", "set", self.cable, "up")

    def start(self, module: str, *words: str, log: Path) -> subprocess.Popen[bytes]:
        """Start ``python -m MODULE`` on this machine, its output in a file."""
        command = ["ip", "netns", "exec", self.name, sys.executable, "-m", module, *words]
        with log.open("ab") as out:
            # `ip netns exec` becomes the command: the pid is the Python process's.
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, process_group=0
            )


@contextlib.contextmanager
def network(num_machines: int) -> Iterator[tuple[str, list[Machine]]]:
    """Make a bridge with machines on it; yield the bridge's address and them. Removes both."""
    tag = f"et{os.getpid() % 100_000}"
    bridge = f"{tag}br"
    with contextlib.ExitStack() as stack:
        ip("link", "add", bridge, "type", "bridge")
        stack.callback(ip, "link", "del", bridge)
        ip("addr", "add", f"{NETWORK}.1/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        machines = []
        for number in range(num_machines):
            machine = Machine(
                name=f"{tag}n{number}", address=f"{NETWORK}.{10 + number}", cable=f"{tag}c{number}"
            )
            ip("netns", "add", machine.name)
            stack.callback(ip, "netns", "del", machine.name)
            ip(
                *("link", "add", machine.cable, "type", "veth"),
                *("peer", "name", "eth0", "netns", machine.name),
            )
            ip("link", "set", machine.cable, "master", bridge, "up")
            inside = ("-n", machine.name)
            ip(*inside, "link", "set", "lo", "up")
            ip(*inside, "addr", "add", f"{machine.address}/24", "dev", "eth0")
            ip(*inside, "link", "set", "eth0", "up")
            machines.append(machine)
        yield f"{NETWORK}.1", machines
