"""One run of a peer: its processes, its step log and its shutdown.

Every process of a run, including child processes, has a token in its environment. The token
identifies all processes to stop, however a system starts them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Self

import psutil

from benchmarks.common.step_log import Execution, History, LogReader
from benchmarks.peers.training import Task

ROOT = Path(__file__).parents[2]
TOKEN = "ETRAIN_BENCHMARK_RUN"
END_TIMEOUT_S = 15.0


class PeerRun:
    """Processes of one run. As a context manager, it stops all of them on exit.

    Args:
        task: Task of the peer.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.leftovers = 0
        """Number of processes that the peer had not stopped and that had to be killed."""
        self._token = uuid.uuid4().hex
        self._processes: list[subprocess.Popen[bytes]] = []
        self._reader = LogReader(task.log_folder)
        task.save()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def spawn(self, name: str, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start ``python -m arguments``; its output goes to ``name.log`` in the run's folder."""
        common = {"OMP_NUM_THREADS": "1", TOKEN: self._token, "PYTHONPATH": python_path()}
        with (self.task.folder / f"{name}.log").open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.task.folder,
                env={**os.environ, **common, **environment},
                # Ctrl-C must reach only the benchmark, which then stops the run.
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def history(self) -> History:
        """Return all steps that the ranks have logged so far."""
        return self._reader.read()

    def ranks(self) -> dict[int, int]:
        """Return the live pids of the newest attempt by rank; empty before the first step."""
        history = self.history()
        attempt = history.newest_attempt()
        steps = [done for done in history.executions.values() if done.attempt == attempt]
        newest = max(steps, key=lambda done: done.step, default=None)
        pids = newest.pids if newest else {}
        return {rank: pid for rank, pid in pids.items() if psutil.pid_exists(pid)}

    def kill(self, rank: int) -> float:
        """Send SIGKILL to the process of a rank and return the time."""
        killed_at = time.time()
        os.kill(self.ranks()[rank], signal.SIGKILL)
        return killed_at

    def check(self) -> None:
        """Raise ``RuntimeError`` if every process has exited."""
        if all(process.poll() is not None for process in self._processes):
            raise RuntimeError(f"every process of the run has exited; output:\n{self.output()}")

    def output(self) -> str:
        """Return the last lines of output of each process."""
        lines: list[str] = []
        for path in sorted(self.task.folder.glob("*.log")):
            text = path.read_text(encoding="utf-8", errors="replace")
            lines += [f"{path.stem}: {line}" for line in text.splitlines()[-20:]]
        return "\n".join(lines)

    def end(self, process: subprocess.Popen[bytes]) -> None:
        """Kill one process that ``spawn`` started."""
        process.kill()
        process.wait()

    def close(self) -> None:
        """Terminate every process, wait, and kill the remaining ones."""
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + END_TIMEOUT_S
        while self._own_processes() and time.monotonic() < deadline:
            for process in self._processes:
                process.poll()
            time.sleep(0.1)
        left = self._own_processes()
        self.leftovers = len(left)
        for remaining in left:
            remaining.kill()
        psutil.wait_procs(left, timeout=END_TIMEOUT_S)

    def _own_processes(self) -> list[psutil.Process]:
        """Return all processes with the token, except zombies."""
        found = []
        for process in psutil.process_iter():
            try:
                is_own = process.environ().get(TOKEN) == self._token
                if is_own and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue  # the process has exited or belongs to another user
        return found


def python_path() -> str:
    """Return the module path with this repository first, because the ranks import from it."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def last_whole(history: History, world_size: int) -> list[Execution]:
    """Return the committed steps of the newest attempt if it has full size, otherwise none."""
    attempt = history.newest_attempt()
    steps = history.committed(attempt) if attempt is not None else []
    return steps if steps and steps[-1].world_size == world_size else []
