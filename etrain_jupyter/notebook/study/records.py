"""Records of studies in a run store."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from etrain_jupyter.bundle.capture import Bundle
from etrain_jupyter.bundle.files import write_bundle
from etrain_jupyter.errors import ConfigError, JobNotFoundError
from etrain_jupyter.notebook.job.job_record import (
    BUNDLE_FILE,
    MAX_RECORD_BYTES,
    RunRecord,
    record_from,
)
from etrain_jupyter.notebook.job.run_store import (
    Listing,
    RunStore,
    json_of,
    new_job_id,
    replace_file,
)
from etrain_jupyter.storage.ownership import sign
from etrain_jupyter.storage.study_folder import STUDY_FILE
from etrain_jupyter.untrusted import read_regular


def check_store(store: RunStore) -> None:
    """Check that studies can be kept in a run store.

    Raises:
        ConfigError: If it is a bucket.
    """
    if store.is_remote:
        raise ConfigError(
            f"a search cannot be stored in the bucket {store}: Optuna's storage is a file. Nothing "
            "was submitted",
            hint="set ETRAIN_RUNS to a folder and restart the kernel",
        )


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
