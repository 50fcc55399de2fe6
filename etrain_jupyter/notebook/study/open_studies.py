"""Submit a study, attach to it, and display it while it runs."""

from __future__ import annotations

import dataclasses
import os
import platform
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from etrain_jupyter import __version__
from etrain_jupyter.errors import PoolError, UntrustedJobError
from etrain_jupyter.notebook.job.handover import SUBMIT_S
from etrain_jupyter.notebook.job.job_record import RunRecord, safe_name
from etrain_jupyter.notebook.job.link import JobLink, NoAnswerError, open_link
from etrain_jupyter.notebook.job.open_jobs import link_of, name_of_model
from etrain_jupyter.notebook.job.run_store import RunStore, absolute_paths
from etrain_jupyter.notebook.job.runs import open_runs
from etrain_jupyter.notebook.study.plan import StudyPlan
from etrain_jupyter.notebook.study.records import (
    check_store,
    create_record,
    find_record,
    rewrite_record,
    scan_studies,
)
from etrain_jupyter.notebook.study.study import Study
from etrain_jupyter.pools.own_clusters import note_scheduler
from etrain_jupyter.pools.registry import get_pool
from etrain_jupyter.storage.study_folder import import_optuna
from etrain_jupyter.wire.requests import SubmitStudy
from etrain_jupyter.wire.versions import read_fingerprint

if TYPE_CHECKING:
    from etrain_jupyter.process.address import SchedulerAddress


def submit_study(plan: StudyPlan) -> Study:
    """Start the pool if necessary, and submit the study to its coordinator.

    Raises:
        ConfigError: If the run store is a bucket.
        EtrainError: If Optuna is not installed.
        PoolError: If the coordinator refuses; the study's folder is removed. A ``NoAnswerError``
            if it does not reply; the folder is kept, because the study may be running.
    """
    store = plan.trial.runs
    check_store(store)
    import_optuna()
    plan.print_warnings()
    address = plan.trial.start_pool()
    config, parsed = plan.trial.config, plan.parsed
    dump = absolute_paths(config.model_dump(mode="json"))
    fixed = {"log": dump["log"], "checkpoint": {"to": dump["checkpoint"]["to"]}}
    record = create_record(
        store,
        {
            "name": safe_name(config.name or name_of_model(config.model)),
            "created": time.time(),
            "pool": config.pool,
            "cluster": address.to_dict(),
            "config": {
                "search": parsed.search.model_dump(mode="json"),
                "space": {n: p.model_dump(mode="json") for n, p in parsed.space.items()},
                "num_trials": parsed.num_trials,
                "template": dataclasses.asdict(replace(parsed.template, fixed=fixed)),
            },
            "bundle_digest": plan.trial.bundle.digest,
            "cell": plan.trial.cell,
            "version": __version__,
            "cwd": os.getcwd(),
            "host": platform.node(),
        },
        plan.trial.bundle,
    )
    try:
        link = _submit(record, address)
    except PoolError as exc:
        # Without an answer, the scheduler may be running it, in this folder.
        if not isinstance(exc, NoAnswerError):
            store.discard(record)
        raise
    return Study(record, link, _resume_study)


def _submit(record: RunRecord, address: SchedulerAddress) -> JobLink:
    shared = ("pool", "cluster", "bundle_digest", "cell", "version", "cwd", "host")
    spec: dict[str, Any] = {
        "study_id": record.job_id,
        "name": record.name,
        "folder": str(record.folder),
        **record.config,
        "job": {
            "bundle_digest": record.bundle_digest,
            "bundle_size": record.bundle_path.stat().st_size,
            "pool": record.pool,
            "cwd": record.cwd,
            "fingerprint": read_fingerprint(),
        },
        "record": {name: getattr(record, name) for name in shared},
        "created": time.time(),
    }
    link = open_link(address)
    try:
        link.call(SubmitStudy(study=spec), timeout=SUBMIT_S)
    finally:
        link.release()  # the study is followed through its files
    note_scheduler(address)
    return link


def _resume_study(study: Study, num_trials: int) -> JobLink:
    record = study.record
    if not record.is_own:
        raise UntrustedJobError(
            f"study {record.job_id} was not submitted by this user on this machine, and resuming "
            "it would run its code. Nothing was done. Run its cell again instead."
        )
    address = get_pool(record.pool).up()
    config = record.config | {"num_trials": num_trials}
    resumed = rewrite_record(replace(record, cluster=address.to_dict(), config=config))
    try:
        link = _submit(resumed, address)
    except PoolError as exc:
        # Refused: another cluster may be running it. Without an answer, this one may be.
        if not isinstance(exc, NoAnswerError):
            rewrite_record(record)
        raise
    study.record = resumed
    return link


def attach_study(name_or_id: str | None = None, *, store: RunStore | None = None) -> Study:
    """Return a study by name, id or prefix of its id; by default the newest one.

    Raises:
        JobNotFoundError: If no study matches.
    """
    record = find_record(store or open_runs(), name_or_id)
    return Study(record, link_of(record), _resume_study)


def studies() -> list[Study]:
    """Return every study of the run store, newest first."""
    return [Study(r, link_of(r), _resume_study) for r in scan_studies(open_runs()).jobs]
