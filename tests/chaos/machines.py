"""Simulated machines that can vanish: network namespaces connected by a bridge.

The bridge is the network, and a namespace with one veth pair is a machine. ``Machine.vanish`` takes
the host's end of the pair down: from then on all traffic from and to the machine is dropped, and no
connection is closed. A worker whose host has lost its network or power looks the same. Needs root
and ``ip`` (iproute2).
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
"""Prefix of a private address range; the bridge has the address ``.1``."""


def ip(*words: str) -> None:
    """Run ``ip`` with these arguments."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One namespace with its address and the host's end of its veth pair."""

    name: str
    address: str
    cable: str

    def vanish(self) -> None:
        """Drop all its traffic from now on; no connection is closed."""
        ip("link", "set", self.cable, "down")

    def return_(self) -> None:
        """Restore its traffic."""
        ip("link", "set", self.cable, "up")

    def start(self, module: str, *words: str, log: Path) -> subprocess.Popen[bytes]:
        """Start ``python -m MODULE`` on this machine with its output in ``log``."""
        command = ["ip", "netns", "exec", self.name, sys.executable, "-m", module, *words]
        with log.open("ab") as out:
            # `ip netns exec` execs the command, so the pid is that of the Python process.
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, process_group=0
            )


@contextlib.contextmanager
def network(num_machines: int) -> Iterator[tuple[str, list[Machine]]]:
    """Create a bridge with machines; yield its address and the machines, and remove all of it."""
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
