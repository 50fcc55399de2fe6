"""The run store: one folder a job, which outlives the kernel, the cluster and the notebook.

::

    <root>/<job_id>/job.json        what was asked for, and which cluster got it last
                    bundle          the notebook's objects, by value
                    events.jsonl    the durable log, written by one coordinator at a time
                    events.segments/   its finished parts as columns; may be deleted
                    checkpoints/    with manifests/

A folder is made under a hidden name and then renamed, so that whoever lists the store sees whole
jobs only. It is its owner's alone (0700): a bundle holds the notebook's objects by value.

A store may be shared or a stranger's. What is read here is checked once, in ``record_from``, and
trusted afterwards as data: it is never a path, an address or code.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etrain_jupyter.bundle.files import has_digest, write_bundle
from etrain_jupyter.errors import ConfigError, EtrainError, JobNotFoundError
from etrain_jupyter.log.event_log import LOG_FILE
from etrain_jupyter.notebook.job.history import peek_log
from etrain_jupyter.notebook.job.ownership import is_signed, sign
from etrain_jupyter.notebook.job.whereabouts import has_ended
from etrain_jupyter.storage.bucket_log.place import is_remote
from etrain_jupyter.storage.checkpoints import place_of_job
from etrain_jupyter.untrusted import (
    check_job_id,
    is_job_id,
    open_regular,
    plain_line,
    read_regular,
)

if TYPE_CHECKING:
    from etrain_jupyter.bundle.capture import Bundle

RECORD_FILE = "job.json"
BUNDLE_FILE = "bundle"
ROOT_VARIABLE = "ETRAIN_RUNS"
DEFAULT_ROOT = "etrain-runs"
LONGEST_NAME = 40
MOST_RECORD_BYTES = 16_000_000
"""Of a ``job.json``; what is larger than a cell and its configuration is none of ours."""
LATEST_TIME = 253_370_764_800.0
"""The year 9999: what is later is no date."""
_BUNDLE_NAME = re.compile(r"bundle(-[A-Za-z0-9]{1,64})?")


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """What ``job.json`` says of a job, and where its folder is."""

    job_id: str
    name: str
    created: float
    """Seconds since the epoch."""
    folder: Path
    pool: str = "local"
    cluster: dict[str, str] = field(default_factory=dict)
    """``cluster_id``, ``state_dir`` and ``address`` of the cluster that it was submitted to."""
    config: dict[str, Any] = field(default_factory=dict)
    """The JSON form of its TrainConfig."""
    bundle_digest: str = ""
    cell: str = ""
    """The body of the cell, as it was typed; empty for a job from Python."""
    version: str = ""
    """The etrain-jupyter that submitted it, or resumed it last."""
    cwd: str = ""
    """The folder in which the notebook ran that submitted it; empty in older records."""
    bundle_file: str = BUNDLE_FILE
    """Name of the file with the notebook's objects; another one after a resume with a cell."""
    host: str = ""
    """The machine from which it was submitted or resumed last; empty in older records."""
    place: str = ""
    """URL of the job's place in a bucket, of which ``folder`` is this machine's copy then."""
    signature: str = ""
    """Proof that this user's kernel wrote it, see ``ownership``; empty in older records."""

    @property
    def is_own(self) -> bool:
        """Whether this user submitted or resumed it, with the key that is here."""
        return is_signed(self.to_dict(), self.signature)

    @property
    def bundle_path(self) -> Path:
        """Where the notebook's objects are."""
        return self.folder / self.bundle_file

    @property
    def log_path(self) -> Path:
        """Where its durable log is."""
        return self.folder / LOG_FILE

    @property
    def where(self) -> str:
        """Where the job lies, as people and stores of checkpoints are told."""
        return self.place or str(self.folder)

    @property
    def checkpoints(self) -> str:
        """Where its checkpoints are."""
        elsewhere = (self.config.get("checkpoint") or {}).get("to")
        return place_of_job(elsewhere, self.job_id) if elsewhere else self.where

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form; where it lies is not part of it."""
        return {k: value for k, value in vars(self).items() if k not in ("folder", "place")}


@dataclass(frozen=True, kw_only=True)
class JobSummary:
    """What a list of jobs says of one."""

    status: str
    step: int = 0
    total_steps: int = 0
    world_size: int = 0
    is_gone: bool = False
    """Whether nobody trains it although it has not ended."""


@dataclass(frozen=True, kw_only=True)
class Listing:
    """What is in a run store."""

    jobs: list[JobRecord] = field(default_factory=list)
    """The newest first."""
    problems: dict[str, str] = field(default_factory=dict)
    """Name of a folder that looks like a job: why it is none that can be used."""

    def sorted(self) -> Listing:
        """Return it in order."""
        jobs = sorted(self.jobs, key=lambda record: (record.created, record.job_id), reverse=True)
        return Listing(jobs=jobs, problems=dict(sorted(self.problems.items())))


def open_runs(root: str | os.PathLike[str] | None = None) -> RunStore:
    """Return the run store at a folder or a URL; without one, that of ``ETRAIN_RUNS``.

    Raises:
        ConfigError: If it is a URL, and none of a bucket.
    """
    root = root or os.environ.get(ROOT_VARIABLE) or None
    if is_remote(root):
        from etrain_jupyter.notebook.job.s3_run_store import S3RunStore

        return S3RunStore(str(root))
    if isinstance(root, str) and "://" in root:
        raise ConfigError(
            f"the run store {root!r} is no folder",
            hint=f"set {ROOT_VARIABLE} to s3://bucket/prefix",
        )
    return RunStore(root)


def store_of(record: JobRecord) -> RunStore:
    """Return the run store in which a job lies."""
    return open_runs(record.place.rpartition("/")[0] if record.place else record.folder.parent)


def default_root(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the run store: ``ETRAIN_RUNS``, else ``etrain-runs`` where the kernel runs."""
    return Path(environment.get(ROOT_VARIABLE) or DEFAULT_ROOT).expanduser().absolute()


def safe_name(text: str) -> str:
    """Return ``text`` reduced to what any file name may hold; ``job`` if nothing is left.

    >>> safe_name("my digits/run 2")
    'my-digits-run-2'
    """
    cleaned = re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-._")[:LONGEST_NAME].rstrip("-._")
    return cleaned or "job"


def new_job_id(name: str) -> str:
    """Return an id that nobody else has: the name and eight hexadecimal digits."""
    return f"{safe_name(name)}-{secrets.token_hex(4)}"


class RunStore:
    """The jobs under one folder. Holds no state: every question reads the disk.

    ``open_runs`` returns this, or its twin for a bucket.
    """

    def __init__(self, root: str | os.PathLike[str] | None = None) -> None:
        self.root = Path(root).expanduser().absolute() if root else default_root()
        """The folder; of a bucket, that with this machine's copies."""

    def __str__(self) -> str:
        return str(self.root)

    def check_writable(self) -> None:
        """Refuse a store in which no job could be made; a folder is made when it is needed."""

    def fetch_bundle(self, record: JobRecord) -> Path:
        """Return the file with the notebook's objects of a job, on this machine.

        Raises:
            OSError: If it is not there.
        """
        with open_regular(record.bundle_path):
            return record.bundle_path

    def remove_bundle(self, record: JobRecord) -> None:
        """Remove a bundle that no record names any more."""
        record.bundle_path.unlink(missing_ok=True)

    def check_takeable(self, record: JobRecord) -> None:
        """Refuse a job with which nobody here could go on.

        Raises:
            EtrainError: If nothing can be written there.
        """
        if not os.access(record.folder, os.W_OK | os.X_OK):
            raise EtrainError(
                f"{record.folder} cannot be written to: a resumed job goes on with its log and its "
                "checkpoints there. Nothing was done. Make it writable, or copy the whole folder "
                "into a run store of your own and set ETRAIN_RUNS to that."
            )

    def standing(self, record: JobRecord) -> JobSummary:
        """Return how a job stands, without asking its cluster."""
        latest = peek_log(record.log_path)
        return JobSummary(
            status=latest.status,
            step=latest.step,
            total_steps=latest.total_steps,
            world_size=latest.world_size,
            is_gone=not latest.is_terminal and has_ended(record.cluster, record.host),
        )

    def create(
        self, record: Mapping[str, Any], *, bundle: Bundle | bytes = b"", job_id: str = ""
    ) -> JobRecord:
        """Make a job's folder with ``job.json`` and the bundle in it, all at once or not at all.

        Args:
            record: The fields of ``JobRecord`` but the id and the folder.
            bundle: The notebook's objects.
            job_id: The id, if it has been given out already.

        Raises:
            FileExistsError: If there is such a job.
        """
        job_id = check_job_id(job_id) if job_id else new_job_id(str(record["name"]))
        folder = self.root / job_id
        made = JobRecord(**{**record, "job_id": job_id, "folder": folder})
        hidden = self.root / f".{job_id}.{secrets.token_hex(4)}"
        hidden.mkdir(mode=0o700, parents=True)
        try:
            made = replace(made, signature=sign(made.to_dict()))
            data = json.dumps(made.to_dict(), indent=1)
            write_bundle(hidden / BUNDLE_FILE, bundle)
            _write_new(hidden / RECORD_FILE, data.encode())
            if folder.exists():
                raise FileExistsError(f"there is a job {job_id} in {self.root} already")
            hidden.rename(folder)
        except BaseException:
            shutil.rmtree(hidden, ignore_errors=True)
            raise
        return made

    def rewrite(
        self,
        record: JobRecord,
        *,
        bundle: Bundle | bytes | None = None,
        is_signed: bool = True,
    ) -> JobRecord:
        """Replace a job's ``job.json``; another bundle goes into another file, before it.

        Args:
            record: What it shall say.
            bundle: The notebook's objects, if they may have changed.
            is_signed: Whether this user stands for it from now on; else it is written as it is.

        Returns:
            The record as it was written.

        Raises:
            OSError: If the folder cannot be written to; then all is as it was.
        """
        name = f"{BUNDLE_FILE}-{record.bundle_digest[:12]}"
        if bundle is not None and not has_digest(record.bundle_path, record.bundle_digest):
            _replace_bundle(record.folder / name, bundle)
            record = replace(record, bundle_file=name)
        if is_signed:
            record = replace(record, signature=sign(record.to_dict()))
        replace_file(record.folder / RECORD_FILE, json.dumps(record.to_dict(), indent=1).encode())
        return record

    def discard(self, record: JobRecord) -> None:
        """Remove the folder of a job that no cluster took; one that has a log is kept."""
        if not record.log_path.exists():
            shutil.rmtree(record.folder, ignore_errors=True)

    def records(self) -> list[JobRecord]:
        """Return every job, the newest first; what is no readable job is passed over."""
        return self.scan().jobs

    def scan(self) -> Listing:
        """Return every job, the newest first, and what looks like one and cannot be read."""
        found = Listing()
        for path in self.root.glob(f"[!.]*/{RECORD_FILE}"):
            try:
                found.jobs.append(read_record(path.parent))
            except ValueError as exc:
                found.problems[path.parent.name] = str(exc)
        return found.sorted()

    def find(self, name_or_id: str) -> JobRecord:
        """Return the job of that id, else the newest of that name, else the one whose id begins so.

        Raises:
            JobNotFoundError: If there is none, or if several ids begin so; the message names the
            nearest.
        """
        jobs = self.records()
        for matches in (
            [job for job in jobs if job.job_id == name_or_id],
            [job for job in jobs if job.name == name_or_id],
        ):
            if matches:
                return matches[0]
        begun = [job for job in jobs if name_or_id and job.job_id.startswith(name_or_id)]
        if len(begun) == 1:
            return begun[0]
        raise JobNotFoundError(_not_found(name_or_id, jobs, begun, str(self)))

    def latest(self) -> JobRecord:
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


def read_record(folder: Path) -> JobRecord:
    """Return the job in a folder.

    Raises:
        ValueError: If it is none of ours, with the reason.
    """
    try:
        data = read_regular(folder / RECORD_FILE, most_bytes=MOST_RECORD_BYTES)
    except OSError as exc:
        raise ValueError(f"{RECORD_FILE} cannot be read: {exc.strerror or exc}") from exc
    return record_from(data, folder)


def record_from(data: bytes, folder: Path, place: str = "") -> JobRecord:
    """Return the job that a ``job.json`` tells of; whoever can write to the store may have made it.

    Raises:
        ValueError: If it is none, with the reason.
    """
    if len(data) > MOST_RECORD_BYTES:
        raise ValueError(f"{RECORD_FILE} holds more than {MOST_RECORD_BYTES:,} bytes")
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise ValueError(f"{RECORD_FILE} is no JSON") from exc
    if not isinstance(values, dict):
        raise ValueError(f"{RECORD_FILE} is no group of keys")
    known = {k: values[k] for k in JobRecord.__dataclass_fields__ if k in values}
    _check_types({**_SAMPLE, **known})
    if not is_job_id(known.get("job_id")) or known["job_id"] != folder.name:
        raise ValueError(
            f"it says that it is job {plain_line(str(known.get('job_id')), 60)!r}, which is not "
            "the name of its folder"
        )
    if not _BUNDLE_NAME.fullmatch(known.get("bundle_file", BUNDLE_FILE)):
        raise ValueError("bundle_file is not the name of a bundle")
    name = known["name"] if is_job_id(known["name"]) else safe_name(known["name"])
    return JobRecord(**{**known, "name": name, "folder": folder, "place": place})


_SAMPLE: dict[str, Any] = {"job_id": None, "name": None, "created": None}
"""What every record has."""


def _check_types(values: Mapping[str, Any]) -> None:
    """Refuse a record whose values are of other types than they should be.

    Raises:
        ValueError: For the first one.
    """
    for name, value in values.items():
        if name == "created":
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            fits = is_number and math.isfinite(value) and 0 <= value < LATEST_TIME
        elif name == "cluster":
            fits = isinstance(value, dict) and all(isinstance(v, str) for v in value.values())
        elif name == "config":
            fits = isinstance(value, dict) and _is_config(value)
        else:
            fits = isinstance(value, str) or name in ("folder", "place")
        if not fits:
            raise ValueError(f"{name} is not what it should be: {plain_line(repr(value), 60)}")


def _is_config(config: Mapping[str, Any]) -> bool:
    """Tell whether the parts of a configuration that are read without its class have their types.

    An older or newer version's may be otherwise; who resumes it has it checked as a whole.
    """
    checkpoint, log = config.get("checkpoint") or {}, config.get("log") or {}
    if not isinstance(checkpoint, dict) or not isinstance(log, dict):
        return False
    to, best = checkpoint.get("to"), checkpoint.get("best") or {}
    is_rule = isinstance(best, dict) and (not best or best.get("mode") in ("min", "max"))
    return isinstance(to, str | None) and is_rule


def _replace_bundle(path: Path, bundle: Bundle | bytes) -> None:
    hidden = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        write_bundle(hidden, bundle)
        hidden.replace(path)
    finally:
        hidden.unlink(missing_ok=True)


def replace_file(path: Path, data: bytes) -> None:
    """Write a file so that whoever reads it finds the old bytes or the new ones, never a part."""
    hidden = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        _write_new(hidden, data)
        hidden.replace(path)
    except BaseException:
        hidden.unlink(missing_ok=True)
        raise


def absolute_paths(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration for processes that run in other folders than the notebook."""
    checkpoint = config.get("checkpoint") or {}
    if checkpoint.get("to") and "://" not in checkpoint["to"]:
        folder = str(Path(checkpoint["to"]).expanduser().absolute())
        return config | {"checkpoint": checkpoint | {"to": folder}}
    return config


def _write_new(path: Path, data: bytes) -> None:
    """Write a file of mode 0600 that is whole on the disk before a rename makes it visible."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _not_found(wanted: str, jobs: list[JobRecord], begun: list[JobRecord], root: str) -> str:
    """Return what to say about a job that cannot be told apart or is not there."""
    if begun:
        names = ", ".join(job.job_id for job in begun[:5])
        return f"{len(begun)} jobs begin with {wanted!r}: {names}. Type more of the id."
    known = list(dict.fromkeys([job.name for job in jobs] + [job.job_id for job in jobs]))
    near = difflib.get_close_matches(wanted, known, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(near)}?" if near else "%etrain ls shows the jobs there are."
    count = f"{len(jobs)} job" + ("" if len(jobs) == 1 else "s")
    return f"no job {wanted!r} in {root} ({count} there). {hint}"
