"""One job of the simulated SLURM, and its processes."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import psutil

from etrain_jupyter.testing.serving import processes_with

MARKER = "FAKE_SLURM"
"""Variable with the controller's folder: processes of a job have it, like those in a cgroup."""


@dataclass(kw_only=True)
class Job:
    """A job from its submission until it has left the queue."""

    id: str
    name: str
    script: str
    folder: str
    environment: Mapping[str, str]
    partition: str
    limit_s: float
    warning: str | None
    """As in ``--signal``."""
    output: str
    error: str
    requeues: bool
    controller: str
    """Folder of the controller."""
    state: str = "PD"
    """As squeue prints it."""
    reason: str = "None"
    num_restarts: int = 0
    node: str = ""
    started_at: float = 0.0
    ends_at: float = float("inf")
    """Its time limit, on the monotonic clock."""
    preempted_at: float = float("inf")
    """End of the grace period of a preemption. squeue does not show it."""
    kills_at: float = float("inf")
    """Time of SIGKILL; infinite before SIGTERM."""
    is_signalled: bool = False
    end: str = ""
    """SLURM's reason for ending it: ``TIME LIMIT``, ``PREEMPTION`` or empty."""
    process: subprocess.Popen[bytes] | None = None
    _scripts: list[Path] = field(default_factory=list)

    def run(self, node: str) -> None:
        """Start the script on a node."""
        self.state, self.node, self.reason = "R", node, "None"
        self.started_at, self.is_signalled, self.end = time.monotonic(), False, ""
        self.ends_at = self.started_at + self.limit_s
        self.preempted_at = self.kills_at = float("inf")
        fd, path = tempfile.mkstemp(prefix=f"job{self.id}-", dir=self.controller)
        with os.fdopen(fd, "w") as file:
            file.write(self.script)
        os.chmod(path, stat.S_IRWXU)
        self._scripts.append(Path(path))
        environment = dict(self.environment) | {
            MARKER: self.controller,
            f"{MARKER}_JOB": f"{self.controller}/{self.id}",
            "SLURM_JOB_ID": self.id,
            "SLURM_JOB_NAME": self.name,
            "SLURM_RESTART_COUNT": str(self.num_restarts),
            "SLURMD_NODENAME": node,
        }
        with self._open(self.output) as out, self._open(self.error) as err:
            self.process = subprocess.Popen(
                [path],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=self.folder,
                env=environment,
                start_new_session=True,
            )

    def _open(self, name: str) -> BinaryIO:
        path = Path(self.folder) / (name.replace("%J", self.id).replace("%j", self.id))
        return path.open("ab") if path.parent.is_dir() else open(os.devnull, "ab")

    def advance(self, kill_wait_s: float) -> None:
        """Send the signals that are due, and notice the end of the processes."""
        assert self.process is not None
        now = time.monotonic()
        if self.process.poll() is not None:
            self.kill()
            self._finish()
            return
        wish = parse_signal(self.warning)
        if wish and not self.is_signalled and now >= self.ends_at - wish[1]:
            self.is_signalled = True
            self.send(wish[0])
        if now >= min(self.ends_at, self.preempted_at) and self.kills_at == float("inf"):
            self.end = self.end or "TIME LIMIT"
            self.terminate(kill_wait_s)
        if now >= self.kills_at:
            self.kill()

    def preempt(self, grace_s: float, *, sends_signal: bool) -> None:
        """End the job after ``grace_s`` seconds.

        Args:
            grace_s: GraceTime of the partition.
            sends_signal: Send the signal of ``--signal`` now (preempt_send_user_signal). By
                default, SLURM sends nothing to the batch shell before SIGTERM.
        """
        self.end = "PREEMPTION"
        self.preempted_at = time.monotonic() + grace_s
        wish = parse_signal(self.warning)
        if wish and sends_signal and not self.is_signalled:
            self.is_signalled = True
            self.send(wish[0])

    def send(self, name: str) -> None:
        """Send a signal to the batch shell only."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(getattr(signal, f"SIG{name}"))

    def terminate(self, kill_wait_s: float) -> None:
        """End the job: SIGCONT and SIGTERM now, SIGKILL later."""
        if self.state == "PD":
            self.state = "CA"
            return
        self.state = "CG"
        why = f" DUE TO {self.end}" if self.end else ""
        with self._open(self.error) as err:
            at = time.strftime("%Y-%m-%dT%H:%M:%S")
            line = f"slurmstepd: error: *** JOB {self.id} ON {self.node} CANCELLED AT {at}{why} ***"
            err.write(f"{line}\n".encode())
        self.kills_at = time.monotonic() + kill_wait_s
        self._send_to_all(signal.SIGCONT)
        self._send_to_all(signal.SIGTERM)

    def kill(self) -> None:
        """Kill all processes of the job."""
        self._send_to_all(signal.SIGKILL)

    def _send_to_all(self, number: signal.Signals) -> None:
        # Including processes in other sessions: SLURM tracks them by a cgroup or by their parents.
        for process in processes_with(f"{MARKER}_JOB={self.controller}/{self.id}"):
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)

    def _finish(self) -> None:
        assert self.process is not None
        for path in self._scripts:
            path.unlink(missing_ok=True)
        self._scripts.clear()
        code = self.process.returncode
        self.process = None
        if self.end == "PREEMPTION" and self.requeues:
            self.state, self.node, self.reason = "PD", "", "BeginTime"
            self.num_restarts += 1
        elif self.end:
            self.state = {"PREEMPTION": "PR", "TIME LIMIT": "TO"}[self.end]
        else:
            self.state = "CD" if code == 0 else "CA" if self.state == "CG" else "F"


def parse_signal(text: str | None) -> tuple[str, float, bool] | None:
    """Return name, seconds before the time limit, and whether only the batch shell gets a signal.

    >>> parse_signal("B:USR1@120")
    ('USR1', 120.0, True)
    """
    if not text:
        return None
    flags, _, rest = text.rpartition(":")
    name, _, seconds = rest.partition("@")
    return name, float(seconds or 60), "B" in flags
