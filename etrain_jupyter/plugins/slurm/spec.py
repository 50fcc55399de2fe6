"""Configuration of a pool of kind ``slurm``; every key has a default.

::

    queue: gpu
    account: my-project
    cores: 8
    memory: 32 GiB
    gpus: 1
    walltime: 4 h
    workers: {max: 8}
    prologue: [module load cuda]
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field, field_validator, model_validator

from etrain_jupyter.config.fields import Section, fault
from etrain_jupyter.pools.spec_fields import Duration, Names, Usd, Variables
from etrain_jupyter.pools.spec_pool import PoolSpec

KIND = "slurm"
MAX_AHEAD_S = 900.0
"""Maximum of the default of ``replace_ahead``, in seconds."""

OWN_DIRECTIVES = {
    "-J": "the pool finds its jobs by their names",
    "-n": "each job is one worker",
    "-N": "each job is one worker",
    "-a": "each job is one worker",
    "-D": "jobs start in the pool's folder",
    "-t": "write walltime",
    "-p": "write queue",
    "-A": "write account",
    "-c": "write cores",
    "-e": "write log_folder",
    "-o": "write log_folder",
    "--mem": "write memory",
    "--signal": "write notice",
    "--requeue": "the pool submits a new job instead",
    "--no-requeue": "the pool sets it",
}
"""Options of sbatch that the pool sets itself, and what to write instead."""
LONG_NAMES = {
    "--job-name": "-J",
    "--ntasks": "-n",
    "--nodes": "-N",
    "--array": "-a",
    "--chdir": "-D",
    "--time": "-t",
    "--partition": "-p",
    "--account": "-A",
    "--cpus-per-task": "-c",
    "--error": "-e",
    "--output": "-o",
}


class WorkersSpec(Section):
    """Number of workers; each is one SLURM job."""

    min: Annotated[int, Field(ge=0)] = 0
    """Workers to keep while the cluster is up, whether or not a job needs them."""
    max: Annotated[int, Field(ge=1)] = 4
    """Maximum number of workers. Replacements of workers that are about to end may exceed it."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min > self.max:
            raise fault(
                f"workers.min={self.min} is more than workers.max={self.max}",
                hint=f"write workers.max: {self.min}, or lower workers.min",
                path=("workers", "min"),
            )
        return self


class LifetimeSpec(Section):
    """Timeouts."""

    idle: Duration = 20 * 60.0
    """The cluster ends after this time without a job."""
    linger: Duration = 60.0
    """Time to keep idle workers, warm for the next job."""
    away: Duration = 300.0
    """Workers end if the scheduler has not returned for this time."""
    max_start_failures: Annotated[int, Field(ge=1)] = 3
    """Submission stops after this number of consecutive jobs whose workers never connected."""


class SlurmSpec(PoolSpec):
    """SLURM jobs. Keys that are left out have the values of dask-jobqueue's own configuration.

    >>> SlurmSpec.parse({"walltime": "4 h"}).ahead_s
    900.0
    """

    queue: str | None = None
    """Partition (`sbatch -p`); None for the cluster's default."""
    account: str | None = None
    """Account to charge (`sbatch -A`)."""
    cores: Annotated[int | None, Field(ge=1)] = None
    """CPU cores of a job. Required, unless Dask's configuration has `jobqueue.slurm.cores`."""
    memory: str | None = None
    """Memory of a job, for example `32 GiB`. Required, unless Dask's configuration
    has `jobqueue.slurm.memory`."""
    gpus: Annotated[int, Field(ge=0)] = 0
    """1 for a GPU per job, 0 for none (`sbatch --gres=gpu:1`)."""
    gpu_type: str | None = None
    """Type of the GPU, as SLURM names it, for example `a100`."""
    walltime: Annotated[Duration, Field(ge=1)] = 3600.0
    """Time limit of a job; a worker is replaced before it ends."""
    job_extra_directives: Names = ()
    """Further options of sbatch, one per item, for example `--constraint=ib`."""
    prologue: Names = ()
    """Shell commands of the job script that run before the worker."""
    environment: Variables = Field(default_factory=dict)
    """Variables for workers and trainers. No secrets: SLURM stores the job script."""
    python: str | None = None
    """Interpreter of the workers, on a disk that the nodes share; None for the kernel's."""
    interface: str | None = None
    """Network interface of the workers and of the scheduler, for example `ib0`; None to use the
    route between them."""
    head_host: str | None = None
    """Address of this machine at which nodes reach its scheduler; None to detect it."""
    local_directory: str | None = None
    """Folder on the nodes for Dask's temporary files; None for one in ``folder``."""
    folder: str = "~/.local/state/etrain/slurm"
    """Folder on a disk that this machine and the nodes share, for certificates and logs."""
    log_folder: str | None = None
    """Folder for the output of jobs; None for one in ``folder``, removed with the cluster."""
    workers: WorkersSpec = WorkersSpec()
    notice: Annotated[Duration, Field(ge=1)] = 120.0
    """Time before the end of a job at which its worker is notified (`sbatch --signal`)."""
    kill_wait: Annotated[Duration, Field(ge=1)] = 30.0
    """Time between SIGTERM and SIGKILL; KillWait in slurm.conf."""
    replace_ahead: Duration | None = None
    """Time before the end of a job at which its replacement is submitted; None for a quarter of
    ``walltime``, at most 15 min."""
    price: Usd | None = None
    """US dollars an hour for a job; without it, no costs are shown."""
    lifetime: LifetimeSpec = LifetimeSpec()
    tick: Duration = 10.0
    """Interval at which `squeue` is called."""

    @property
    def ahead_s(self) -> float:
        """Seconds before the end of a job at which its replacement is submitted."""
        if self.replace_ahead is not None:
            return self.replace_ahead
        return max(self.notice, min(MAX_AHEAD_S, self.walltime / 4))

    @property
    def device(self) -> str:
        """Torch device of the workers."""
        return "cuda:0" if self.gpus else "cpu"

    @property
    def directives(self) -> list[str]:
        """Options of sbatch in addition to those that dask-jobqueue writes."""
        gpu = f"gpu:{self.gpu_type}:1" if self.gpu_type else "gpu:1"
        return [
            *([f"--gres={gpu}"] if self.gpus else []),
            # B: the batch shell, which the worker replaces by `exec`.
            f"--signal=B:USR1@{round(self.notice)}",
            # The pool submits a new job instead, whose worker has a new name.
            "--no-requeue",
            *self.job_extra_directives,
        ]

    @field_validator("gpus", mode="after")
    @classmethod
    def _at_most_one(cls, value: int) -> int:
        if value > 1:
            raise fault(
                f"{{key}} must be 0 or 1, not {value}: each job is one worker, which uses one GPU",
                hint=f"write gpus: 1, and workers: {{max: {value}}} for {value} GPUs",
            )
        return value

    @field_validator("memory", mode="after")
    @classmethod
    def _like_a_size(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"\s*\d+(\.\d+)?\s*[KMGT](i?B)?\s*", value):
            raise fault(f"{{key}} '{value}' is not a size", hint="write for example 32 GiB")
        return value

    @field_validator("queue", "account", "gpu_type", "interface", mode="after")
    @classmethod
    def _one_word(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[\w.,:@%+-]+", value):
            raise fault(f"{{key}} '{value}' must be one word")
        return value

    @field_validator("python", mode="after")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        if value is not None and (not value.startswith("/") or "\n" in value):
            raise fault(
                f"{{key}} '{value}' is not the path of an interpreter",
                hint="write for example /shared/env/bin/python",
            )
        return value

    @field_validator("job_extra_directives", mode="after")
    @classmethod
    def _not_ours(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for directive in value:
            # Options are `--name=value`, `--name value`, `-nvalue` or `-n value`.
            name = re.split(r"[= ]", directive)[0]
            name = LONG_NAMES.get(name, name if name.startswith("--") else name[:2])
            if not re.fullmatch(r"--?[A-Za-z][^\n]*", directive):
                raise fault(
                    f"{{key}}: '{directive}' is not an option of sbatch",
                    hint="write for example --constraint=ib, without #SBATCH",
                )
            if name in OWN_DIRECTIVES:
                raise fault(
                    f"{{key}}: the pool sets {directive.split('=')[0]} itself",
                    hint=OWN_DIRECTIVES[name],
                )
        return value

    @field_validator("prologue", mode="after")
    @classmethod
    def _lines(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for line in value:
            if "\n" in line:
                raise fault("{key} must have one command per item", hint="write a list of lines")
        return value

    @field_validator("environment", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        for name in value if isinstance(value, Mapping) else ():
            if not re.fullmatch(r"[A-Za-z_]\w*", str(name)):
                raise fault(f"{{key}}: '{name}' is not the name of a variable")
        return value

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        # Otherwise, jobs would be replaced as soon as they start.
        for key, value in (("notice", self.notice), ("replace_ahead", self.ahead_s)):
            if value > self.walltime / 2:
                raise fault(
                    f"{key} of {value:g} s is more than half of walltime ({self.walltime:g} s)",
                    hint=f"write walltime: {2 * value:g} s or more, or a shorter {key}",
                    path=(key if getattr(self, key) is not None else "walltime",),
                )
        if self.gpu_type and not self.gpus:
            raise fault("gpu_type is set, but gpus is 0", hint="write gpus: 1", path=("gpu_type",))
        return self
