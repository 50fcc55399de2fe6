"""The jobs that this process holds: one ``TrainingJob`` each, submitted here or attached to."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etrain_jupyter import __version__
from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.errors import PoolError, RunStoreError
from etrain_jupyter.notebook.job.handover import bundle_facts, hand_over
from etrain_jupyter.notebook.job.job_record import JobRecord, safe_name
from etrain_jupyter.notebook.job.link import JobLink, open_link
from etrain_jupyter.notebook.job.run_store import ROOT_VARIABLE, RunStore, absolute_paths
from etrain_jupyter.notebook.job.runs import open_runs
from etrain_jupyter.notebook.job.store_link import StoreLink
from etrain_jupyter.notebook.job.training_job import TrainingJob
from etrain_jupyter.notebook.job.whereabouts import find_cluster
from etrain_jupyter.pools.own_clusters import note_scheduler
from etrain_jupyter.wire.versions import read_fingerprint

if TYPE_CHECKING:
    from etrain_jupyter.bundle.capture import Bundle
    from etrain_jupyter.process.address import SchedulerAddress

_held: dict[Path, TrainingJob] = {}
"""By folder."""
_used: dict[Path, JobRecord] = {}
"""Those that somebody submitted or asked for here; the one used last is the last entry."""


def submit_job(
    config: TrainConfig,
    bundle: Bundle,
    *,
    address: SchedulerAddress,
    store: RunStore | None = None,
    cell: str = "",
    faults: Sequence[Mapping[str, Any]] = (),
) -> TrainingJob:
    """Make the job's folder, hand the job to the cluster's coordinator, and hold it.

    ``faults`` are faults on purpose, in the wire form of a ``FaultPlan``.

    Raises:
        RunStoreError: If the folder cannot be written.
        PoolError: If the coordinator refuses; then no folder is left.
        JobLostError: If the cluster went away; the folder stays, since the job may have begun.
    """
    store = store or open_runs()
    try:
        record = store.create(
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
    link = open_link(address)
    order = {
        "job_id": record.job_id,
        "name": record.name,
        "run_dir": str(record.folder),
        "config": record.config,
        **bundle_facts(record),
        "pool": record.pool,
        "cwd": os.getcwd(),
        "min_workers": config.workers.min,
        "max_workers": config.max_workers(),
        "fingerprint": read_fingerprint(),
    }
    if record.place:
        order["place"] = record.place
    if faults:
        order["faults"] = [dict(fault) for fault in faults]
    try:
        hand_over(link, order, record.bundle_path)
    except PoolError:
        store.discard(record)
        raise
    note_scheduler(address)
    return _remember(TrainingJob(record, link))


def attach(name_or_id: str | None = None, *, store: RunStore | None = None) -> TrainingJob:
    """Return the job of that name, id or start of an id; by default the one used last here.

    Where none was used yet, that is the newest of the run store.

    Raises:
        JobNotFoundError: If there is none; the message names the nearest.
    """
    store = store or open_runs()
    if name_or_id is None:
        used = [record for folder, record in _used.items() if folder.parent == store.root]
        record = used[-1] if used else store.latest()
    else:
        record = store.find(name_or_id)
    return _remember(hold(record))


def jobs() -> list[TrainingJob]:
    """Return every job of the run store, the newest first."""
    return [hold(record) for record in open_runs().records()]


def hold(record: JobRecord) -> TrainingJob:
    """Return the one ``TrainingJob`` of a record; a job that was lost is looked for again.

    One that was resumed elsewhere goes on here too.
    """
    job = _held.get(record.folder)
    if job is None:
        job = _held[record.folder] = TrainingJob(record, link_of(record))
    elif job.lost or job.record.cluster != record.cluster or job.has_gone_on():
        job.follow_again(record, link_of(record))
    return job


def link_of(record: JobRecord) -> JobLink | None:
    """Return what tells a job's events: its cluster if it is this user's, else the run store.

    None if the cluster is known to have ended.
    """
    known = find_cluster(record.cluster, record.host)
    if known.has_ended:
        return None
    return StoreLink(record, why=known.why) if known.address is None else open_link(known.address)


def name_of_model(expression: str) -> str:
    """Return a name for a job from its model's expression.

    >>> name_of_model("models.resnet:ResNet(18)")
    'resnet'
    """
    head = re.match(r"[\w.:]*", expression)
    words = re.split(r"[.:]", head[0]) if head else [""]
    return safe_name(words[-1].lower())


def _remember(job: TrainingJob) -> TrainingJob:
    folder = job.record.folder
    _used.pop(folder, None)
    _held[folder], _used[folder] = job, job.record
    return job
