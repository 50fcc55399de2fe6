"""An external Dask cluster: plain processes of Dask's own commands."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
PATIENCE_S = 90.0


class DaskCluster:
    """A scheduler and a variable number of workers.

    Args:
        folder: Folder for the logs of its processes.
        tls: TLS options of Dask's commands; None for plain TCP.
        environment: Additional environment variables for its processes.
    """

    def __init__(
        self,
        folder: Path,
        *,
        tls: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.folder.mkdir(exist_ok=True)
        self._tls = [word for key, value in (tls or {}).items() for word in (f"--tls-{key}", value)]
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "DASK_DISTRIBUTED__SCHEDULER__HTTP__ROUTES": "[]",
            **(environment or {}),
        }
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._num_started = 0
        self.port = _free_port()
        self.address = f"{'tls' if tls else 'tcp'}://127.0.0.1:{self.port}"
        self.start_scheduler()

    def start_scheduler(self) -> None:
        options = ("--host", "127.0.0.1", "--port", str(self.port), "--no-dashboard")
        self._start("scheduler", "scheduler", *options)
        self._await_words("scheduler", r"Scheduler at:")

    def start_worker(self, *options: str, environment: Mapping[str, str] | None = None) -> str:
        """Start a worker and wait until it is registered; return its name."""
        self._num_started += 1
        name = f"theirs-{self._num_started}"
        words = ("--name", name, "--host", "127.0.0.1", "--no-dashboard", "--nthreads", "1")
        folder = ("--local-directory", str(self.folder / "scratch"), "--memory-limit", "0")
        nanny = () if "--nanny" in options else ("--no-nanny",)
        words = (self.address, *words, *folder, *nanny, *options)
        self._start(name, "worker", *words, environment=environment)
        self._await_words(name, r"Registered to:")
        return name

    def _start(
        self, name: str, command: str, *words: str, environment: Mapping[str, str] | None = None
    ) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-m", "dask", command, *words, *self._tls],
                env={**self._environment, **(environment or {})},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
            )

    def _await_words(self, name: str, words: str) -> None:
        log = self.folder / f"{name}.log"
        before = len(re.findall(words, log.read_text())) if name == "scheduler" else 0
        deadline = time.monotonic() + PATIENCE_S
        while len(re.findall(words, log.read_text())) <= before:
            is_over = not self.is_alive(name) or time.monotonic() > deadline
            assert not is_over, f"{name} did not start:\n{log.read_text()}"
            time.sleep(0.05)

    def log_of(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def pid_of(self, name: str) -> int:
        return self._processes[name].pid

    def is_alive(self, name: str) -> bool:
        return self._processes[name].poll() is None

    def kill(self, name: str) -> None:
        """Kill a process of the cluster with SIGKILL."""
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def end_workers(self) -> None:
        for name in [name for name in self._processes if name != "scheduler"]:
            self._end(name)

    def trainers(self) -> list[int]:
        """Return the ids of our processes below its workers."""
        found: list[int] = []
        for process in self._processes.values():
            try:
                children = psutil.Process(process.pid).children(recursive=True)
                found += [c.pid for c in children if "etrain_jupyter" in " ".join(c.cmdline())]
            except psutil.Error:
                continue
        return found

    def close(self) -> None:
        self.end_workers()
        self._end("scheduler")

    def _end(self, name: str) -> None:
        process = self._processes.pop(name, None)
        if process is None:
            return
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: Any = probe.getsockname()[1]
        return int(port)
