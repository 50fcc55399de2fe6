"""Write the job script of a worker with dask-jobqueue."""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from etrain_jupyter.errors import PoolError
from etrain_jupyter.head.coordinator.nodes import NodeCost
from etrain_jupyter.plugins.slurm.commands import QueuedJob
from etrain_jupyter.plugins.slurm.spec import SlurmSpec
from etrain_jupyter.process.files import write_private

WORKER = "etrain_jupyter.plugins.slurm.machine.job_worker"
MISSING = (
    "dask-jobqueue is not installed ({why}). Nothing was started. "
    "%pip install 'etrain-jupyter[slurm]' and restart the kernel."
)


LIFECYCLE = "slurm"


@contextlib.contextmanager
def keeping_handlers() -> Iterator[None]:
    """Restore the signal handlers that the import of dask-jobqueue replaces."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def job_class() -> Any:
    """Return dask-jobqueue's class of SLURM jobs. Call it on the main thread.

    The first import writes a template for settings to ``~/.config/dask/jobqueue.yaml``.

    Raises:
        PoolError: If dask-jobqueue is not installed.
    """
    try:
        with keeping_handlers():
            from dask_jobqueue.slurm import SLURMJob
    except ModuleNotFoundError as exc:
        raise PoolError(MISSING.format(why=exc)) from exc
    return SLURMJob


def job_script(
    spec: SlurmSpec, *, worker: str, job_name: str, scheduler: str, supervisor: str, site: Path
) -> str:
    """Return the script that sbatch runs for a worker.

    It contains no secrets, because the worker reads its certificates from ``site``, the cluster's
    folder.

    Raises:
        PoolError: If dask-jobqueue refuses the settings.
    """
    variables = {"ETRAIN_NOTICE_S": f"{spec.notice:g}", **spec.environment}
    options = {
        "folder": str(site),
        "device": spec.device,
        "supervisor": supervisor,
        "away-s": f"{spec.lifetime.away:g}",
        "kill-wait-s": f"{spec.kill_wait:g}",
    }
    log_folder = Path(spec.log_folder).expanduser() if spec.log_folder else site / "logs"
    try:
        job = job_class()(
            scheduler=scheduler,
            name=worker,
            job_name=job_name,
            queue=spec.queue,
            account=spec.account,
            cores=spec.cores,
            memory=spec.memory,
            processes=1,
            walltime=format_walltime(spec.walltime),
            interface=spec.interface,
            local_directory=spec.local_directory,
            log_directory=str(log_folder),
            python=f"exec {shlex.quote(spec.python or sys.executable)}",
            worker_command=WORKER,
            worker_extra_args=[
                word for key, value in options.items() for word in (f"--{key}", shlex.quote(value))
            ],
            job_extra_directives=spec.directives,
            # Until the worker handles USR1, the signal must not end it. A signal that is ignored
            # stays ignored after `exec`.
            job_script_prologue=[
                "trap '' USR1",
                *(f"export {name}={shlex.quote(text)}" for name, text in variables.items()),
                *spec.prologue,
            ],
        )
    except (TypeError, ValueError) as exc:
        raise PoolError(
            f"dask-jobqueue refuses the settings of this pool: {' '.join(str(exc).split())} "
            "Nothing was started. Write cores: 8 and memory: 32 GiB, for example, in pools.yaml."
        ) from exc
    return str(job.job_script())


def format_walltime(seconds: float) -> str:
    """Return a time limit as sbatch reads it.

    >>> format_walltime(90.0), format_walltime(100 * 3600.0)
    ('00:01:30', '4-04:00:00')
    """
    days, rest = divmod(round(seconds), 86400)
    hours, rest = divmod(rest, 3600)
    clock = f"{hours:02}:{rest // 60:02}:{rest % 60:02}"
    return f"{days}-{clock}" if days else clock


class Accounts:
    """Costs of a cluster's jobs since its start, in a file that outlives the scheduler.

    Args:
        path: The file.
        usd_per_h: Price of a job per hour; None if unknown, so that nothing is recorded.
    """

    def __init__(self, path: Path, usd_per_h: float | None) -> None:
        self._path = path
        self._usd_per_h = usd_per_h
        self._used_s: dict[str, float] = {}  # by worker
        with contextlib.suppress(OSError, ValueError):
            self._used_s = json.loads(path.read_text())

    def record(self, jobs: Sequence[QueuedJob]) -> None:
        """Update the running jobs' times, from SLURM's own clock."""
        if self._usd_per_h is None:
            return
        now = {job.worker: job.used_s for job in jobs if job.is_running}
        # A requeued job would start from 0 again.
        changed = {
            worker: used_s for worker, used_s in now.items() if used_s > self._used_s.get(worker, 0)
        }
        if changed:
            self._used_s |= changed
            write_private(self._path, json.dumps(self._used_s))

    def costs(self, living: Collection[str]) -> list[NodeCost]:
        """Return the cost of each job; empty if the price is unknown.

        Args:
            living: Workers whose jobs run.
        """
        return [
            NodeCost(
                node_id=worker,
                workers=(worker,),
                lifecycle=LIFECYCLE,
                spent_usd=used_s / 3600 * (self._usd_per_h or 0.0),
                on_demand_usd=used_s / 3600 * (self._usd_per_h or 0.0),
                is_alive=worker in living,
                hours=used_s / 3600,
            )
            for worker, used_s in self._used_s.items()
        ]
