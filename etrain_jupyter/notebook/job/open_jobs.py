"""The jobs that are open in this process: one ``TrainingJob`` each, submitted or attached."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etrain_jupyter import __version__
from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.errors import ConfigError, PoolError, RunStoreError
from etrain_jupyter.insight.comparison import Comparison, compare_jobs
from etrain_jupyter.insight.diagnosis.report import Diagnosis, diagnose_job
from etrain_jupyter.notebook.job.cluster_location import find_cluster
from etrain_jupyter.notebook.job.handover import hand_over, spec_of
from etrain_jupyter.notebook.job.job_record import RunRecord, safe_name
from etrain_jupyter.notebook.job.link import JobLink, open_link
from etrain_jupyter.notebook.job.run_store import ROOT_VARIABLE, RunStore, absolute_paths
from etrain_jupyter.notebook.job.runs import open_runs
from etrain_jupyter.notebook.job.store_link import StoreLink
from etrain_jupyter.notebook.job.training_job import TrainingJob
from etrain_jupyter.pools.own_clusters import note_scheduler
from etrain_jupyter.process.processes import num_usable_cores

if TYPE_CHECKING:
    from etrain_jupyter.bundle.capture import Bundle
    from etrain_jupyter.process.address import SchedulerAddress

MAX_COMPARED = 8
"""Maximum number of jobs to compare if none are named."""

_held: dict[Path, TrainingJob] = {}
"""Open jobs by folder."""
_used: dict[Path, RunRecord] = {}
"""Jobs submitted or attached to in this process; the last entry is the most recent one."""


def submit_job(
    config: TrainConfig,
    bundle: Bundle,
    *,
    address: SchedulerAddress,
    store: RunStore | None = None,
    cell: str = "",
    faults: Sequence[Mapping[str, Any]] = (),
    pool_s: float = 0.0,
    notes: Sequence[str] = (),
) -> TrainingJob:
    """Create the job's folder, submit the job to the cluster's coordinator and follow it.

    ``faults`` are the faults to inject, in the wire form of a ``FaultPlan``. The log records
    ``pool_s``, the time until the scheduler responded, and ``notes``, the texts that were printed
    about the cell.

    Raises:
        RunStoreError: If the folder cannot be written.
        PoolError: If the coordinator refuses; the folder is removed.
        JobLostError: If the cluster disappeared or did not respond; the folder is kept, since the
            job may have started.
    """
    store = store or open_runs()
    record = _create_record(config, bundle, address=address, store=store, cell=cell)
    link = open_link(address)
    try:
        spec = spec_of(record, config, cwd=os.getcwd())
        spec |= {"pool_s": pool_s, "notes": list(notes)}
        if faults:
            spec["faults"] = [dict(fault) for fault in faults]
        hand_over(link, spec, record.bundle_path)
    except PoolError:
        # The job was refused and did not start, so keep nothing. A JobLostError is not caught,
        # because the job may have started.
        store.discard(record)
        raise
    note_scheduler(address)
    return _remember(TrainingJob(record, link))


def _create_record(
    config: TrainConfig, bundle: Bundle, *, address: SchedulerAddress, store: RunStore, cell: str
) -> RunRecord:
    """Create the job's folder with its record and its bundle."""
    try:
        return store.create(
            {
                "name": safe_name(config.name or name_of_model(config.model)),
                "created": time.time(),
                "pool": config.pool,
                "cluster": address.to_dict(),
                "config": absolute_paths(config.model_dump(mode="json")),
                "bundle_digest": bundle.digest,
                "cell": cell,
                "version": __version__,
                "cwd": os.getcwd(),
                "host": platform.node(),
            },
            bundle=bundle,
        )
    except OSError as exc:
        raise RunStoreError(
            f"the job's folder in {store.root} cannot be written: {exc.strerror or exc}. Nothing "
            f"was submitted. Free space there, or set {ROOT_VARIABLE} to a folder elsewhere and "
            "restart the kernel."
        ) from exc


def attach(name_or_id: str | None = None, *, store: RunStore | None = None) -> TrainingJob:
    """Return a job by name, id or prefix of an id; by default the most recently used one.

    If no job was used in this process, the default is the newest job in the run store.

    Raises:
        JobNotFoundError: If no job matches; the message lists the closest names.
    """
    return _remember(hold(_find_record(name_or_id, store or open_runs())))


def _find_record(name_or_id: str | None, store: RunStore) -> RunRecord:
    if name_or_id is not None:
        return store.find(name_or_id)
    # ETRAIN_RUNS may have changed since a job was last used, so ignore jobs in other run stores.
    used = [record for folder, record in _used.items() if folder.parent == store.root]
    return used[-1] if used else store.latest()


def jobs() -> list[TrainingJob]:
    """Return every job of the run store, newest first."""
    return [hold(record) for record in open_runs().records()]


def compare(
    jobs: Iterable[TrainingJob | str] | TrainingJob | str | None = None,
    *,
    store: RunStore | None = None,
) -> Comparison:
    """Compare jobs: throughput, scaling efficiency, metrics, time and cost in a table, and curves.

    Args:
        jobs: Jobs, or their names, ids or prefixes of ids; by default the newest jobs with the name
            of the latest job, at most ``MAX_COMPARED``.
        store: The run store; by default that of the working folder.

    Returns:
        A comparison that a notebook displays as HTML. It has ``to_frame()``, ``plot()``,
        ``to_html()`` and ``write_html(path)``; ``str`` returns the table as text.

    Raises:
        ConfigError: If ``jobs`` is empty or contains a value of another type.
        JobNotFoundError: If no job matches a name; the message lists the closest names.
    """
    store = store or open_runs()
    if jobs is None:
        return compare_jobs(map(hold, newest_runs(store)))
    # A string is also an iterable of strings, which would be one-letter names.
    named = [jobs] if isinstance(jobs, str) or not isinstance(jobs, Iterable) else jobs
    usage = "compare([job, 'digits-1a2b3c4d'])"
    return compare_jobs([_find_or_return(job, store, usage) for job in named])


def diagnose(
    job: TrainingJob | str | None = None,
    *,
    store: RunStore | None = None,
) -> Diagnosis:
    """Find the cause that slows a job down, with its confidence, remedy and predicted gain.

    The cause follows from the times in the log, so the job may be running or ended.

    Args:
        job: A job, or its name, id or a prefix of its id; by default the most recently used one.
        store: The run store; by default that of the working folder.

    Returns:
        A diagnosis that a notebook displays as HTML. It has ``verdict``, ``remedy``,
        ``to_frame()`` and ``to_html()``; ``str`` returns it as text.

    Raises:
        ConfigError: If the job has no steps, or no worker has reported its times yet.
        JobNotFoundError: If no job matches the name; the message lists the closest names.
    """
    found = find_or_latest(job, store, "diagnose(job)")
    is_running = found.status == "running"
    return diagnose_job(found, is_running=is_running, cores=num_usable_cores())


def newest_runs(store: RunStore) -> list[RunRecord]:
    """Return the newest jobs with the name of the latest job, oldest first.

    Raises:
        JobNotFoundError: If the store is empty.
    """
    name = store.latest().name
    same = [record for record in store.records() if record.name == name]
    return same[MAX_COMPARED - 1 :: -1]


def _find_or_return(job: object, store: RunStore, usage: str) -> TrainingJob:
    if isinstance(job, TrainingJob):
        return job
    if isinstance(job, str):
        # Do not use `attach`, because a question about jobs must not change the most recently used
        # job, which is the job that `%etrain stop` without a name stops.
        return hold(store.find(job))
    raise ConfigError(
        f"{usage.partition('(')[0]}() received {type(job).__name__!r} instead of a job or its name",
        hint=f"etrain_jupyter.{usage}",
    )


def find_or_latest(job: object, store: RunStore | None, usage: str) -> TrainingJob:
    """Return a job, or the most recently used one for None."""
    store = store or open_runs()
    if job is None:
        return hold(_find_record(None, store))
    return _find_or_return(job, store, usage)


def hold(record: RunRecord) -> TrainingJob:
    """Return the ``TrainingJob`` of a record, creating it if necessary.

    A job that was lost, or was resumed elsewhere, is followed again.
    """
    # Keep one object per job, so that all variables and the dashboard share one feed.
    job = _held.get(record.folder)
    if job is None:
        job = _held[record.folder] = TrainingJob(record, link_of(record))
    # Another kernel may have resumed the job. In that case, either the record names another cluster
    # or, if the cluster is the same, the log continues after the end that this feed has seen.
    elif job.lost or job.record.cluster != record.cluster or job.has_continued():
        job.follow_again(record, link_of(record))
    return job


def link_of(record: RunRecord) -> JobLink | None:
    """Return the source of a job's events: this user's cluster, otherwise the run store.

    None if the cluster is known to have ended.
    """
    known = find_cluster(record.cluster, record.host)
    if known.has_ended:
        return None
    return StoreLink(record, why=known.why) if known.address is None else open_link(known.address)


def name_of_model(expression: str) -> str:
    """Derive a job name from a model expression.

    >>> name_of_model("models.resnet:ResNet(18)")
    'resnet'
    """
    head = re.match(r"[\w.:]*", expression)
    words = re.split(r"[.:]", head[0]) if head else [""]
    return safe_name(words[-1].lower())


def _remember(job: TrainingJob) -> TrainingJob:
    folder = job.record.folder
    _used.pop(folder, None)  # so that the assignment below moves it to the end
    _held[folder], _used[folder] = job, job.record
    return job
