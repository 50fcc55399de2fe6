"""The run store: one folder per job, independent of kernels, clusters and notebooks.

::

    <root>/<job_id>/job.json        the submitted configuration and the job's last cluster
                    bundle          the notebook's objects, by value
                    events.jsonl    the durable log, written by one coordinator at a time
                    events.segments/   its finished parts in columns; may be deleted
                    checkpoints/    with manifests/

A job's folder is created under a hidden name and then renamed, so that readers find only complete
jobs. Only its owner can read it (mode 0700), because the bundle contains the notebook's objects.
"""

from __future__ import annotations

import difflib
import json
import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from etrain_jupyter.bundle.capture import Bundle, write_bundle
from etrain_jupyter.bundle.restore import has_digest
from etrain_jupyter.display.numbers import counted
from etrain_jupyter.errors import EtrainError, JobNotFoundError
from etrain_jupyter.notebook.job.cluster_location import find_cluster
from etrain_jupyter.notebook.job.history import peek_log
from etrain_jupyter.notebook.job.job_record import (
    BUNDLE_FILE,
    RECORD_FILE,
    RunRecord,
    read_record,
    safe_name,
)
from etrain_jupyter.process.files import draft_of
from etrain_jupyter.storage.ownership import sign
from etrain_jupyter.untrusted import check_job_id, is_job_id, open_regular, plain_line

ROOT_VARIABLE = "ETRAIN_RUNS"
DEFAULT_ROOT = "etrain-runs"


@dataclass(frozen=True, kw_only=True)
class JobSummary:
    """A job's row in a list of jobs, obtained without contacting its cluster."""

    status: str
    step: int = 0
    total_steps: int = 0
    world_size: int = 0
    is_gone: bool = False
    """True if the job's cluster is known to have ended before the job did."""
    last_seen_at: float | None = None
    """Time of the coordinator's last write, in seconds since the epoch. None if the coordinator is
    known to be alive, or if the job or its cluster has ended."""


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The contents of a run store."""

    jobs: list[RunRecord] = field(default_factory=list)
    """The jobs, newest first."""
    problems: dict[str, str] = field(default_factory=dict)
    """Folders with an invalid record: name -> reason."""

    def sorted(self) -> Listing:
        """Return the listing with sorted jobs and problems."""
        jobs = sorted(self.jobs, key=lambda record: (record.created, record.job_id), reverse=True)
        return Listing(jobs=jobs, problems=dict(sorted(self.problems.items())))

    def refuse_damaged(self, name_or_id: str, where: str) -> None:
        """Raise an error with the reason if a name or id belongs to an invalid record.

        Raises:
            JobNotFoundError: If the name or id belongs to one.
        """
        for name, why in self.problems.items():
            if name_or_id and name.startswith(name_or_id):
                raise JobNotFoundError(
                    f"{plain_line(name, 60)} in {where} cannot be opened: {why}."
                )


def default_root(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the default run store: ``ETRAIN_RUNS``, or ``etrain-runs`` in the current folder."""
    return Path(environment.get(ROOT_VARIABLE) or DEFAULT_ROOT).expanduser().absolute()


def new_job_id(name: str) -> str:
    """Return a unique id: the name followed by eight hexadecimal digits."""
    return f"{safe_name(name)}-{secrets.token_hex(4)}"


class RunStore:
    """The jobs in one folder. Stateless: every method reads the disk.

    ``runs.open_runs`` returns this class for a folder, and ``S3RunStore`` for a bucket. The
    subclass adds the operations on the bucket in ``place_of``, ``_publish`` and others.
    """

    def __init__(self, root: str | os.PathLike[str] | None = None) -> None:
        self.root = Path(root).expanduser().absolute() if root else default_root()
        """The folder; for a bucket, the folder with this machine's copies."""

    def __str__(self) -> str:
        return str(self.root)

    @property
    def is_remote(self) -> bool:
        """True if the jobs are in a bucket, which other machines can reach too."""
        return False

    def place_of(self, job_id: str) -> str:
        """Return the URL of a job in a bucket; empty for a job in a folder."""
        return ""

    def check_writable(self) -> None:
        """Check that jobs can be created here; a missing folder is created later.

        Raises:
            RunStoreError: If the store is a bucket that is not writable.
        """

    def fetch_bundle(self, record: RunRecord) -> Path:
        """Return the path of a job's bundle on this machine.

        Raises:
            OSError: If the file does not exist.
        """
        with open_regular(record.bundle_path):
            return record.bundle_path

    def remove_bundle(self, record: RunRecord) -> None:
        """Remove a bundle that no record refers to any more."""
        record.bundle_path.unlink(missing_ok=True)

    def check_takeable(self, record: RunRecord) -> None:
        """Check that a job can be resumed from this machine.

        Raises:
            EtrainError: If its folder is not writable.
        """
        if not os.access(record.folder, os.W_OK | os.X_OK):
            raise EtrainError(
                f"{record.folder} is not writable: a resumed job continues its log and its "
                "checkpoints there. Nothing was done. Make it writable, or copy the whole folder "
                "into your own run store and set ETRAIN_RUNS to that."
            )

    def summarize(self, record: RunRecord) -> JobSummary:
        """Return a job's status and progress without contacting its cluster."""
        latest = peek_log(record.log_path)
        cluster = None if latest.is_terminal else find_cluster(record.cluster, record.host)
        is_gone = cluster is not None and cluster.has_ended
        # The state of the cluster is unknown here, for example because it is on another machine, so
        # the list shows when the log was last written.
        is_in_doubt = cluster is not None and not cluster.is_alive and not is_gone
        return JobSummary(
            status=latest.status,
            step=latest.step,
            total_steps=latest.total_steps,
            world_size=latest.world_size,
            is_gone=is_gone,
            last_seen_at=_last_written_at(record) if is_in_doubt else None,
        )

    def create(
        self, record: Mapping[str, Any], *, bundle: Bundle | bytes = b"", job_id: str = ""
    ) -> RunRecord:
        """Create a job's folder with ``job.json`` and the bundle, atomically.

        Args:
            record: The fields of ``RunRecord`` without the id and the folder.
            bundle: The notebook's objects.
            job_id: The id if already assigned; by default a new one.

        Raises:
            FileExistsError: If the job exists.
            RunStoreError: If the store is a bucket and cannot be written.
        """
        job_id = check_job_id(job_id) if job_id else new_job_id(str(record["name"]))
        values = {**record, "job_id": job_id, "folder": self.root / job_id}
        made = RunRecord(**{**values, "place": self.place_of(job_id)})
        # Sign the record before the rename, so that no reader finds this user's job without a
        # signature.
        made = replace(made, signature=sign(made.to_dict()))
        # A reader never finds a partial job, wherever the process is killed:
        #   .<id>.<random>/ with the bundle and job.json   hidden; left behind by a crash
        #   renamed to <id>/                               complete on this machine
        #   uploaded: the bundle, then job.json            complete in the bucket
        hidden = self.root / f".{job_id}.{secrets.token_hex(4)}"
        hidden.mkdir(mode=0o700, parents=True)
        try:
            data = json_of(made)
            write_bundle(hidden / BUNDLE_FILE, bundle)
            _write_new(hidden / RECORD_FILE, data)
            if made.folder.exists():
                raise FileExistsError(f"job {job_id} already exists in {self.root}")
            hidden.rename(made.folder)
        except BaseException:
            shutil.rmtree(hidden, ignore_errors=True)
            raise
        # If the upload fails, remove the copy; otherwise, only this machine would list the job.
        try:
            self._publish(made, has_new_bundle=True, is_new=True)
        except BaseException:
            shutil.rmtree(made.folder, ignore_errors=True)
            raise
        return made

    def rewrite(
        self,
        record: RunRecord,
        *,
        bundle: Bundle | bytes | None = None,
        is_signed: bool = True,
    ) -> RunRecord:
        """Replace a job's ``job.json``, after writing a changed bundle to another file.

        Args:
            record: The new contents.
            bundle: The notebook's objects, if they may have changed.
            is_signed: True to sign the record as this user's; False to keep its signature.

        Returns:
            The record as it was written.

        Raises:
            OSError: If the folder is not writable; in this case nothing is changed.
            RunStoreError: If the store is a bucket and cannot be written.
        """
        if self.is_remote:  # another machine may have submitted the job
            record.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = f"{BUNDLE_FILE}-{record.bundle_digest[:12]}"
        has_new_bundle = False
        if bundle is not None and not has_digest(record.bundle_path, record.bundle_digest):
            # Write it under a new name, so that job.json and its bundle match at any time:
            #   bundle-<digest> written   job.json still names the old bundle
            #   job.json replaced         it names the new bundle
            #   `remove_bundle`           by the caller, once a coordinator has accepted the job
            with draft_of(record.folder / name) as draft:
                write_bundle(draft, bundle)
            has_new_bundle = name != record.bundle_file
            record = replace(record, bundle_file=name)
        if is_signed:  # last, because the signature covers the fields set above
            record = replace(record, signature=sign(record.to_dict()))
        replace_file(record.folder / RECORD_FILE, json_of(record))
        self._publish(record, has_new_bundle=has_new_bundle, is_new=False)
        return record

    def _publish(self, record: RunRecord, *, has_new_bundle: bool, is_new: bool) -> None:
        """Upload the written files for other machines; a folder needs no upload."""

    def discard(self, record: RunRecord) -> None:
        """Remove a job that no cluster accepted; a job with a log is kept."""
        if not record.log_path.exists():
            shutil.rmtree(record.folder, ignore_errors=True)

    def records(self) -> list[RunRecord]:
        """Return all jobs with a valid record, newest first."""
        return self.scan().jobs

    def scan(self) -> Listing:
        """Return all jobs, the newest first, and the folders with an invalid record."""
        found = Listing()
        # Hidden folders are jobs that are being created.
        for path in self.root.glob(f"[!.]*/{RECORD_FILE}"):
            try:
                found.jobs.append(read_record(path.parent))
            except ValueError as exc:
                found.problems[path.parent.name] = str(exc)
        return found.sorted()

    def read(self, job_id: str) -> RunRecord | None:
        """Return the record of the job with an id; None if the store has no valid one."""
        if not is_job_id(job_id):
            return None  # the id becomes the name of a folder, so it must not be `..`
        try:
            return read_record(self.root / job_id)
        except ValueError:
            return None

    def find(self, name_or_id: str) -> RunRecord:
        """Find a job by id, else the newest one with that name, else one by a prefix of its id.

        Raises:
            JobNotFoundError: If no job or several jobs match; the message lists the closest names.
        """
        # The jobs are sorted, so the first match of a name is the newest one. If an id is also the
        # name of another job, it is treated as the id.
        listing = self.scan()
        jobs = listing.jobs
        for matches in (
            [job for job in jobs if job.job_id == name_or_id],
            [job for job in jobs if job.name == name_or_id],
        ):
            if matches:
                return matches[0]
        begun = [job for job in jobs if name_or_id and job.job_id.startswith(name_or_id)]
        if len(begun) == 1:
            return begun[0]
        if not begun:
            listing.refuse_damaged(name_or_id, str(self))
        raise JobNotFoundError(_not_found(name_or_id, jobs, begun, str(self)))

    def latest(self) -> RunRecord:
        """Return the newest job.

        Raises:
            JobNotFoundError: If the store is empty.
        """
        jobs = self.records()
        if not jobs:
            raise JobNotFoundError(
                f"there is no job in {self}. Run a %%etrain distributed cell first, "
                f"or set {ROOT_VARIABLE} to the folder of your jobs."
            )
        return jobs[0]


def json_of(record: RunRecord) -> bytes:
    """Return the bytes of a ``job.json``."""
    return json.dumps(record.to_dict(), indent=1).encode()


def _last_written_at(record: RunRecord) -> float:
    """Return when a job's log was last written or, without a log, when it was submitted."""
    try:
        return record.log_path.stat().st_mtime
    except OSError:
        return record.created


def replace_file(path: Path, data: bytes) -> None:
    """Write a file atomically: a reader finds either the old or the new content, never a part."""
    with draft_of(path) as draft:
        _write_new(draft, data)


def absolute_paths(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration whose paths are valid for processes in other working folders."""
    # The trainers and a later kernel have different working folders from this notebook's.
    checkpoint = config.get("checkpoint") or {}
    if checkpoint.get("to") and "://" not in checkpoint["to"]:
        folder = str(Path(os.path.expanduser(checkpoint["to"])).absolute())
        return config | {"checkpoint": checkpoint | {"to": folder}}
    return config


def _write_new(path: Path, data: bytes) -> None:
    """Write a new file of mode 0600 and flush it to disk, before a rename makes it visible."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _not_found(wanted: str, jobs: list[RunRecord], begun: list[RunRecord], root: str) -> str:
    if begun:
        names = ", ".join(job.job_id for job in begun[:5])
        return f"{len(begun)} jobs begin with {wanted!r}: {names}. Type more of the id."
    known = list(dict.fromkeys([job.name for job in jobs] + [job.job_id for job in jobs]))
    near = difflib.get_close_matches(wanted, known, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(near)}?" if near else "%etrain ls lists the jobs."
    return f"no job {wanted!r} in {root} ({counted(len(jobs), 'job')} there). {hint}"
