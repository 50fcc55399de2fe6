"""The record of a job, ``job.json``: validated once when it is read, then trusted as data.

A run store may be shared, or may belong to another user, so ``record_from`` validates the whole
record. Its values are used as data only, never as a path, an address or code.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etrain_jupyter.log.event_log import LOG_FILE
from etrain_jupyter.storage.checkpoints import place_of_job
from etrain_jupyter.storage.ownership import is_signed
from etrain_jupyter.untrusted import is_job_id, plain_line, read_regular

RECORD_FILE = "job.json"
BUNDLE_FILE = "bundle"
MAX_NAME_LENGTH = 40
MAX_RECORD_BYTES = 16_000_000
"""Maximum size of a ``job.json``; a larger file was not written by this package."""
MAX_TIME = 253_370_764_800.0
"""End of the valid range of times: the year 9999, in seconds since the epoch."""
# `bundle` from the submit, `bundle-<digest>` from a cell that resumed the job.
_BUNDLE_NAME = re.compile(r"bundle(-[A-Za-z0-9]{1,64})?")


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The contents of ``job.json``, and the location of the job's folder."""

    job_id: str
    name: str
    created: float
    """Seconds since the epoch."""
    folder: Path
    pool: str = "local"
    cluster: dict[str, str] = field(default_factory=dict)
    """``cluster_id``, ``state_dir`` and ``address`` of the job's last cluster."""
    config: dict[str, Any] = field(default_factory=dict)
    """The JSON form of the job's TrainConfig."""
    bundle_digest: str = ""
    cell: str = ""
    """Body of the cell as typed; empty for a job started from Python."""
    version: str = ""
    """Version of etrain-jupyter that submitted the job, or last resumed it."""
    cwd: str = ""
    """Working folder of the notebook that submitted the job; empty in older records."""
    bundle_file: str = BUNDLE_FILE
    """Name of the bundle's file; it changes when a cell resumes the job."""
    host: str = ""
    """Machine that submitted the job, or last resumed it; empty in older records."""
    place: str = ""
    """URL of the job in a bucket, where ``folder`` is a local copy; empty for a job in a folder."""
    signature: str = ""
    """Signature by this user's kernel, see ``ownership``; empty in older records."""

    @property
    def is_own(self) -> bool:
        """True if this user submitted or resumed the job, signed with this machine's key."""
        return is_signed(self.to_dict(), self.signature)

    @property
    def bundle_path(self) -> Path:
        """Path of the bundle, the captured notebook objects."""
        return self.folder / self.bundle_file

    @property
    def log_path(self) -> Path:
        """Path of the durable log."""
        return self.folder / LOG_FILE

    @property
    def where(self) -> str:
        """URL or path of the job, for messages and checkpoint stores."""
        return self.place or str(self.folder)

    @property
    def checkpoints(self) -> str:
        """URL or path of the checkpoints."""
        # `checkpoint.to` may be shared by several jobs; each one has its own folder below it.
        elsewhere = (self.config.get("checkpoint") or {}).get("to")
        return place_of_job(elsewhere, self.job_id) if elsewhere else self.where

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, which does not include the location."""
        return {k: value for k, value in vars(self).items() if k not in ("folder", "place")}


class Recorded:
    """A job or a study, by its record."""

    record: RunRecord
    """Its record in the run store."""

    @property
    def id(self) -> str:
        """Unique id: the name followed by eight hexadecimal digits. Also its folder's name."""
        return self.record.job_id

    @property
    def name(self) -> str:
        """The name, which several may share."""
        return self.record.name


def safe_name(text: str) -> str:
    """Return ``text`` with only portable file name characters; ``job`` if none remain.

    >>> safe_name("my digits/run 2")
    'my-digits-run-2'
    """
    cleaned = re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-._")[:MAX_NAME_LENGTH].rstrip("-._")
    return cleaned or "job"


def read_record(folder: Path) -> RunRecord:
    """Read the record of the job in a folder.

    Raises:
        ValueError: If the folder has no valid record; the message has the reason.
    """
    try:
        data = read_regular(folder / RECORD_FILE, most_bytes=MAX_RECORD_BYTES)
    except OSError as exc:
        raise ValueError(f"{RECORD_FILE} cannot be read: {exc.strerror or exc}") from exc
    return record_from(data, folder)


def record_from(data: bytes, folder: Path, place: str = "") -> RunRecord:
    """Parse and validate a ``job.json``, which any user with access to the store may have written.

    Args:
        data: Contents of the file.
        folder: The job's folder, whose name must be the job's id.
        place: URL of the job if it is in a bucket.

    Raises:
        ValueError: If the record is invalid; the message has the reason.
    """
    if len(data) > MAX_RECORD_BYTES:
        raise ValueError(
            f"{RECORD_FILE} has {len(data):,} bytes; the limit is {MAX_RECORD_BYTES:,}"
        )
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise ValueError(f"{RECORD_FILE} is not JSON") from exc
    if not isinstance(values, dict):
        raise ValueError(f"{RECORD_FILE} is not a JSON object")
    # Ignore unknown keys: a newer version may have written them.
    known = {k: values[k] for k in RunRecord.__dataclass_fields__ if k in values}
    _check_types({**_SAMPLE, **known})
    # A copied or forged record must not be accepted as that of another job. `folder` and `place`
    # are replaced below, so their values in the file do not matter.
    if not is_job_id(known.get("job_id")) or known["job_id"] != folder.name:
        raise ValueError(
            f"its job_id is {plain_line(str(known.get('job_id')), 60)!r}, which is not the name of "
            "its folder"
        )
    # The bundle's name becomes part of a path, so it must not contain a separator.
    if not _BUNDLE_NAME.fullmatch(known.get("bundle_file", BUNDLE_FILE)):
        raise ValueError("bundle_file is not a valid bundle name")
    name = known["name"] if is_job_id(known["name"]) else safe_name(known["name"])
    return RunRecord(**{**known, "name": name, "folder": folder, "place": place})


_SAMPLE: dict[str, Any] = {"job_id": None, "name": None, "created": None}
"""The required keys with invalid values, so that the check fails if a key is missing."""


def _check_types(values: Mapping[str, Any]) -> None:
    """Raise a ``ValueError`` for the first value of an invalid type."""
    for name, value in values.items():
        if name == "created":
            # Python's JSON accepts NaN and infinity, which `datetime` does not.
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            fits = is_number and math.isfinite(value) and 0 <= value < MAX_TIME
        elif name == "cluster":
            fits = isinstance(value, dict) and all(isinstance(v, str) for v in value.values())
        elif name == "config":
            fits = isinstance(value, dict) and _is_config(value)
        else:
            fits = isinstance(value, str) or name in ("folder", "place")
        if not fits:
            raise ValueError(f"{name} has an invalid value: {plain_line(repr(value), 60)}")


def _is_config(config: Mapping[str, Any]) -> bool:
    """Return True if the values that are used without ``TrainConfig`` have the right types."""
    # Do not check the whole configuration: a job from another version must still be listed and
    # attachable. A resume validates all of it.
    checkpoint, log = config.get("checkpoint") or {}, config.get("log") or {}
    if not isinstance(checkpoint, dict) or not isinstance(log, dict):
        return False
    to, best = checkpoint.get("to"), checkpoint.get("best") or {}
    is_rule = isinstance(best, dict) and (not best or best.get("mode") in ("min", "max"))
    return isinstance(to, str | None) and is_rule
