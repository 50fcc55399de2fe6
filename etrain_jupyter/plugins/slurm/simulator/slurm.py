"""Start and control the simulated SLURM."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from etrain_jupyter.plugins.slurm.simulator.jobs import MARKER
from etrain_jupyter.testing.serving import Closing, processes_with, start_server

COMMANDS = ("sbatch", "squeue", "scancel")


class FakeSlurm(Closing):
    """A SLURM whose jobs are processes on this machine.

    Put ``bin`` into PATH, for example with ``monkeypatch.setenv("PATH", slurm.path)``. A job ends
    when its script does, at its time limit, which has a resolution of 1 s here, or when it is
    preempted or cancelled; then all its processes are killed.

    Args:
        num_nodes: Jobs that run at the same time; more are pending.
        partitions: Names of the partitions; the first is the default.
        kill_wait_s: Seconds between SIGTERM and SIGKILL (KillWait).
    """

    def __init__(
        self,
        *,
        num_nodes: int = 4,
        partitions: Sequence[str] = ("cpu", "gpu"),
        kill_wait_s: float = 10.0,
    ) -> None:
        # The path of a Unix socket has at most 107 bytes, so pytest's folders are too long.
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.bin = self.folder / "bin"
        self.bin.mkdir()
        client = Path(__file__).with_name("command.py")
        for name in COMMANDS:
            script = self.bin / name
            line = f'exec "{sys.executable}" -IS "{client}" "{self.folder}/socket" {name} "$@"'
            script.write_text(f"#!/bin/sh\n{line}\n")
            script.chmod(0o755)
        self._process, _ = start_server(
            "The simulated SLURM",
            "etrain_jupyter.plugins.slurm.simulator.controller",
            *(str(self.folder), "--nodes", str(num_nodes), "--partitions", ",".join(partitions)),
            *("--kill-wait-s", str(kill_wait_s)),
            env=os.environ,
        )

    @property
    def path(self) -> str:
        """Value of PATH with the commands first."""
        return f"{self.bin}{os.pathsep}{os.environ['PATH']}"

    def jobs(self) -> list[dict[str, Any]]:
        """Return all jobs, oldest first: id, name, state, script, pid and number of restarts."""
        return list(self._ask("list_jobs"))

    def running(self) -> list[dict[str, Any]]:
        """Return the running jobs, oldest first."""
        return [job for job in self.jobs() if job["state"] == "R"]

    def preempt(self, job_id: str, *, grace_s: float, sends_signal: bool = False) -> None:
        """Preempt a job: it gets SIGTERM after ``grace_s`` seconds, and SIGKILL after KillWait.

        Args:
            job_id: The job.
            grace_s: GraceTime of its partition.
            sends_signal: True for a SLURM with ``SlurmctldParameters=preempt_send_user_signal``,
                which sends the signal of ``--signal`` at the beginning.
        """
        self._ask("preempt", job_id, grace_s, sends_signal)

    def set_time_left(self, job_id: str, left_s: float) -> None:
        """Change a running job's time limit, as ``scontrol update`` can."""
        self._ask("set_time_left", job_id, left_s)

    def cancel(self, job_id: str) -> None:
        """Cancel a job, as its user can."""
        subprocess.run([self.bin / "scancel", job_id], check=True)

    def refuse(self, message: str) -> None:
        """Refuse new jobs with SLURM's message, for example ``Invalid account``; empty to stop."""
        self._ask("configure", "refusal", message)

    def set_down(self, is_down: bool) -> None:
        """Let every command fail, as if the controller did not run; jobs keep running."""
        self._ask("configure", "is_down", is_down)

    def set_nodes(self, num_nodes: int) -> None:
        """Change the number of jobs that run at the same time; running jobs keep running."""
        self._ask("configure", "num_nodes", num_nodes)

    def close(self) -> None:
        """Kill the controller and all jobs, and remove the folder."""
        with self._process:
            self._process.kill()
        for process in processes_with(f"{MARKER}={self.folder}"):
            with contextlib.suppress(psutil.Error):
                process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _ask(self, command: str, *arguments: Any) -> Any:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(str(self.folder / "socket"))
            request = {"command": command, "arguments": arguments}
            connection.sendall(json.dumps(request).encode() + b"\n")
            with connection.makefile() as file:
                answer = json.loads(file.read())
        if answer["code"]:
            raise RuntimeError(answer["err"])
        return answer["out"]
