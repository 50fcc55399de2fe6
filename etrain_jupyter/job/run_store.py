"""The run store: one folder a job, which outlives the kernel, the cluster and the notebook.

::

    <root>/<job_id>/job.json        what was asked for, and which cluster got it
                    bundle          the notebook's objects, by value
                    events.jsonl    the durable log, written by the coordinator
                    checkpoints/    with manifests/

A folder is made under a hidden name and then renamed, so that whoever lists the store sees whole
jobs only.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etrain_jupyter.errors import JobNotFoundError

RECORD_FILE = "job.json"
BUNDLE_FILE = "bundle"
LOG_FILE = "events.jsonl"
ROOT_VARIABLE = "ETRAIN_RUNS"
DEFAULT_ROOT = "etrain-runs"
LONGEST_NAME = 40


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
    """The etrain-jupyter that submitted it."""

    @property
    def log_path(self) -> Path:
        """Where its durable log is."""
        return self.folder / LOG_FILE

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form; the folder is where it lies and so is not part of it."""
        return {name: value for name, value in vars(self).items() if name != "folder"}


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
    """The jobs under one folder. Holds no state: every question reads the disk."""

    def __init__(self, root: str | os.PathLike[str] | None = None) -> None:
        self.root = Path(root).expanduser().absolute() if root else default_root()

    def create(
        self, record: Mapping[str, Any], *, bundle: bytes = b"", job_id: str = ""
    ) -> JobRecord:
        """Make a job's folder with ``job.json`` and the bundle in it, all at once or not at all.

        Args:
            record: The fields of ``JobRecord`` but the id and the folder.
            bundle: The notebook's objects as bytes.
            job_id: The id, if it has been given out already.

        Raises:
            FileExistsError: If there is such a job.
        """
        job_id = job_id or new_job_id(str(record["name"]))
        folder = self.root / job_id
        made = JobRecord(**{**record, "job_id": job_id, "folder": folder})
        hidden = self.root / f".{job_id}.{secrets.token_hex(4)}"
        hidden.mkdir(parents=True)
        try:
            (hidden / BUNDLE_FILE).write_bytes(bundle)
            _write_durably(hidden / RECORD_FILE, json.dumps(made.to_dict(), indent=1))
            if folder.exists():
                raise FileExistsError(f"there is a job {job_id} in {self.root} already")
            hidden.rename(folder)
        except BaseException:
            shutil.rmtree(hidden, ignore_errors=True)
            raise
        return made

    def discard(self, record: JobRecord) -> None:
        """Remove the folder of a job that no cluster took; one that has a log is kept."""
        if not record.log_path.exists():
            shutil.rmtree(record.folder, ignore_errors=True)

    def records(self) -> list[JobRecord]:
        """Return every job, the newest first; folders that hold no readable job are passed over."""
        found = [_read_record(path.parent) for path in self.root.glob(f"[!.]*/{RECORD_FILE}")]
        jobs = [record for record in found if record is not None]
        return sorted(jobs, key=lambda record: (record.created, record.job_id), reverse=True)

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
        raise JobNotFoundError(_not_found(name_or_id, jobs, begun, self.root))

    def latest(self) -> JobRecord:
        """Return the newest job.

        Raises:
            JobNotFoundError: If the store is empty.
        """
        jobs = self.records()
        if not jobs:
            raise JobNotFoundError(
                f"there is no job in {self.root}. Run a %%etrain distributed cell first, "
                f"or set {ROOT_VARIABLE} to the folder of your jobs."
            )
        return jobs[0]


def _read_record(folder: Path) -> JobRecord | None:
    """Return the job in a folder; None if it is no job of ours, whatever the reason."""
    try:
        data = json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))
        known = {k: data[k] for k in JobRecord.__dataclass_fields__ if k in data}
        return JobRecord(**{**known, "folder": folder})
    except (OSError, ValueError, TypeError):
        return None


def _write_durably(path: Path, text: str) -> None:
    """Write a file so that it is whole on the disk before the folder's rename makes it visible."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _not_found(wanted: str, jobs: list[JobRecord], begun: list[JobRecord], root: Path) -> str:
    """Return what to say about a job that cannot be told apart or is not there."""
    if begun:
        names = ", ".join(job.job_id for job in begun[:5])
        return f"{len(begun)} jobs begin with {wanted!r}: {names}. Type more of the id."
    known = list(dict.fromkeys([job.name for job in jobs] + [job.job_id for job in jobs]))
    near = difflib.get_close_matches(wanted, known, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(near)}?" if near else "%etrain ls shows the jobs there are."
    count = f"{len(jobs)} job" + ("" if len(jobs) == 1 else "s")
    return f"no job {wanted!r} in {root} ({count} there). {hint}"
