"""The run store in a bucket: records and bundles there, and a copy of what is used here."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etrain_jupyter.bundle.files import has_digest
from etrain_jupyter.errors import RunStoreError
from etrain_jupyter.log.events import TERMINAL_STATUSES
from etrain_jupyter.notebook.job.run_store import (
    BUNDLE_FILE,
    MOST_RECORD_BYTES,
    RECORD_FILE,
    JobRecord,
    JobSummary,
    Listing,
    RunStore,
    new_job_id,
    record_from,
)
from etrain_jupyter.storage.bucket_log.chain import Chain
from etrain_jupyter.storage.bucket_log.mirror import SILENT_S
from etrain_jupyter.storage.bucket_log.objects import RunObjects
from etrain_jupyter.storage.bucket_log.place import check_root, spool_of_root
from etrain_jupyter.storage.bucket_log.uploads import ALIVE
from etrain_jupyter.untrusted import is_job_id

if TYPE_CHECKING:
    from etrain_jupyter.bundle.capture import Bundle

FETCH_THREADS = 8


class S3RunStore(RunStore):
    """The jobs below ``s3://bucket/prefix``; nothing is asked before the first method needs it.

    All methods raise ``RunStoreError`` besides what those of a folder raise.

    Raises:
        ConfigError: If it is no such URL.
    """

    def __init__(self, url: str) -> None:
        self.url = check_root(url)
        super().__init__(spool_of_root(self.url))
        self._objects = RunObjects(self.url)

    def __str__(self) -> str:
        return self.url

    def check_writable(self) -> None:
        """Write to the bucket, and see that it lets nobody write twice."""
        self._objects.check_writable()

    def create(
        self, record: Mapping[str, Any], *, bundle: Bundle | bytes = b"", job_id: str = ""
    ) -> JobRecord:
        """Make a job: its folder here, then its bundle there, and ``job.json`` last."""
        job_id = job_id or new_job_id(str(record["name"]))
        values = {**record, "place": f"{self.url}/{job_id}"}
        made = super().create(values, bundle=bundle, job_id=job_id)
        try:
            self._objects.put_file(f"{job_id}/{BUNDLE_FILE}", made.bundle_path)
            data = _json_of(made)
            key = f"{job_id}/{RECORD_FILE}"
            if not self._objects.put_if_absent(key, data) and self._objects.get(key) != data:
                raise FileExistsError(f"there is a job {job_id} in {self} already")
        except BaseException:
            shutil.rmtree(made.folder, ignore_errors=True)
            raise
        return made

    def rewrite(
        self,
        record: JobRecord,
        *,
        bundle: Bundle | bytes | None = None,
        is_signed: bool = True,
    ) -> JobRecord:
        """Replace ``job.json`` there and here; another bundle goes there before it."""
        record.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        written = super().rewrite(record, bundle=bundle, is_signed=is_signed)
        if bundle is not None and written.bundle_file != record.bundle_file:
            self._objects.put_file(f"{record.job_id}/{written.bundle_file}", written.bundle_path)
        self._objects.put(f"{record.job_id}/{RECORD_FILE}", _json_of(written))
        return written

    def discard(self, record: JobRecord) -> None:
        """Remove what ``create`` made; a job that has a log is kept."""
        if Chain(self._job(record)).list_pieces(0):
            return
        for name in (RECORD_FILE, record.bundle_file, ALIVE):
            self._objects.delete(f"{record.job_id}/{name}")
        super().discard(record)

    def scan(self) -> Listing:
        """Return every job, the newest first, and what looks like one and cannot be read."""
        found = Listing()
        names = self._objects.folders()
        with ThreadPoolExecutor(FETCH_THREADS, thread_name_prefix="etrain-runs") as pool:
            for name, record in zip(names, pool.map(self._read_record, names), strict=True):
                if isinstance(record, ValueError):
                    found.problems[name] = str(record)
                elif record is not None:
                    found.jobs.append(record)
        return found.sorted()

    def _read_record(self, name: str) -> JobRecord | ValueError | None:
        if not is_job_id(name):
            return None  # a name of a folder of ours on this machine, too: see `JobRecord.folder`
        key = f"{name}/{RECORD_FILE}"
        data = self._objects.get(key, most_bytes=MOST_RECORD_BYTES + 1)
        if data is None:
            return None
        try:
            return record_from(data, self.root / name, f"{self.url}/{name}")
        except ValueError as exc:
            return exc

    def fetch_bundle(self, record: JobRecord) -> Path:
        """Return the file with the notebook's objects; a copy of them is kept here."""
        path = record.bundle_path
        if has_digest(path, record.bundle_digest):
            return path
        key = f"{record.job_id}/{record.bundle_file}"
        record.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        hidden = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            if not self._objects.get_file(key, hidden):
                raise FileNotFoundError(f"{self}/{key} is not there")
            hidden.replace(path)
        finally:
            hidden.unlink(missing_ok=True)
        return path

    def remove_bundle(self, record: JobRecord) -> None:
        """Remove a bundle that no record names any more, there and here."""
        self._objects.delete(f"{record.job_id}/{record.bundle_file}")
        super().remove_bundle(record)

    def check_takeable(self, record: JobRecord) -> None:
        """Refuse a job with which nobody here could go on."""
        self.check_writable()
        record.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        super().check_takeable(record)

    def standing(self, record: JobRecord) -> JobSummary:
        """Return how a job stands, as its coordinator has told the bucket."""
        try:
            found = self._job(record).get_aged(ALIVE)
        except RunStoreError:
            return JobSummary(status="unknown")
        told, age_s = found or ({}, SILENT_S + 1)
        status = str(told.get("status", "submitted"))[:40]
        return JobSummary(
            status=status,
            step=_number_in(told, "step"),
            total_steps=_number_in(told, "total_steps"),
            world_size=_number_in(told, "world_size"),
            is_gone=status not in TERMINAL_STATUSES and age_s > SILENT_S,
        )

    def _job(self, record: JobRecord) -> RunObjects:
        return RunObjects(f"{self.url}/{record.job_id}")


def _number_in(told: Mapping[str, Any], name: str) -> int:
    """Return a count that a node may have written; 0 for what is none."""
    value = told.get(name)
    return value if isinstance(value, int) and 0 <= value < 1 << 62 else 0


def _json_of(record: JobRecord) -> bytes:
    return json.dumps(record.to_dict(), indent=1).encode()
