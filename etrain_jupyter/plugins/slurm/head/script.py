"""Write the job script of a worker with dask-jobqueue."""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from etrain_jupyter.errors import PoolError
from etrain_jupyter.plugins.slurm.spec import SlurmSpec

WORKER = "etrain_jupyter.plugins.slurm.machine.job_worker"
MISSING = (
    "dask-jobqueue is not installed ({why}). Nothing was started. "
    "%pip install 'etrain-jupyter[slurm]' and restart the kernel."
)


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

    It contains no secrets: the worker reads its certificates from ``site``.

    Args:
        spec: The pool.
        worker: The worker's name.
        job_name: Name of the SLURM job.
        scheduler: Address of the scheduler.
        supervisor: Factory of the supervisor, as ``package.module:attribute``.
        site: The cluster's folder on the shared disk.

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
