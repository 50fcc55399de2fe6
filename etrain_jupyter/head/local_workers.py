"""Start, restart and stop the worker processes of a local cluster.

Runs in the scheduler process, on its event loop.

There is at most one worker process per slot. Each worker leads its own process group, so that
leftover children can be killed with it. It reads from the keeper's pipe, so that it exits when the
keeper dies. It survives the scheduler that started it: the next scheduler adopts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from etrain_jupyter.head.slots import Slot
from etrain_jupyter.process.survivors import AdoptedProcess, Survivor

logger = logging.getLogger(__name__)

HEALTHY_S = 10.0
"""A worker that ran for at least this many seconds has started successfully, which resets the
back-off."""
FIRST_BACK_OFF_S = 0.5
MAX_BACK_OFF_S = 30.0


@dataclass(eq=False, kw_only=True)
class WorkerProcess:
    """One worker process, started or adopted by this scheduler."""

    name: str
    slot: Slot
    popen: subprocess.Popen[bytes] | AdoptedProcess
    started_at: float
    """On the monotonic clock."""
    is_draining: bool = False
    is_stopping: bool = False
    """True if the worker was released or killed on purpose, so that its exit is not a failure."""


class LocalNodes:
    """A ``NodeSource`` that runs processes on this machine. Only ``close`` blocks.

    Args:
        slots: Capacity for workers.
        spawn: Starts a worker with a given name in a slot.
        is_connected: Returns True if the scheduler is connected to a worker.
        is_busy: Returns True if a job may be using a worker.
        linger_s: Seconds for which surplus workers are kept.
        on_end: Called with the name of a worker that has exited.
    """

    replaces_early = False
    trains_after_notice = False
    finish_by_s: float | None = None

    def __init__(
        self,
        slots: Sequence[Slot],
        spawn: Callable[[str, Slot], subprocess.Popen[bytes]],
        *,
        is_connected: Callable[[str], bool],
        is_busy: Callable[[str], bool],
        linger_s: float = 60.0,
        on_end: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._on_end = on_end
        self._slots = tuple(slots)
        self._spawn = spawn
        self._is_connected = is_connected
        self._is_busy = is_busy
        self._linger_s = linger_s
        self._processes: dict[str, WorkerProcess] = {}
        self._num_named = 0
        # The target is the larger of the jobs' demand and the number that the user holds.
        self._wanted = 0
        self._held = 0
        self._num_failures = 0
        self._retry_at = 0.0
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._is_closing = False

    def adopt(self, survivors: Sequence[Survivor], *, num_named: int, num_held: int = 0) -> None:
        """Adopt the previous scheduler's workers. Call this before ``want`` and ``hold``.

        Args:
            survivors: Workers that are still running.
            num_named: Highest worker number used so far; names are never reused.
            num_held: Minimum number of workers to keep, as set under the previous scheduler.
        """
        self._held = num_held
        self._num_named = max(self._num_named, num_named)
        slots = {slot.index: slot for slot in self._slots}
        for survivor in survivors:
            if survivor.slot in slots:
                self._processes[survivor.name] = WorkerProcess(
                    name=survivor.name,
                    slot=slots[survivor.slot],
                    popen=AdoptedProcess(survivor.pid, survivor.stamp),
                    started_at=time.monotonic(),
                )
                logger.info("adopted worker %s, process %d", survivor.name, survivor.pid)
        # These workers are training, so keep all of them until the restored jobs have requested
        # workers.
        self._wanted = len(self._processes)

    def want(self, count: int, *, reason: str) -> None:
        """Keep ``count`` workers for the jobs, or one per slot if there are fewer slots."""
        if count != self._wanted:
            logger.info("jobs want %d workers (previously %d): %s", count, self._wanted, reason)
        self._wanted = count
        self._reconcile()

    def hold(self, count: int, *, reason: str) -> None:
        """Keep at least ``count`` workers even if the jobs want fewer."""
        logger.info("holding at least %d workers: %s", count, reason)
        self._held = count
        self._reconcile()

    def capacity(self) -> int:
        """Return the number of slots."""
        return len(self._slots)

    def nodes(self) -> list[dict[str, Any]]:
        """Return one record per running worker process, oldest first."""
        return [
            {
                "worker": process.name,
                "pid": process.popen.pid,
                "state": self._state_of(process),
                "device": process.slot.device,
                "slot": process.slot.index,
                "type": process.slot.type,
            }
            for process in self._processes.values()
        ]

    def release(self, worker: str, *, drain_s: float) -> None:
        """Send SIGTERM to a worker, and SIGKILL after ``drain_s`` seconds if it is still running.

        Unknown names are ignored. A second call is ignored too, because the first deadline applies.
        """
        process = self._processes.get(worker)
        if process is None or process.is_draining:
            return
        process.is_draining = process.is_stopping = True
        # SIGTERM starts a clean exit: the worker closes its connection and kills its trainers.
        _signal(process.popen, signal.SIGTERM)
        self._call_later(f"kill {worker}", drain_s, lambda: self.kill(worker))
        self._reconcile()

    def kill(self, worker: str) -> None:
        """Send SIGKILL to a worker immediately. Unknown names are ignored."""
        process = self._processes.get(worker)
        if process is not None:
            process.is_stopping = True
            _signal(process.popen, signal.SIGKILL)

    def note_notice(self, worker: str, *, kind: str, deadline: float = 0.0) -> None:
        """Do nothing, because this machine has no extra slots for a replacement."""

    def reap(self) -> None:
        """Remove workers that have exited, and start their replacements.

        Called on SIGCHLD and about once per second, because an adopted worker is not our child, so
        its exit raises no signal.
        """
        for process in list(self._processes.values()):
            if process.popen.poll() is not None:
                self._forget(process)
        self._reconcile()

    async def close(self, *, grace_s: float) -> None:
        """Stop all workers, by force after ``grace_s`` seconds; wait until they have exited."""
        self._is_closing = True
        for name in list(self._timers):
            self._timers.pop(name).cancel()
        for process in self._processes.values():
            _signal(process.popen, signal.SIGTERM)
        if not await self._wait_until_gone(grace_s):
            for name in list(self._processes):
                self.kill(name)
            await self._wait_until_gone(2.0)

    async def _wait_until_gone(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while True:
            # Poll as well, because a SIGCHLD may arrive before the event loop handles signals.
            self.reap()
            if not self._processes:
                return True
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(0.02)

    def _state_of(self, process: WorkerProcess) -> str:
        if process.is_draining:
            return "draining"
        return "running" if self._is_connected(process.name) else "starting"

    def _reconcile(self) -> None:
        """Start missing workers now; schedule the release of surplus workers."""
        if self._is_closing:
            return
        target = min(max(self._wanted, self._held), len(self._slots))
        # A draining worker counts as gone: its replacement starts now if a slot is free, otherwise
        # once its process has exited (reap).
        num_kept = sum(not process.is_draining for process in self._processes.values())
        # Surplus workers stay for linger_s, because a job often starts right after another ends,
        # and a warm worker saves seconds. Any demand in the meantime cancels the release.
        if num_kept <= target:
            self._cancel("shrink")
        elif "shrink" not in self._timers:
            self._call_later("shrink", self._linger_s, self._shrink)
        if num_kept < target:
            self._start(target - num_kept)

    def _start(self, count: int) -> None:
        wait_s = self._retry_at - time.monotonic()
        if wait_s > 0:  # workers died early; see back_off_s
            self._call_later("retry", wait_s, self._reconcile)
            return
        # A draining worker's slot stays occupied until its process has exited.
        taken = {process.slot.index for process in self._processes.values()}
        free = [slot for slot in self._slots if slot.index not in taken]
        for slot in free[:count]:
            self._num_named += 1
            name = f"w{self._num_named}"
            try:
                popen = self._spawn(name, slot)
            except OSError as exc:  # out of memory, processes or file descriptors
                logger.error("worker %s could not be started: %s", name, exc)
                # A worker's first failure is retried without a back-off, but a failed fork is not.
                # Its cause is the machine, so an immediate retry would fail as well.
                self._back_off(lived_s=0.0)
                wait_s = self._retry_at - time.monotonic()
                self._call_later("retry", max(wait_s, FIRST_BACK_OFF_S), self._reconcile)
                return
            self._processes[name] = WorkerProcess(
                name=name, slot=slot, popen=popen, started_at=time.monotonic()
            )
            logger.info("worker %s started in slot %d as process %d", name, slot.index, popen.pid)

    def _shrink(self) -> None:
        """Release surplus workers, newest first, except those that a job may be using."""
        target = min(max(self._wanted, self._held), len(self._slots))
        kept = [process for process in self._processes.values() if not process.is_draining]
        idle = [process for process in kept if not self._is_busy(process.name)]
        for process in idle[::-1][: len(kept) - target]:
            self.release(process.name, drain_s=10.0)

    def _forget(self, process: WorkerProcess) -> None:
        """Remove an exited worker, kill its leftover children, and set the back-off."""
        #     a worker died after    the next one starts
        #     0.4 s                  immediately: one early death may be a fluke
        #     0.4 s again            after 0.5 s; then 1, 2, 4 ... 30 s
        #     12 s                   immediately: workers can start, so the count is reset
        del self._processes[process.name]
        self._on_end(process.name)
        self._cancel(f"kill {process.name}")
        # The worker led its group. A pid in use as a group id is not reused, so while any of the
        # worker's children remain, the signal reaches only them.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.popen.pid, signal.SIGKILL)
        if process.popen.stdin is not None:
            process.popen.stdin.close()
        code = process.popen.returncode
        if process.is_stopping or self._is_closing:
            logger.info("worker %s exited as requested (exit code %s)", process.name, code)
            return
        lived_s = time.monotonic() - process.started_at
        delay_s = self._back_off(lived_s)
        logger.warning(
            "worker %s died after %.1f s (exit code %s); the next worker may start in %.1f s",
            process.name,
            lived_s,
            code,
            delay_s,
        )

    def _back_off(self, lived_s: float) -> float:
        # A worker that ran for a while shows that workers can start. Count its death as the first
        # failure, after which the next worker starts immediately (see back_off_s).
        self._num_failures = 1 if lived_s >= HEALTHY_S else self._num_failures + 1
        delay_s = back_off_s(self._num_failures)
        self._retry_at = time.monotonic() + delay_s
        return delay_s

    def _call_later(self, name: str, delay_s: float, do: Callable[[], None]) -> None:
        # This replaces any timer with the same name.
        def run() -> None:
            self._timers.pop(name, None)
            do()

        self._cancel(name)
        self._timers[name] = asyncio.get_running_loop().call_later(delay_s, run)

    def _cancel(self, name: str) -> None:
        if timer := self._timers.pop(name, None):
            timer.cancel()


def back_off_s(num_failures: int) -> float:
    """Return the delay in seconds before the next start, after consecutive early deaths.

    >>> [back_off_s(n) for n in (1, 2, 3, 9)]
    [0.0, 0.5, 1.0, 30.0]
    """
    if num_failures < 2:
        return 0.0
    return min(MAX_BACK_OFF_S, FIRST_BACK_OFF_S * 2.0 ** min(num_failures - 2, 10))


def _signal(popen: subprocess.Popen[bytes] | AdoptedProcess, number: signal.Signals) -> None:
    # Popen and AdoptedProcess check that the process id has not been reused.
    with contextlib.suppress(ProcessLookupError):
        popen.send_signal(number)
