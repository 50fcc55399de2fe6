"""Call SLURM's commands: sbatch, squeue and scancel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from etrain_jupyter.errors import PoolError
from etrain_jupyter.process.processes import MARKER

COMMANDS = ("sbatch", "squeue", "scancel")
POLL_S = 0.5
TIMEOUT_S = 60.0
"""Timeout of a command, in seconds; SLURM's own is 10 s."""
PENDING = frozenset({"PD", "CF", "RQ", "RH", "RD", "RF", "SE"})
RUNNING = frozenset({"R", "S", "ST", "SO", "SI"})
ENDING = frozenset({"CG"})
"""Its processes have got SIGTERM, and some may still run."""
LISTED = "%i|%j|%t|%L|%M|%N|%r"
"""Id, name, state, time left, time used, nodes and reason of a job."""
JOB_ID = re.compile(r"[0-9]{1,19}(?:[_+][\w\[\],%+-]{1,100})?", re.ASCII)
"""Pattern of job ids; the second part is that of an array or of a heterogeneous job."""
TRANSIENT = re.compile(
    r"timed out|unable to contact|temporarily|try again|connection|communication|submit limit",
    re.IGNORECASE,
)
"""Refusals of sbatch that a later attempt may not get: an absent controller, or a limit on the
number of jobs."""


class SlurmError(PoolError):
    """A command of SLURM failed.

    Attributes:
        is_transient: True if a later attempt may succeed.
    """

    def __init__(self, message: str, *, is_transient: bool) -> None:
        super().__init__(message)
        self.is_transient = is_transient


@dataclass(frozen=True, kw_only=True)
class QueuedJob:
    """A job that squeue lists as pending, running or ending."""

    job_id: str
    name: str
    """Cluster id and worker name, see ``job_name_of``."""
    is_running: bool
    left_s: float
    """Seconds until its time limit; infinite if unknown or unlimited."""
    used_s: float
    """Seconds since it was started."""
    node: str
    """The node that it runs on; empty while it is pending."""
    reason: str
    """SLURM's reason why it is pending."""
    is_ending: bool = False
    """SLURM is ending it. Its worker may still use the time until SIGKILL."""

    @property
    def worker(self) -> str:
        """The worker's name."""
        return self.name.rpartition(".")[2]


def job_name_of(cluster_id: str, worker: str) -> str:
    """Return the name of a worker's SLURM job, by which later heads and ``down`` find it."""
    return f"{cluster_id}.{worker}"


def check_commands() -> None:
    """Check that SLURM's commands are installed.

    Raises:
        PoolError: If one is missing.
    """
    missing = [name for name in COMMANDS if shutil.which(name) is None]
    if missing:
        raise PoolError(
            f"{' and '.join(missing)} not found in PATH on this machine. Nothing was started. "
            "Run Jupyter on a login node, or on another machine where SLURM's commands work."
        )


def list_jobs(prefix: str) -> list[QueuedJob]:
    """Return this user's jobs whose names begin with ``prefix`` and that have not ended.

    They are sorted by their ids, oldest first.

    Raises:
        SlurmError: If squeue fails.
    """
    text = _call(["squeue", "--noheader", f"--user={os.getuid()}", f"--format={LISTED}"])
    jobs = []
    for line in text.splitlines():
        job_id, name, state, left, used, node, reason = (line.strip().split("|", 6) + [""] * 6)[:7]
        is_id = JOB_ID.fullmatch(job_id) is not None  # scancel must not read it as an option
        if is_id and name.startswith(prefix) and state in PENDING | RUNNING | ENDING:
            jobs.append(
                QueuedJob(
                    job_id=job_id,
                    name=name,
                    is_running=state in RUNNING,
                    left_s=seconds_of(left),
                    used_s=0.0 if state in PENDING else seconds_of(used),
                    node=node,
                    reason=reason,
                    is_ending=state in ENDING,
                )
            )
    return sorted(jobs, key=lambda job: (len(job.job_id), job.job_id))


def submit(script: str, *, folder: Path) -> str:
    """Submit a job script, with a working folder on a shared disk; return the job's id.

    Raises:
        SlurmError: If sbatch refuses the job.
    """
    # Variables of an enclosing job, such as a JupyterHub's, must not configure this one. The marker
    # would identify the job's processes as processes of this machine's cluster.
    environment = {
        name: text
        for name, text in os.environ.items()
        if name != MARKER and (name == "SLURM_CONF" or not name.startswith(("SLURM_", "SLURMD_")))
    }
    with tempfile.NamedTemporaryFile("w", suffix=".sh") as file:
        file.write(script)
        file.flush()
        text = _call(["sbatch", file.name], cwd=folder, env=environment)
    found = re.search(r"\d+", text)
    if found is None:
        raise SlurmError(f"sbatch printed no job id, but {text.strip()!r}", is_transient=False)
    return found[0]


def cancel(job_ids: Iterable[str], *, signal: str = "") -> None:
    """Cancel jobs: they get SIGTERM, and SIGKILL after KillWait. Ended jobs are ignored.

    With ``signal``, for example ``KILL``, only this is sent, to all processes of the jobs.

    Raises:
        SlurmError: If SLURM cannot be reached.
    """
    ids = list(job_ids)
    if not ids:
        return
    options = [f"--signal={signal}", "--full"] if signal else []
    try:
        _call(["scancel", *options, *ids])
    except SlurmError as exc:
        # A job that has ended in the meantime is invalid.
        if "invalid job id" not in str(exc).lower():
            raise


def cancel_all(prefix: str, *, timeout_s: float) -> list[QueuedJob]:
    """Cancel all jobs with a prefix and wait until SLURM ends them.

    Returns:
        Those that are still pending or running after ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    while left := [job for job in list_jobs(prefix) if not job.is_ending]:
        cancel(job.job_id for job in left)
        if time.monotonic() >= deadline:
            break
        time.sleep(POLL_S)
    return left


def seconds_of(text: str) -> float:
    """Return a duration in SLURM's notation in seconds; infinite if it is not a duration.

    >>> seconds_of("1-02:00:00"), seconds_of("5:30"), seconds_of("UNLIMITED")
    (93600.0, 330.0, inf)
    """
    found = re.fullmatch(r"(?:(\d{1,9})-)?(?:(\d{1,9}):)?(\d{1,9}):(\d{1,9})", text.strip())
    if found is None:
        return float("inf")
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _call(
    command: Sequence[str], *, cwd: Path | None = None, env: dict[str, str] | None = None
) -> str:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",  # names of other jobs of this user may have any bytes
            check=False,
            timeout=TIMEOUT_S,
            cwd=cwd,
            env=env,
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise SlurmError(f"{command[0]} failed: {exc}", is_transient=True) from exc
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise SlurmError(f"{command[0]}: {said}", is_transient=bool(TRANSIENT.search(said)))
    return done.stdout
