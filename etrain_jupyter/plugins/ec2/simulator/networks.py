"""Addresses of the simulated machines: network namespaces, or loopback.

With ``namespaces``, each machine has its own network and process table, connected by a bridge; as
on EC2, a machine that loses power does not close its connections. This requires root and ``ip``
(Debian package iproute2). With ``loopback``, machines are local processes, each with an address in
127.0.0.0/8, and their connections are closed when they end. A namespace has no name: it disappears
with its last process.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Literal

Mode = Literal["namespaces", "loopback"]
PREFIX = "etfake"
"""Prefix of bridge names; the harness's process id follows it."""
CABLE = "etc"
"""Prefix of cable names; the harness's process id, ``n`` and a number follow it."""
IMDS_ADDRESS = ("169.254.169.254", 80)
_CLONE_NEWNET = 0x40000000
_MAX_HOSTS = 250


def why_no_namespaces() -> str:
    """Return why this machine cannot use network namespaces; empty if it can."""
    if not (shutil.which("ip") and shutil.which("unshare") and shutil.which("nsenter")):
        return "needs `ip`, `unshare` and `nsenter` (Debian packages iproute2 and util-linux)"
    if os.geteuid():
        return "needs root, to create network namespaces"
    tried = ["unshare", "--net", "--pid", "--fork", "--mount-proc", "true"]
    if subprocess.run(tried, capture_output=True, check=False).returncode:
        return "this machine does not allow network namespaces"
    return ""


class _Addresses:
    # A released address goes to the end of the list, so that it is reused as late as possible:
    # connections of its previous machine may still be open elsewhere.
    def __init__(self, prefix: str, first: int) -> None:
        self._prefix = prefix
        self._free = [f"{prefix}.{number}" for number in range(first, first + _MAX_HOSTS - 10)]
        self._lock = threading.Lock()

    def take(self) -> str:
        with self._lock:
            if not self._free:
                raise RuntimeError(f"all addresses of {self._prefix}.0/24 are in use")
            return self._free.pop(0)

    def put_back(self, address: str) -> None:
        with self._lock:
            if address.startswith(f"{self._prefix}.") and address not in self._free:
                self._free.append(address)


class SimulatedNetwork:
    """Addresses in 127.0.0.0/8, derived from the process id to keep harnesses apart."""

    mode: Mode = "loopback"
    host_address = "127.0.0.1"
    """Address at which instances reach this machine."""
    bridge = ""
    """Name of the bridge; empty if there is none."""

    def __init__(self) -> None:
        # 127.64.0.0 to 127.127.255.0, from the lower 14 bits of the process id.
        pid = os.getpid()
        self._addresses = _Addresses(f"127.{64 + (pid >> 8) % 64}.{pid % 256}", 1)

    def allocate(self) -> str:
        """Return the address for a new machine."""
        return self._addresses.take()

    def release(self, address: str) -> None:
        """Release an address."""
        self._addresses.put_back(address)

    def wrap(self, command: list[str]) -> list[str]:
        """Return the command that starts a machine's first process."""
        return command

    def plug(self, pid: int, address: str) -> socket.socket:
        """Connect a machine; return the listener of its metadata service."""
        return socket.create_server(("127.0.0.1", 0), backlog=64)

    def pull(self, address: str) -> None:
        """Disconnect a machine, in both directions; without a cable, nothing happens."""

    def stray_cables(self, in_use: set[str]) -> list[str]:
        """Return the cables that belong to none of these addresses."""
        return []

    def close(self) -> None:
        """Remove everything."""


class NamespaceNetwork(SimulatedNetwork):
    """A bridge of this process, with a cable to each machine."""

    mode: Mode = "namespaces"

    def __init__(self) -> None:
        remove_dead_links()
        self.bridge = f"{PREFIX}{os.getpid()}"
        _ip(["link", "add", self.bridge, "type", "bridge"])
        try:
            self._prefix = self._take_prefix()
            _ip(["link", "set", self.bridge, "up"])
        except BaseException:
            self.close()
            raise
        self.host_address = f"{self._prefix}.1"
        self._addresses = _Addresses(self._prefix, 10)

    def _take_prefix(self) -> str:
        """Choose a network that no other interface on this machine uses."""
        for number in range(256):
            prefix = f"10.214.{(os.getpid() + number) % 256}"
            if prefix in set(_prefixes()):
                continue
            _ip(["addr", "add", f"{prefix}.1/24", "dev", self.bridge])
            # Another harness may have chosen the same network at the same time.
            if list(_prefixes()).count(prefix) == 1:
                return prefix
            _ip(["addr", "del", f"{prefix}.1/24", "dev", self.bridge])
        raise RuntimeError("no network 10.214.x.0/24 is free on this machine")

    def release(self, address: str) -> None:
        """Release an address and remove its cable."""
        # The kernel removes a cable with its namespace, but unclosed TCP connections keep an empty
        # namespace alive for minutes.
        _remove_link(self._cable(address))
        super().release(address)

    def wrap(self, command: list[str]) -> list[str]:
        """Return the command in its own network and process table."""
        return ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", *command]

    def plug(self, pid: int, address: str) -> socket.socket:
        """Create the cable; assign the machine's address and that of the metadata service."""
        #   this machine                         the machine's namespace
        #   bridge <host_address> -- etc<pid>n10 ======= eth0 <address>
        #                            (veth pair)         lo   169.254.169.254, where this process
        #                                                     listens
        path = f"/proc/{pid}/ns/net"
        _wait_for_own_namespace(path)
        cable = self._cable(address)
        octets = [int(octet) for octet in address.split(".")]
        # Derive the MAC address from the IP address, so that neighbour tables stay valid if the
        # IP address is reused.
        hardware = ":".join(["02", "ac", *(f"{octet:02x}" for octet in octets)])
        _ip_batch(
            f"link add {cable} type veth peer name eth0 netns {pid}",
            f"link set {cable} master {self.bridge} up",
        )
        _ip_batch(
            f"link set eth0 address {hardware}",
            "link set lo up",
            f"addr add {address}/24 dev eth0",
            "link set eth0 up",
            f"addr add {IMDS_ADDRESS[0]}/32 dev lo",
            inside=path,
        )
        return _listen_inside(path, IMDS_ADDRESS)

    def _cable(self, address: str) -> str:
        # Names have at most 15 characters, process ids at most seven digits.
        return f"{CABLE}{os.getpid()}n{address.rpartition('.')[2]}"

    def pull(self, address: str) -> None:
        """Take down this machine's end of the cable."""
        # Packets are lost without an error, as if the machine had lost power.
        with suppress(RuntimeError):
            _ip(["link", "set", self._cable(address), "down"])

    def stray_cables(self, in_use: set[str]) -> list[str]:
        """Return the cables that belong to none of these addresses."""
        known = {self._cable(address) for address in in_use}
        names = [name for _, name in socket.if_nameindex()]
        ours = [name for name in names if name.startswith(f"{CABLE}{os.getpid()}n")]
        return [name for name in ours if name not in known]

    def close(self) -> None:
        """Remove the bridge."""
        _remove_link(self.bridge)


def remove_dead_links() -> list[str]:
    """Remove the bridges and cables of harnesses that have ended; return their names."""
    removed = []
    # Left by a harness that was killed together with its janitor. The name contains the process id.
    for _, name in socket.if_nameindex():
        found = re.fullmatch(rf"(?:{PREFIX}|{CABLE})(\d+)(?:n\d+)?", name)
        if found is not None and not _is_harness(int(found[1])):
            _remove_link(name)
            removed.append(name)
    return removed


def _remove_link(name: str) -> None:
    subprocess.run(["ip", "link", "del", name], capture_output=True, check=False)


def _is_harness(pid: int) -> bool:
    # The process id may have been reused by another program.
    with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return b"ec2.simulator" in file.read() or pid == os.getpid()
    return False


def _prefixes() -> Iterator[str]:
    """Yield the first three octets of every IPv4 address on this machine."""
    output = subprocess.run(["ip", "-j", "-4", "addr"], capture_output=True, check=True).stdout
    for interface in json.loads(output):
        for one in interface.get("addr_info", []):
            yield one["local"].rpartition(".")[0]


def _ip(arguments: list[str]) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"`ip {' '.join(arguments)}` failed: {done.stderr.strip()}")


def _ip_batch(*lines: str, inside: str = "") -> None:
    """Run several ``ip`` commands in one process, in the namespace at a path."""
    command = ["ip", "-batch", "-"]
    if inside:
        command = ["nsenter", f"--net={inside}", *command]
    script = "\n".join(lines)
    done = subprocess.run(command, input=script, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"`ip -batch` failed: {done.stderr.strip()}; its input was\n{script}")


def _wait_for_own_namespace(path: str) -> None:
    # `unshare` starts in our namespace and moves to its own a moment later.
    ours = os.readlink("/proc/self/ns/net")
    ends_at = time.monotonic() + 60
    while os.readlink(path) == ours:
        if time.monotonic() > ends_at:
            raise RuntimeError("a machine got no network namespace within 60 s")
        time.sleep(0.002)


def _listen_inside(path: str, address: tuple[str, int]) -> socket.socket:
    """Return a listening socket in another network namespace."""
    made: list[socket.socket | OSError] = []

    def make() -> None:
        # setns changes the namespace of the calling thread only. A socket keeps the namespace in
        # which it was created, so this thread can end.
        handle = os.open(path, os.O_RDONLY)
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(handle, _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
            made.append(socket.create_server(address, backlog=64))
        except OSError as exc:
            made.append(exc)
        finally:
            os.close(handle)

    thread = threading.Thread(target=make, name="namespace")
    thread.start()
    thread.join()
    if isinstance(made[0], OSError):
        raise made[0]
    return made[0]


def make_network(mode: Literal["auto", "namespaces", "loopback"]) -> SimulatedNetwork:
    """Return the network for a mode; ``auto`` uses namespaces if possible.

    Raises:
        RuntimeError: If namespaces are requested but not possible.
    """
    reason = "" if mode == "loopback" else why_no_namespaces()
    if mode == "namespaces" and reason:
        raise RuntimeError(f"fakeaws in mode 'namespaces' {reason}. Use mode='loopback'.")
    if mode == "loopback" or reason:
        return SimulatedNetwork()
    return NamespaceNetwork()
