"""Records of a scheduler's jobs, for its successor if it dies.

::

    jobs/
    ├── digits-1a2b3c4d/
    │   ├── spec         what was submitted; the notebook's objects are in the run folder
    │   └── pending      later user requests that are not in the log yet
    └── heard/w1         number of the newest message that was processed, one file per supervisor

Nothing is synced, because the page cache preserves writes when a process dies. The records need not
survive a machine crash, because that kills the trainers as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

from etrain_jupyter.head.jobs.job_spec import JobSpec
from etrain_jupyter.untrusted import check_job_id

logger = logging.getLogger("etrain.coordinator")

HEARD = "heard"


@dataclass(frozen=True, kw_only=True)
class PendingRequests:
    """Requests for a job that are not in its log yet, because no rank has carried them out."""

    paused: bool = False
    pause_reason: str = ""
    is_stopping: bool = False
    faults: tuple[int, ...] | None = None
    """Ids of planned faults that have not fired; None for all configured faults."""


class JobRecords:
    """Records of a cluster's jobs."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        """Folder for the records; None to keep none, if no later scheduler would read them."""
        self._noted: dict[str, PendingRequests] = {}
        self._heard: dict[str, int] = {}
        self._files: dict[str, int] = {}  # open descriptors, by worker
        self._is_refused = False  # whether the newest write failed: warn once

    def add(self, spec: JobSpec) -> None:
        """Record a job that is being submitted."""
        # Unlike ``note``, this raises disk errors, because the job has not started, so the user can
        # free space and submit it again.
        if self.folder is None:
            return
        folder = self.folder / check_job_id(spec.job_id)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        values = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec)}
        values["run_dir"] = str(spec.run_dir)
        _replace(folder / "spec", msgpack.packb(values))
        self._note(spec.job_id, PendingRequests())

    def note(self, job_id: str, pending: PendingRequests) -> None:
        """Record the requests for a job, if they have changed. A failed write is retried later."""
        if self.folder is not None and self._noted.get(job_id) != pending:
            with self._warning():
                self._note(job_id, pending)

    def _note(self, job_id: str, pending: PendingRequests) -> None:
        assert self.folder is not None
        packed = msgpack.packb(dataclasses.asdict(pending))
        _replace(self.folder / check_job_id(job_id) / "pending", packed)
        self._noted[job_id] = pending

    def remove(self, job_id: str) -> None:
        """Remove the record of a job that has ended."""
        self._noted.pop(job_id, None)
        if self.folder is not None:
            shutil.rmtree(self.folder / check_job_id(job_id), ignore_errors=True)

    def load(self) -> Iterator[tuple[JobSpec, PendingRequests]]:
        """Yield unfinished jobs with their requests; skip damaged records."""
        folders = sorted(self.folder.glob("*/spec")) if self.folder is not None else []
        for path in folders:
            try:
                spec = _spec_from(msgpack.unpackb(path.read_bytes()))
                values = msgpack.unpackb((path.parent / "pending").read_bytes())
                faults = None if values["faults"] is None else tuple(values["faults"])
                pending = PendingRequests(**{**values, "faults": faults})
                # A copied folder would run the job twice, with two writers for one log.
                if spec.job_id != path.parent.name:
                    raise ValueError(f"it is the record of job {spec.job_id!r}")
            except (OSError, ValueError, TypeError, KeyError) as exc:
                logger.error("the record of job %s cannot be read: %s", path.parent.name, exc)
                continue
            self._noted[spec.job_id] = pending
            yield spec, pending

    # --- the newest message from each supervisor ---

    def heard(self, worker: str) -> int:
        """Return the number of the newest message from a supervisor that was processed."""
        if worker not in self._heard:
            self._heard[worker] = 0
            if self.folder is not None:
                with contextlib.suppress(OSError):
                    data = (self.folder / HEARD / worker).read_bytes()
                    self._heard[worker] = int.from_bytes(data[:8], "little")
        return self._heard[worker]

    def note_received(self, worker: str, number: int) -> None:
        """Record that a message was processed, once its events are in the log."""
        self._heard[worker] = number
        if self.folder is None:
            return
        with self._warning():
            if worker not in self._files:
                folder = self.folder / HEARD
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._files[worker] = os.open(folder / worker, os.O_WRONLY | os.O_CREAT, 0o600)
            # Write eight bytes to an open file instead of replacing it, because this happens for
            # each report, and a process cannot die halfway through such a write.
            os.pwrite(self._files[worker], number.to_bytes(8, "little"), 0)

    @contextlib.contextmanager
    def _warning(self) -> Iterator[None]:
        # Log disk errors instead of raising them, because only a later scheduler would read the
        # records, so training continues without them.
        try:
            yield
        except OSError as exc:
            if not self._is_refused:
                logger.warning("%s cannot be written: %s", self.folder, exc)
            self._is_refused = True
        else:
            self._is_refused = False

    def forget_worker(self, worker: str) -> None:
        """Close and remove the record of a worker that is gone; its name is never reused."""
        self._heard.pop(worker, None)
        if (file := self._files.pop(worker, None)) is not None:
            os.close(file)
        if self.folder is not None:
            with contextlib.suppress(OSError):
                (self.folder / HEARD / worker).unlink()


def _replace(path: Path, data: bytes) -> None:
    draft = path.with_name(f".{path.name}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
    os.replace(draft, path)


def _spec_from(values: dict[str, Any]) -> JobSpec:
    spec = JobSpec(**{**values, "run_dir": Path(values["run_dir"])})
    # Check only the size. Hashing gigabytes would delay the scheduler, and trainers check the
    # digest.
    if spec.bundle_path.stat().st_size != spec.bundle_size:
        raise ValueError(f"{spec.bundle_path} has changed since the job was submitted")
    return spec
