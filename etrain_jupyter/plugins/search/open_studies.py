"""Submit a study, attach to it, and list the studies of a run store."""

from __future__ import annotations

import dataclasses
import os
import platform
import secrets
import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from etrain_jupyter import __version__
from etrain_jupyter.bundle.capture import Bundle, write_bundle
from etrain_jupyter.errors import ConfigError, JobNotFoundError, PoolError, UntrustedJobError
from etrain_jupyter.notebook.job.handover import SUBMIT_S
from etrain_jupyter.notebook.job.job_record import (
    BUNDLE_FILE,
    MAX_RECORD_BYTES,
    RunRecord,
    record_from,
    safe_name,
)
from etrain_jupyter.notebook.job.link import JobLink, NoAnswerError, open_link
from etrain_jupyter.notebook.job.open_jobs import link_of, name_of_model
from etrain_jupyter.notebook.job.run_store import (
    Listing,
    RunStore,
    absolute_paths,
    json_of,
    new_job_id,
    replace_file,
)
from etrain_jupyter.notebook.job.runs import open_runs
from etrain_jupyter.plugins.search.folder import STUDY_FILE, import_optuna
from etrain_jupyter.plugins.search.plan import StudyPlan
from etrain_jupyter.plugins.search.spec import SubmitStudy
from etrain_jupyter.plugins.search.study import Study
from etrain_jupyter.pools.own_clusters import note_scheduler
from etrain_jupyter.pools.registry import get_pool
from etrain_jupyter.storage.ownership import sign
from etrain_jupyter.untrusted import read_regular
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
    if store.is_remote:
        raise ConfigError(
            f"a search cannot be stored in the bucket {store}: Optuna's storage is a file. Nothing "
            "was submitted",
            hint="set ETRAIN_RUNS to a folder and restart the kernel",
        )
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
        # Without an answer, the scheduler may be running the study in this folder.
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
        # After a refusal, another cluster may be running it; without an answer, this one may be.
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


# --- records in the run store ---


def create_record(store: RunStore, values: Mapping[str, Any], bundle: Bundle) -> RunRecord:
    """Create a study's folder with ``study.json`` and the bundle, atomically."""
    study_id = new_job_id(str(values["name"]))
    record = RunRecord(**{**values, "job_id": study_id, "folder": store.root / study_id})
    record = replace(record, signature=sign(record.to_dict()))
    hidden = store.root / f".{study_id}.{secrets.token_hex(4)}"
    hidden.mkdir(mode=0o700, parents=True)
    try:
        write_bundle(hidden / BUNDLE_FILE, bundle)
        replace_file(hidden / STUDY_FILE, json_of(record))
        hidden.rename(record.folder)
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise
    return record


def rewrite_record(record: RunRecord) -> RunRecord:
    """Replace a study's ``study.json``."""
    record = replace(record, signature=sign(record.to_dict()))
    replace_file(record.folder / STUDY_FILE, json_of(record))
    return record


def scan_studies(store: RunStore) -> Listing:
    """Return the studies of a run store, newest first, and the folders with an invalid record."""
    found = Listing()
    for path in store.root.glob(f"[!.]*/{STUDY_FILE}"):
        try:
            data = read_regular(path, most_bytes=MAX_RECORD_BYTES)
            found.jobs.append(record_from(data, path.parent))
        except (OSError, ValueError) as exc:
            found.problems[path.parent.name] = str(exc)
    return found.sorted()


def find_record(store: RunStore, name_or_id: str | None) -> RunRecord:
    """Return a study by id, name or prefix of its id; by default the newest.

    Raises:
        JobNotFoundError: If no study matches.
    """
    listing = scan_studies(store)
    records = listing.jobs
    if name_or_id is None:
        if records:
            return records[0]
        raise JobNotFoundError(f"{store} contains no study. Run a %%etrain search cell first")
    for record in records:
        if name_or_id in (record.job_id, record.name):
            return record
    begun = [record for record in records if name_or_id and record.job_id.startswith(name_or_id)]
    if len(begun) == 1:
        return begun[0]
    listing.refuse_damaged(name_or_id, str(store))
    known = ", ".join(record.job_id for record in records[:5]) or "none"
    raise JobNotFoundError(f"no study {name_or_id!r} in {store}; there are: {known}")
