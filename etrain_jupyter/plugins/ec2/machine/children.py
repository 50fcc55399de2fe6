"""Start and stop the worker processes of a node."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from etrain_jupyter.head.slots import Slot, make_slots
from etrain_jupyter.process.gpus import finish_gpu_query, start_gpu_query

logger = logging.getLogger("etrain.agent")

GPU_QUERY_S = 60.0
"""Timeout in seconds; a driver that has just been loaded is slow to respond."""


def slots_of_machine(workers_per_node: int) -> list[Slot]:
    """Return the slots for this machine's workers: one per GPU, or one if there are no GPUs."""
    gpus = finish_gpu_query(start_gpu_query(), timeout_s=GPU_QUERY_S)
    if gpus:
        slots = make_slots(gpus, max_cpu_slots=0)
        # If there are more workers than GPUs, they share the GPUs round-robin.
        count = workers_per_node or len(slots)
        return [slots[k % len(slots)] for k in range(count)]
    count = workers_per_node or 1
    threads = str(max(1, (os.cpu_count() or 1) // count))
    # Without a limit, each worker would start one thread per core. The empty variable hides GPUs
    # that the driver lists but torch cannot use.
    alone = {"OMP_NUM_THREADS": threads, "CUDA_VISIBLE_DEVICES": ""}
    return [Slot(index=k, type="CPU", environment=alone) for k in range(count)]


class Children:
    """Processes that exit with this one, because only this one can write to the pipe they read."""

    def __init__(self) -> None:
        # Children inherit only the read end; the kernel closes the write end when we exit.
        self._pipes: tuple[int, ...] = os.pipe()
        self._by_name: dict[str, subprocess.Popen[bytes]] = {}
        self._codes: dict[str, int] = {}

    def start(
        self, name: str, module: str, arguments: Sequence[str], env: Mapping[str, str]
    ) -> None:
        """Start a process with our standard output, which is the machine's console."""
        # With -m but without -P, Python would put the working directory first on sys.path.
        flags = ["-P"] if sys.flags.safe_path else []
        process = subprocess.Popen(
            [sys.executable, *flags, "-m", module, *arguments],
            stdin=self._pipes[0],
            env={**os.environ, **env},
            # Start a new process group, so that killpg reaches processes started by user code.
            process_group=0,
        )
        self._by_name[name] = process
        logger.info("worker %s started as process %d", name, process.pid)

    def codes(self) -> dict[str, int]:
        """Return the exit codes of processes that have exited, and log new ones."""
        for name, process in self._by_name.items():
            code = process.poll()
            if code is not None and name not in self._codes:
                self._codes[name] = code
                logger.warning("worker %s has ended with exit code %d", name, code)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)  # processes that it has left behind
        return dict(self._codes)

    @property
    def have_ended(self) -> bool:
        """True if processes were started and all have exited."""
        return bool(self._by_name) and len(self.codes()) == len(self._by_name)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all running processes."""
        for process in self._by_name.values():
            with contextlib.suppress(ProcessLookupError):
                # Popen checks first whether the process has exited, so a reused pid is never
                # signalled.
                process.send_signal(number)

    def end(self, grace_s: float) -> None:
        """Stop all processes with SIGTERM, and with SIGKILL after ``grace_s`` seconds."""
        self.signal(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while not self.have_ended and self._by_name and time.monotonic() < deadline:
            time.sleep(0.05)
        for process in self._by_name.values():
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    # Kill the whole group, because a worker that ignores SIGTERM may have trainers
                    # that ignore it, too.
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for pipe in self._pipes:
            os.close(pipe)
        self._pipes = ()
        self._by_name.clear()


def prepare_folder(folder: Path) -> None:
    """Create a node's folder, accessible to this user only."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # mkdir's mode is subject to the umask and has no effect on an existing folder.
    os.chmod(folder, 0o700)
