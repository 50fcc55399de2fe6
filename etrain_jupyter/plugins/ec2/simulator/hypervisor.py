"""Lifecycle of every instance: start, end and billing.

An instance is ended by EC2 (``TerminateInstances``), from inside (``shutdown``), by the market (a
spot interruption, with or without notice) or by a host failure.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from etrain_jupyter.plugins.ec2.simulator.backend import (
    GUEST_SHUTDOWN,
    HOST_FAILED,
    SPOT_RECLAIMED,
    USER_SHUTDOWN,
    Backend,
    InstanceFacts,
)
from etrain_jupyter.plugins.ec2.simulator.bill import InstanceRecord, Usage
from etrain_jupyter.plugins.ec2.simulator.machine import MARKER, SimulatedMachine
from etrain_jupyter.plugins.ec2.simulator.market import Market
from etrain_jupyter.plugins.ec2.simulator.networks import SimulatedNetwork
from etrain_jupyter.testing.serving import processes_with

MAX_OFF_S = 60.0
ENDED_STATES = ("terminated", "shutting-down", "stopped", "stopping")


# State of a machine. "ended" is reached exactly once, by the first of several threads:
#
#   pending          running            ended                    off
#   |--- _boot ------|-- first process -|-- _mark_ended ---------|-- _switch_off
#     waits boot_s     of the machine     EC2's state, the bill,    processes killed,
#                                         the market                network released
#
#   Causes of the end: TerminateInstances (sync), `shutdown` (shut_down) or its timer, the end of
#   an interruption notice (_interrupt), a host failure (preempt with silent=True), the end of the
#   first process without a shutdown (_boot).
#
# EC2 responds to TerminateInstances before the processes have exited, so there are two events.
@dataclass
class _Guest:
    machine: SimulatedMachine
    usage: Usage
    ended: threading.Event = field(default_factory=threading.Event)
    """Set when EC2 has recorded its end."""
    off: threading.Event = field(default_factory=threading.Event)
    """Set when its processes and its network are gone from this machine."""
    switching: threading.Lock = field(default_factory=threading.Lock)
    timer: threading.Timer | None = None
    off_at: float | None = None


class Hypervisor:
    """Run the machines, each in a folder below ``folder``.

    A machine is pending for ``boot_s`` seconds. A minute of ``shutdown -h +1`` takes ``minute_s``.
    """

    def __init__(
        self,
        *,
        backend: Backend,
        network: SimulatedNetwork,
        folder: Path,
        minute_s: float,
        boot_s: float,
    ) -> None:
        self.endpoint = ""
        self.variables: dict[str, str] = {}
        self.market: Market | None = None
        self.boot_s = boot_s
        self.minute_s = minute_s
        self._backend = backend
        self._network = network
        self._folder = folder
        self._guests: dict[str, _Guest] = {}

    # Starting -----------------------------------------------------------------------------------

    def sync(self) -> None:
        """Start new instances and end terminated ones; called under the lock."""
        for instance_id, state in self._backend.states().items():
            guest = self._guests.get(instance_id)
            if guest is None and state not in ENDED_STATES:
                self._adopt(instance_id)
            elif guest is not None and state in ENDED_STATES:
                # Do not wait for the machine: EC2 responds immediately.
                if self._mark_ended(guest, USER_SHUTDOWN, is_stopped=state.startswith("stop")):
                    self._run(f"off {instance_id}", self._switch_off, guest)
                if state == "terminated" and guest.usage.disk_ended_at is None:
                    # The machine was stopped before, and its disk was charged until now.
                    guest.usage = replace(guest.usage, disk_ended_at=time.time())

    def _adopt(self, instance_id: str) -> None:
        address = self._network.allocate()
        facts = self._backend.prepare(instance_id, address)
        machine = SimulatedMachine(facts, address, self._network, self._folder)
        usage = Usage(
            instance_id=instance_id,
            pool=facts.pool,
            lifecycle=facts.lifecycle,
            launched_at=facts.launched_at,
            disk_gb=facts.disk_gb,
        )
        guest = self._guests[instance_id] = _Guest(machine=machine, usage=usage)
        if self.market is not None:
            self.market.take(instance_id, facts.pool, facts.lifecycle)
        self._run(f"boot {instance_id}", self._boot, guest, facts)

    def _boot(self, guest: _Guest, facts: InstanceFacts) -> None:
        if guest.ended.wait(self.boot_s):
            return  # terminated while pending
        try:
            guest.machine.start(
                endpoint=self.endpoint,
                variables=self.variables,
                credentials=lambda: self._backend.role_credentials(facts.role, facts.instance_id),
                source=self._backend.source_of_image(facts.region, facts.image),
            )
        except (OSError, RuntimeError) as exc:
            print(f"fakeaws: {facts.instance_id} did not start: {exc}", file=sys.stderr, flush=True)
            self._end(guest, HOST_FAILED)
            return
        with self._backend.lock:
            # Set the state only now, because a client that sees it running may use its metadata
            # service, for example to inject a fault.
            if not guest.ended.is_set():
                self._backend.set_running(facts.instance_id)
        guest.machine.on_end()
        # If no other cause was recorded, the first process exited without a shutdown, so the host
        # has failed. Otherwise this call does nothing.
        self._end(guest, HOST_FAILED)

    # Ending -------------------------------------------------------------------------------------

    def _end(self, guest: _Guest, code: str, *, is_stopped: bool = False) -> None:
        with self._backend.lock:
            is_first = self._mark_ended(guest, code, is_stopped=is_stopped)
        if is_first:
            self._switch_off(guest)

    def _mark_ended(self, guest: _Guest, code: str, *, is_stopped: bool) -> bool:
        """Record its end in EC2 and on the bill. Return False if it had ended before.

        The caller holds the backend's lock.
        """
        if guest.ended.is_set():
            return False
        guest.ended.set()
        if guest.timer is not None:
            guest.timer.cancel()
        instance_id = guest.usage.instance_id
        now = time.time()
        guest.usage = replace(
            guest.usage, ended_at=now, disk_ended_at=None if is_stopped else now, reason=code
        )
        self._backend.set_ended(instance_id, code, is_stopped=is_stopped)
        if self.market is not None:
            # Capacity that EC2 reclaims is lost to us.
            self.market.release(instance_id, is_lost=code == SPOT_RECLAIMED)
        return True

    def _switch_off(self, guest: _Guest) -> None:
        # `forget` may call this at the same time as another thread; the second call waits for the
        # first.
        with guest.switching:
            if not guest.off.is_set():
                facts = guest.machine.facts
                guest.machine.power_off()
                self._network.release(guest.machine.address)
                guest.off.set()
                if not self._backend.is_image_source(facts.region, facts.instance_id):
                    # In the background, because it takes minutes if an environment was installed.
                    self._run(f"erase {facts.instance_id}", guest.machine.erase_disk)

    def shut_down(self, instance_id: str, arguments: list[str]) -> str:
        """Execute a ``shutdown`` command from inside the machine; return its output.

        Raises:
            ValueError: If the arguments are invalid, with the command's output.
        """
        minutes = parse_shutdown(arguments)
        guest = self._guests.get(instance_id)
        if guest is None or guest.ended.is_set():
            return ""
        is_stopped = guest.machine.facts.stops
        if minutes == 0:
            # Use another thread, because the requesting command is one of the processes to be
            # killed.
            self._run(f"off {instance_id}", self._end_from_inside, guest, is_stopped)
            return ""
        # As with shutdown(8), a new request replaces the scheduled one, and -c only cancels it.
        with self._backend.lock:
            if guest.timer is not None:
                guest.timer.cancel()
                guest.timer = guest.off_at = None
            if minutes is None:
                return ""
            left_s = minutes * self.minute_s
            guest.off_at = time.time() + left_s
            guest.timer = threading.Timer(left_s, self._end_from_inside, (guest, is_stopped))
            guest.timer.daemon = True
            guest.timer.start()
        at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(guest.off_at))
        return f"Shutdown scheduled for {at}, use 'shutdown -c' to cancel."

    def _end_from_inside(self, guest: _Guest, is_stopped: bool) -> None:
        self._end(guest, GUEST_SHUTDOWN, is_stopped=is_stopped)

    # Actions of tests ----------------------------------------------------------------------------

    def preempt(
        self, instance_id: str, *, notice_s: float, rebalance_s: float | None, silent: bool
    ) -> None:
        """Reclaim a machine, in the background; see ``FakeAws.preempt``."""
        guest = self._find_running(instance_id)
        is_spot = guest.usage.lifecycle == "spot"
        if not is_spot and not silent:
            raise ValueError(
                f"{instance_id} is on-demand: EC2 never interrupts it. Use silent=True for a "
                "host that fails."
            )
        code = SPOT_RECLAIMED if is_spot else HOST_FAILED
        if silent:
            self._end(guest, code)
            return
        self._run(f"preempt {instance_id}", self._interrupt, guest, notice_s, rebalance_s)

    # rebalance recommendation --- rebalance_s ---> notice --- notice_s ---> EC2 ends the machine
    #
    # Each wait ends early if the machine shuts itself down, because there is nothing left to
    # reclaim.
    def _interrupt(self, guest: _Guest, notice_s: float, rebalance_s: float | None) -> None:
        imds = guest.machine.imds
        if imds is None:  # pending: there is no way to notify it
            self._end(guest, SPOT_RECLAIMED)
            return
        if rebalance_s is not None:
            imds.recommend_rebalance()
            if guest.ended.wait(rebalance_s):
                return
        imds.interrupt(time.time() + notice_s)
        if not guest.ended.wait(notice_s):
            self._end(guest, SPOT_RECLAIMED)

    def imds(self, instance_id: str) -> Any:
        """Return a machine's metadata service."""
        imds = self._find_running(instance_id).machine.imds
        if imds is None:
            raise ValueError(
                f"{instance_id} is pending and has no metadata service yet. Wait until it is "
                "running."
            )
        return imds

    def _find_running(self, instance_id: str) -> _Guest:
        guest = self._guests.get(instance_id)
        if guest is None or guest.ended.is_set():
            alive = [name for name, one in self._guests.items() if not one.ended.is_set()]
            raise ValueError(
                f"Instance {instance_id} is not running. Running: {', '.join(alive) or 'none'}."
            )
        return guest

    # Reads ----------------------------------------------------------------------------------------

    def console(self, instance_id: str) -> bytes:
        """Return an instance's console output."""
        guest = self._guests.get(instance_id)
        return b"" if guest is None else guest.machine.console()

    def usages(self) -> list[Usage]:
        """Return the usage of all machines."""
        return [guest.usage for guest in list(self._guests.values())]

    def records(self) -> list[InstanceRecord]:
        """Return all instances, oldest first; call under the lock."""
        states = self._backend.states()
        return [
            InstanceRecord(
                instance_id=name,
                instance_type=guest.usage.pool.instance_type,
                zone=guest.usage.pool.zone,
                lifecycle=guest.usage.lifecycle,
                address=guest.machine.address,
                state=states.get(name, "terminated"),
                reason=guest.usage.reason,
                launched_at=guest.usage.launched_at,
                ended_at=guest.usage.ended_at,
                tags=dict(guest.machine.facts.tags),
                pid=guest.machine.pid,
                off_at=guest.off_at,
            )
            for name, guest in list(self._guests.items())
        ]

    def find_strays(self) -> dict[str, list[str]]:
        """Return leftover processes and cables of machines that are off, by kind."""
        # First let machines that have ended finish switching off, or they would count as strays.
        self.wait_until_off()
        guests = list(self._guests.values())
        off = [f"{MARKER}={one.usage.instance_id}" for one in guests if one.ended.is_set()]
        processes = [str(process.pid) for process in processes_with(*off)] if off else []
        in_use = {one.machine.address for one in guests if not one.ended.is_set()}
        found = {"processes": processes, "cables": self._network.stray_cables(in_use)}
        return {kind: names for kind, names in found.items() if names}

    # The end ------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Switch all machines off and forget them."""
        # Do not call `_end`: EC2 and the bill are reset or discarded as well, so there is nothing
        # to record.
        with self._backend.lock:
            guests = list(self._guests.values())
            for guest in guests:
                guest.ended.set()
                if guest.timer is not None:
                    guest.timer.cancel()
        for guest in guests:
            self._switch_off(guest)
        self._guests.clear()

    def wait_until_off(self) -> None:
        """Wait until machines that have ended are off; does not wait for interruptions."""
        for guest in list(self._guests.values()):
            if guest.ended.is_set():
                guest.off.wait(MAX_OFF_S)

    def _run(self, name: str, work: Callable[..., None], *arguments: Any) -> None:
        threading.Thread(target=work, args=arguments, name=name, daemon=True).start()


def parse_shutdown(arguments: list[str]) -> int | None:
    """Return the minutes until power-off; None cancels a scheduled one.

    Args:
        arguments: Those of shutdown(8), as far as needed for powering off.

    Raises:
        ValueError: If they are invalid, with the command's output.

    >>> parse_shutdown(["-h", "+15"]), parse_shutdown(["-P", "now", "the", "end"])
    (15, 0)
    """
    # Anything after the time is a message to logged-in users, and is ignored.
    flags = [word for word in arguments if word.startswith("-")]
    rest = [word for word in arguments if not word.startswith("-")]
    for flag in flags:
        if flag not in ("-h", "-P", "-H", "-c", "--poweroff", "--halt", "--no-wall"):
            raise ValueError(f"shutdown: unsupported option {flag} in a fake instance")
    if "-c" in flags:
        return None
    when = rest[0] if rest else "+1"
    if when == "now":
        return 0
    if not re.fullmatch(r"\+?\d+", when):
        raise ValueError(f"Failed to parse time specification: {when}")
    return int(when)
