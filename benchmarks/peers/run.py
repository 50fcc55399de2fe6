"""One run of a peer: its processes, the log that its ranks write, and its end.

Every process of a run carries a token in its environment, and so does whatever it starts. That is
how a run is ended completely, however a system's own processes hang together.
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

from benchmarks.peers.training import Task
from benchmarks.step_log import Execution, History, LogReader

ROOT = Path(__file__).parents[2]
TOKEN = "ETRAIN_BENCHMARK_RUN"
END_TIMEOUT_S = 15.0


class PeerRun:
    """A context: entering starts nothing, leaving ends all that was started.

    Args:
        task: What the peer is to do.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.leftovers = 0
        """Processes that had to be killed because their own system had not ended them."""
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
                # An interrupt at the terminal is for the benchmark, which then ends the run.
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def history(self) -> History:
        """What the ranks have written so far."""
        return self._reader.read()

    def ranks(self) -> dict[int, int]:
        """Process ids by rank in the newest attempt, those alive; empty before the first step."""
        history = self.history()
        attempt = history.newest_attempt()
        steps = [done for done in history.executions.values() if done.attempt == attempt]
        newest = max(steps, key=lambda done: done.step, default=None)
        pids = newest.pids if newest else {}
        return {rank: pid for rank, pid in pids.items() if psutil.pid_exists(pid)}

    def kill(self, rank: int) -> float:
        """SIGKILL the process of a rank; return when."""
        killed_at = time.time()
        os.kill(self.ranks()[rank], signal.SIGKILL)
        return killed_at

    def check(self) -> None:
        """Raise if nothing is left that could train."""
        if all(process.poll() is not None for process in self._processes):
            raise RuntimeError(f"every process has ended; the output is:\n{self.output()}")

    def output(self) -> str:
        """The last lines that its processes printed."""
        lines: list[str] = []
        for path in sorted(self.task.folder.glob("*.log")):
            text = path.read_text(encoding="utf-8", errors="replace")
            lines += [f"{path.stem}: {line}" for line in text.splitlines()[-20:]]
        return "\n".join(lines)

    def end(self, process: subprocess.Popen[bytes]) -> None:
        """SIGKILL one process that ``spawn`` started."""
        process.kill()
        process.wait()

    def close(self) -> None:
        """Ask every process to end, wait, and kill what is left."""
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
        """Whatever carries the token, zombies apart."""
        found = []
        for process in psutil.process_iter():
            try:
                is_own = process.environ().get(TOKEN) == self._token
                if is_own and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue  # it has ended, or is somebody else's
        return found


def python_path() -> str:
    """The module path with this repository first: the ranks import the workloads."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def last_whole(history: History, world_size: int) -> list[Execution]:
    """The committed steps of the newest attempt if all ranks take part in it, else none."""
    attempt = history.newest_attempt()
    steps = history.committed(attempt) if attempt is not None else []
    return steps if steps and steps[-1].world_size == world_size else []
