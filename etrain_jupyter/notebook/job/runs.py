"""Find the run store for a folder, a URL or a job, and the run store in a bucket."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from etrain_jupyter.bundle.restore import has_digest
from etrain_jupyter.errors import ConfigError, RunStoreError
from etrain_jupyter.log.events import TERMINAL_STATUSES
from etrain_jupyter.notebook.job.job_record import (
    MAX_RECORD_BYTES,
    RECORD_FILE,
    RunRecord,
    record_from,
)
from etrain_jupyter.notebook.job.run_store import (
    ROOT_VARIABLE,
    JobSummary,
    Listing,
    RunStore,
    json_of,
)
from etrain_jupyter.process.files import draft_of
from etrain_jupyter.storage.bucket_log.chain import Chain
from etrain_jupyter.storage.bucket_log.locations import check_root, is_remote, spool_of_root
from etrain_jupyter.storage.bucket_log.mirror import SILENT_S
from etrain_jupyter.storage.bucket_log.objects import RunObjects
from etrain_jupyter.storage.bucket_log.uploads import ALIVE
from etrain_jupyter.untrusted import is_job_id

FETCH_THREADS = 8


def open_runs(root: str | os.PathLike[str] | None = None) -> RunStore:
    """Return the run store at a folder or a URL; by default the one in ``ETRAIN_RUNS``.

    Raises:
        ConfigError: If the URL is not that of a bucket.
    """
    root = root or os.environ.get(ROOT_VARIABLE) or None
    if is_remote(root):
        return S3RunStore(str(root))
    if isinstance(root, str) and "://" in root:
        raise ConfigError(
            f"the run store {root!r} is neither a folder nor a bucket",
            hint=f"set {ROOT_VARIABLE} to s3://bucket/prefix",
        )
    return RunStore(root)


def store_of(record: RunRecord) -> RunStore:
    """Return the run store of a job."""
    return open_runs(record.place.rpartition("/")[0] if record.place else record.folder.parent)


class S3RunStore(RunStore):
    """The jobs below ``s3://bucket/prefix``; the first method call connects to the bucket.

    Records and bundles are in the bucket, with copies on this machine.

    All methods raise ``RunStoreError`` in addition to the errors of the base class.

    Raises:
        ConfigError: If the URL is invalid.
    """

    def __init__(self, url: str) -> None:
        self.url = check_root(url)
        super().__init__(spool_of_root(self.url))
        self._objects = RunObjects(self.url)

    def __str__(self) -> str:
        return self.url

    @property
    def is_remote(self) -> bool:
        """True: the jobs are in a bucket."""
        return True

    def check_writable(self) -> None:
        """Write to the bucket, and check that it supports conditional writes."""
        self._objects.check_writable()

    def place_of(self, job_id: str) -> str:
        """Return the URL of a job."""
        return f"{self.url}/{job_id}"

    def _publish(self, record: RunRecord, *, has_new_bundle: bool, is_new: bool) -> None:
        """Upload the bundle first and ``job.json`` last, so that every listed job is complete."""
        if has_new_bundle:
            self._objects.put_file(f"{record.job_id}/{record.bundle_file}", record.bundle_path)
        key, data = f"{record.job_id}/{RECORD_FILE}", json_of(record)
        if not is_new:
            self._objects.put(key, data)
        # A failed condition does not prove that the id is taken: if the response to the first
        # attempt was lost, the retry finds the object that this process has just written.
        elif not self._objects.put_if_absent(key, data) and self._objects.get(key) != data:
            raise FileExistsError(f"job {record.job_id} already exists in {self}")

    def discard(self, record: RunRecord) -> None:
        """Remove a job that no cluster accepted; a job with a log is kept."""
        if Chain(self._job(record)).list_pieces(0):
            return
        # Remove the record first. Without it, no machine lists the job, even if removing the rest
        # fails.
        for name in (RECORD_FILE, record.bundle_file, ALIVE):
            self._objects.delete(f"{record.job_id}/{name}")
        super().discard(record)

    def scan(self) -> Listing:
        """Return all jobs, the newest first, and the folders with an invalid record."""
        found = Listing()
        names = self._objects.folders()
        # Each job takes one request. Sent one after the other, a hundred requests would take
        # seconds.
        with ThreadPoolExecutor(FETCH_THREADS, thread_name_prefix="etrain-runs") as pool:
            for name, record in zip(names, pool.map(self._read_record, names), strict=True):
                if isinstance(record, ValueError):
                    found.problems[name] = str(record)
                elif record is not None:
                    found.jobs.append(record)
        return found.sorted()

    def read(self, job_id: str) -> RunRecord | None:
        """Return the record of the job with an id; None if the bucket has no valid one."""
        record = self._read_record(job_id)
        return None if isinstance(record, ValueError) else record

    def _read_record(self, name: str) -> RunRecord | ValueError | None:
        if not is_job_id(name):
            return None  # the name becomes that of a local folder, so it must not be `..`
        key = f"{name}/{RECORD_FILE}"
        data = self._objects.get(key, most_bytes=MAX_RECORD_BYTES + 1)
        if data is None:  # a job that is being created or discarded, or another tool's folder
            return None
        try:
            return record_from(data, self.root / name, f"{self.url}/{name}")
        except ValueError as exc:
            return exc

    def fetch_bundle(self, record: RunRecord) -> Path:
        """Return the path of a job's bundle, downloaded unless this machine has a copy."""
        path = record.bundle_path
        # The copy may be outdated if a cell on another machine has replaced the bundle since.
        if has_digest(path, record.bundle_digest):
            return path
        key = f"{record.job_id}/{record.bundle_file}"
        record.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with draft_of(path) as draft:
            if not self._objects.get_file(key, draft):
                raise FileNotFoundError(f"{self}/{key} does not exist")
        return path

    def remove_bundle(self, record: RunRecord) -> None:
        """Remove a bundle that no record refers to any more, in the bucket and here."""
        self._objects.delete(f"{record.job_id}/{record.bundle_file}")
        super().remove_bundle(record)

    def check_takeable(self, record: RunRecord) -> None:
        """Check that a job can be resumed from this machine."""
        self.check_writable()
        record.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        super().check_takeable(record)

    def summarize(self, record: RunRecord) -> JobSummary:
        """Return a job's status and progress as last written to the bucket by its coordinator."""
        try:
            found = self._job(record).get_aged(ALIVE)
        except RunStoreError:
            return JobSummary(status="unknown")
        # No heartbeat at all: the job was never accepted, or its coordinator is gone.
        values, age_s = found or ({}, SILENT_S + 1)
        status = str(values.get("status", "submitted"))[:40]
        return JobSummary(
            status=status,
            step=_number_in(values, "step"),
            total_steps=_number_in(values, "total_steps"),
            world_size=_number_in(values, "world_size"),
            is_gone=status not in TERMINAL_STATUSES and age_s > SILENT_S,
        )

    def _job(self, record: RunRecord) -> RunObjects:
        return RunObjects(f"{self.url}/{record.job_id}")


def _number_in(values: Mapping[str, Any], name: str) -> int:
    """Return a count. Return 0 if it is missing or invalid, since a node may have written it."""
    value = values.get(name)
    return value if isinstance(value, int) and 0 <= value < 1 << 62 else 0
