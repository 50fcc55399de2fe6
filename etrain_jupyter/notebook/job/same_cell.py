"""Find the jobs that a cell started earlier and that are still training on the same cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from etrain_jupyter.errors import EtrainError
from etrain_jupyter.log.events import TERMINAL_STATUSES
from etrain_jupyter.notebook.job.job_record import RunRecord
from etrain_jupyter.notebook.job.run_store import RunStore
from etrain_jupyter.pools.rpc import ask
from etrain_jupyter.process.address import SchedulerAddress
from etrain_jupyter.untrusted import plain_line
from etrain_jupyter.wire.requests import ListJobs

LIST_S = 5.0
"""Timeout for listing the jobs, in seconds; short, because a new job does not need the list."""
MAX_NAMED = 3
"""Maximum number of earlier jobs to name; a longer list would hide the newest one."""
_STATUSES = {"running": "still training", "paused": "paused", "waiting": "waiting for workers"}


@dataclass(frozen=True, kw_only=True)
class EarlierJob:
    """A job of the same cell that has not ended."""

    record: RunRecord
    status: str
    step: int = 0
    total_steps: int = 0
    """0 if not known yet."""


def warn_of_earlier_jobs(
    record: RunRecord, store: RunStore, address: SchedulerAddress
) -> list[str]:
    """Return warnings if the cell of a new job has started jobs that still use its cluster.

    The jobs are those of the cluster whose records are in the same run store. If the scheduler or
    the run store does not respond, the list is empty, since the new job trains regardless.
    """
    try:
        earlier = find_earlier_jobs(record, store, address)
    except EtrainError:
        return []
    return explain(record, earlier)


def find_earlier_jobs(
    record: RunRecord, store: RunStore, address: SchedulerAddress
) -> list[EarlierJob]:
    """Return the other jobs of the same cell that the cluster still has, newest first.

    Raises:
        PoolError: If the scheduler does not respond.
        RunStoreError: If the run store is a bucket and cannot be read.
    """
    found = []
    for row in ask(address, ListJobs(), timeout_s=LIST_S).jobs:
        if row["status"] in TERMINAL_STATUSES or row["job_id"] == record.job_id:
            continue
        other = store.read(row["job_id"])
        if other is not None and is_same_cell(other, record):
            found.append(
                EarlierJob(
                    record=other,
                    status=row["status"],
                    step=row["step"],
                    total_steps=row["total_steps"],
                )
            )
    return sorted(found, key=lambda job: job.record.created, reverse=True)


def is_same_cell(one: RunRecord, other: RunRecord) -> bool:
    """Return True if two jobs were started by the same cell, or by the same call from Python.

    Cells are equal if their texts are, apart from comments and blank lines. A cell that is run
    again after a change in another cell is therefore still the same. A job from Python has no text,
    so its configuration and the objects that it was called with must be equal.
    """
    if one.cell or other.cell:
        return normalize(one.cell) == normalize(other.cell)
    return _keys_of(one) == _keys_of(other)


def normalize(cell: str) -> str:
    r"""Return the text of a cell without comment lines, blank lines and spaces at line ends.

    >>> normalize("model: Net()   \n\n# a note\nloss: f\n")
    'model: Net()\nloss: f'
    """
    lines = (line.rstrip() for line in cell.splitlines())
    return "\n".join(line for line in lines if line and not line.lstrip().startswith("#"))


def _keys_of(record: RunRecord) -> tuple[object, str]:
    # The name does not matter: the same call may name each of its jobs.
    return {**record.config, "name": None}, record.bundle_digest


def explain(record: RunRecord, earlier: Sequence[EarlierJob]) -> list[str]:
    """Return one warning for each earlier job, newest first, for at most ``MAX_NAMED`` of them."""
    origin = "cell" if record.cell else "call"
    warnings = []
    for job in earlier[:MAX_NAMED]:
        job_id, pool = job.record.job_id, plain_line(job.record.pool, 60)
        status = _STATUSES.get(job.status, "about to start")
        total = f" of {job.total_steps:,}" if job.total_steps else ""
        warnings.append(
            f"job {job_id}, started from this same {origin}, is {status} on pool "
            f"{pool} (step {job.step:,}{total}), and the new job {record.job_id} shares the pool's "
            f"workers with it. To stop the earlier job with a checkpoint, type %etrain stop "
            f"{job_id}; to follow it, %etrain attach {job_id}."
        )
    if len(earlier) > MAX_NAMED:
        rest = len(earlier) - MAX_NAMED
        warnings.append(f"{rest} more of this {origin} have not ended: %etrain ls lists them.")
    return warnings
