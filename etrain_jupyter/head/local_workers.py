"""The worker processes of a local cluster: slots, spawning, respawning, ending.

Runs in the scheduler's process, on its event loop.

One worker process a slot. Each leads a process group of its own, so that whatever it leaves behind
can be ended with it, and reads from the keeper's lifeline. It does not end with the scheduler that
has started it: the next one adopts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from etrain_jupyter.process.survivors import AdoptedProcess, Survivor

logger = logging.getLogger(__name__)

HEALTHY_S = 3.0
"""A worker that lived that long and was connected died of something else than its own start."""
FIRST_BACK_OFF_S = 0.5
MAX_BACK_OFF_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Room for one worker."""

    index: int
    device: str = "cpu"
    """As torch there says it; each worker sees at most one GPU, which is number 0 to it."""
    type: str = "CPU slot"
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables for the worker and its trainers."""


@dataclass(eq=False, kw_only=True)
class WorkerProcess:
    """One spawned worker."""

    name: str
    slot: Slot
    popen: subprocess.Popen[bytes] | AdoptedProcess
    started_at: float
    """By the monotonic clock."""
    is_draining: bool = False
    is_end_wanted: bool = False
    """Somebody asked for its end, so that it says nothing about the machine's health."""


class LocalNodes:
    """A ``NodeSource`` of processes on this machine; no method blocks but ``close``.

    Args:
        slots: Room for workers.
        spawn: Starts a worker of a name in a slot.
        is_connected: Tells whether the scheduler knows a worker.
        is_busy: Tells whether a job uses a worker; None if nobody knows.
        linger_s: How long workers that nobody wants are kept.
        on_end: Called with the name of a worker that has ended.
    """

    replaces_early = False

    def __init__(
        self,
        slots: Sequence[Slot],
        spawn: Callable[[str, Slot], subprocess.Popen[bytes]],
        *,
        is_connected: Callable[[str], bool],
        is_busy: Callable[[str], bool] | None = None,
        linger_s: float = 60.0,
        on_end: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._on_end = on_end
        self._slots = tuple(slots)
        self._spawn = spawn
        self._is_connected = is_connected
        self.is_busy = is_busy
        self._linger_s = linger_s
        self._processes: dict[str, WorkerProcess] = {}
        self._num_named = 0
        self._wanted = 0
        self._held = 0
        self._num_failures = 0
        self._retry_at = 0.0
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._is_closing = False

    def adopt(self, survivors: Sequence[Survivor], *, num_named: int, num_held: int = 0) -> None:
        """Take over the workers of the scheduler before; before anything is wanted.

        Args:
            survivors: Those that still run.
            num_named: The highest number that a worker ever had.
            num_held: How many were held whatever the jobs want.
        """
        self._held = num_held
        self._num_named = max(self._num_named, num_named)
        slots = {slot.index: slot for slot in self._slots}
        for one in survivors:
            if one.slot in slots:
                self._processes[one.name] = WorkerProcess(
                    name=one.name,
                    slot=slots[one.slot],
                    popen=AdoptedProcess(one.pid, one.stamp),
                    started_at=time.monotonic(),
                )
                logger.info("worker %s, process %d, was adopted", one.name, one.pid)
        self._wanted = len(self._processes)

    def want(self, count: int, *, reason: str) -> None:
        """Keep ``count`` workers for the jobs, as far as there are slots."""
        if count != self._wanted:
            logger.info("%d workers wanted instead of %d: %s", count, self._wanted, reason)
        self._wanted = count
        self._reconcile()

    def hold(self, count: int, *, reason: str) -> None:
        """Keep at least ``count`` workers whatever the jobs want, as far as there are slots."""
        logger.info("at least %d workers held: %s", count, reason)
        self._held = count
        self._reconcile()

    def capacity(self) -> int:
        """Return the number of slots."""
        return len(self._slots)

    def nodes(self) -> list[dict[str, Any]]:
        """Return one record a living worker process, the oldest first."""
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
        """Ask a worker to end and see to it that it has after ``drain_s`` seconds.

        Unknown names are ignored, and so is asking again: the first deadline counts.
        """
        process = self._processes.get(worker)
        if process is None or process.is_draining:
            return
        process.is_draining = process.is_end_wanted = True
        _signal(process.popen, signal.SIGTERM)
        self._call_later(f"kill {worker}", drain_s, lambda: self.kill(worker))
        self._reconcile()

    def kill(self, worker: str) -> None:
        """SIGKILL a worker's process at once; unknown names are ignored."""
        process = self._processes.get(worker)
        if process is not None:
            process.is_end_wanted = True
            _signal(process.popen, signal.SIGKILL)

    def note_notice(self, worker: str, *, kind: str, deadline: float = 0.0) -> None:
        """Do nothing: there are slots, and no more."""

    def reap(self) -> None:
        """Take note of workers that have ended.

        Called whenever a child has, and often: of an adopted one's end no signal tells.
        """
        for process in list(self._processes.values()):
            if process.popen.poll() is not None:
                self._forget(process)
        self._reconcile()

    async def close(self, *, grace_s: float) -> None:
        """End all workers, gently for ``grace_s`` seconds, and return when none is left."""
        self._is_closing = True
        for name in list(self._timers):
            self._timers.pop(name).cancel()
        for process in self._processes.values():
            _signal(process.popen, signal.SIGTERM)
        if not await self._are_all_gone(grace_s):
            for name in list(self._processes):
                self.kill(name)
            await self._are_all_gone(2.0)

    async def _are_all_gone(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while True:
            # By polling as well, since a child's signal may come before the loop listens for it.
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
        """Start what is missing, and let go of what is too much."""
        if self._is_closing:
            return
        target = min(max(self._wanted, self._held), len(self._slots))
        num_kept = sum(not process.is_draining for process in self._processes.values())
        if num_kept <= target:
            self._cancel("shrink")
        elif "shrink" not in self._timers:
            self._call_later("shrink", self._linger_s, self._shrink)
        if num_kept < target:
            self._start(target - num_kept)

    def _start(self, count: int) -> None:
        wait_s = self._retry_at - time.monotonic()
        if wait_s > 0:
            self._call_later("retry", wait_s, self._reconcile)
            return
        taken = {process.slot.index for process in self._processes.values()}
        free = [slot for slot in self._slots if slot.index not in taken]
        for slot in free[:count]:
            self._num_named += 1
            name = f"w{self._num_named}"
            try:
                popen = self._spawn(name, slot)
            except OSError as exc:  # no memory, no process or no file descriptor is left
                logger.error("worker %s could not be started: %s", name, exc)
                self._back_off(lived_s=0.0)
                wait_s = self._retry_at - time.monotonic()
                self._call_later("retry", max(wait_s, FIRST_BACK_OFF_S), self._reconcile)
                return
            self._processes[name] = WorkerProcess(
                name=name, slot=slot, popen=popen, started_at=time.monotonic()
            )
            logger.info("worker %s started in slot %d as process %d", name, slot.index, popen.pid)

    def _shrink(self) -> None:
        """Release surplus workers, the newest first, but none that a job may be using."""
        target = min(max(self._wanted, self._held), len(self._slots))
        kept = [process for process in self._processes.values() if not process.is_draining]
        idle = [process for process in kept if not self._may_be_busy(process.name)]
        for process in idle[::-1][: len(kept) - target]:
            self.release(process.name, drain_s=10.0)

    def _may_be_busy(self, worker: str) -> bool:
        return self.is_busy(worker) if self.is_busy is not None else self._wanted > 0

    def _forget(self, process: WorkerProcess) -> None:
        """Drop an ended worker, end what it left, and decide when the next one may start."""
        del self._processes[process.name]
        self._on_end(process.name)
        self._cancel(f"kill {process.name}")
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.popen.pid, signal.SIGKILL)
        if process.popen.stdin is not None:
            process.popen.stdin.close()
        code = process.popen.returncode
        if process.is_end_wanted or self._is_closing:
            logger.info("worker %s ended as asked (exit code %s)", process.name, code)
            return
        lived_s = time.monotonic() - process.started_at
        delay_s = self._back_off(lived_s)
        logger.warning(
            "worker %s died by itself after %.1f s (exit code %s); the next may start in %.1f s",
            *(process.name, lived_s, code, delay_s),
        )

    def _back_off(self, lived_s: float) -> float:
        """Count a failure; return how long nothing is started because of it."""
        self._num_failures = 1 if lived_s >= HEALTHY_S else self._num_failures + 1
        delay_s = back_off_s(self._num_failures)
        self._retry_at = time.monotonic() + delay_s
        return delay_s

    def _call_later(self, name: str, delay_s: float, do: Callable[[], None]) -> None:
        """Do something later, in place of what was planned under that name."""

        def run() -> None:
            self._timers.pop(name, None)
            do()

        self._cancel(name)
        self._timers[name] = asyncio.get_running_loop().call_later(delay_s, run)

    def _cancel(self, name: str) -> None:
        if timer := self._timers.pop(name, None):
            timer.cancel()


def back_off_s(num_failures: int) -> float:
    """Return how long to wait before the next start, after that many early deaths in a row.

    >>> [back_off_s(n) for n in (1, 2, 3, 9)]
    [0.0, 0.5, 1.0, 30.0]
    """
    if num_failures < 2:
        return 0.0
    return min(MAX_BACK_OFF_S, FIRST_BACK_OFF_S * 2.0 ** min(num_failures - 2, 10))


def _signal(popen: subprocess.Popen[bytes] | AdoptedProcess, number: signal.Signals) -> None:
    # Popen checks for itself whether the process is still its own.
    with contextlib.suppress(ProcessLookupError):
        popen.send_signal(number)


def make_slots(
    gpus: Sequence[tuple[str, str]], *, max_cpu_slots: int, workers_per_gpu: int = 1
) -> list[Slot]:
    """Return ``workers_per_gpu`` slots for each GPU, or CPU slots if there is no GPU.

    Args:
        gpus: Identifier and name of each GPU.
        max_cpu_slots: Number of slots without GPUs. They cost nothing until a worker is wanted.
        workers_per_gpu: Slots on each GPU. The first slots are on different GPUs, so that workers
            share one only when there are more workers than GPUs.
    """
    if gpus:
        num_slots = len(gpus) * workers_per_gpu
        threads = str(max(1, num_usable_cores() // num_slots))
        return [
            Slot(
                index=index,
                device="cuda:0",
                type=name if workers_per_gpu == 1 else f"{name}, shared",
                environment={
                    "CUDA_VISIBLE_DEVICES": uuid,
                    # By default torch starts a thread per core in every process: eight trainers
                    # on one machine would run eight times as many threads as there are cores.
                    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads),
                },
            )
            for index, (uuid, name) in enumerate(list(gpus) * workers_per_gpu)
        ]
    # Slots share the cores: with torch's default of a thread a core, they would fight for them.
    alone = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return [Slot(index=i, environment=alone) for i in range(max_cpu_slots)]


def num_usable_cores() -> int:
    """Return the number of cores that this process may run on; containers often restrict it."""
    usable = getattr(os, "sched_getaffinity", None)  # not everywhere
    return len(usable(0)) if usable is not None else os.cpu_count() or 1


def start_gpu_query() -> subprocess.Popen[str] | None:
    """Ask the driver for its GPUs without waiting; None if torch cannot use any."""
    command = shutil.which("nvidia-smi")
    if command is None or not torch_has_cuda():
        return None
    return subprocess.Popen(
        [command, "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def finish_gpu_query(
    query: subprocess.Popen[str] | None, *, timeout_s: float
) -> list[tuple[str, str]]:
    """Return identifier and name of each GPU that we may use; none if the driver is silent."""
    if query is None:
        return []
    try:
        text, _ = query.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        logger.warning("nvidia-smi did not answer within %g s: using CPU slots", timeout_s)
        query.kill()
        query.communicate()
        return []
    return visible_gpus(parse_gpu_list(text), os.environ.get("CUDA_VISIBLE_DEVICES"))


def parse_gpu_list(text: str) -> list[tuple[str, str]]:
    """Return identifier and name of each device of ``nvidia-smi -L``; of a cut GPU, its parts.

    >>> parse_gpu_list("GPU 0: NVIDIA H200 (UUID: GPU-1f)")
    [('GPU-1f', 'NVIDIA H200')]
    """
    gpus: list[list[tuple[str, str]]] = []
    for line in text.splitlines():
        if found := re.match(r"GPU \d+: (.+) \(UUID: (\S+)\)", line):
            gpus.append([(found[2], found[1])])
        elif gpus and (found := re.match(r"\s+MIG (\S+)\s.*\(UUID: (\S+)\)", line)):
            name = gpus[-1][0][1]
            gpus[-1].append((found[2], f"{name} MIG {found[1]}"))
    return [device for whole, *parts in gpus for device in (parts or [whole])]


def visible_gpus(gpus: Sequence[tuple[str, str]], visible: str | None) -> list[tuple[str, str]]:
    """Return the GPUs that ``CUDA_VISIBLE_DEVICES`` lets through, in its order.

    >>> visible_gpus([("GPU-1f", "A"), ("GPU-2e", "B")], "1")
    [('GPU-2e', 'B')]
    """
    if visible is None:
        return list(gpus)
    chosen: list[tuple[str, str]] = []
    for word in filter(None, (part.strip() for part in visible.split(","))):
        if word.isdigit():
            matches = list(gpus[int(word) : int(word) + 1])
        else:
            matches = [gpu for gpu in gpus if gpu[0].startswith(word)]
        if len(matches) != 1:
            # As CUDA does it: the first one that does not exist hides the rest.
            break
        chosen += matches
    return chosen


def torch_has_cuda() -> bool:
    """Tell whether the installed torch was built for CUDA, without importing it."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return True
    return re.search(r"^cuda\b.*=\s*None\s*$", text, re.MULTILINE) is None
