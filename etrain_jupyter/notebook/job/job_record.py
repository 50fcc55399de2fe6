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

from etrain_jupyter import __version__
from etrain_jupyter.log.event_log import LOG_FILE
from etrain_jupyter.storage.checkpoints import place_of_job
from etrain_jupyter.storage.ownership import RECORD_FORMAT, is_signed
from etrain_jupyter.untrusted import is_job_id, plain_line, read_regular

RECORD_FILE = "job.json"
BUNDLE_FILE = "bundle"
MAX_NAME_LENGTH = 40
MAX_RECORD_BYTES = 16_000_000
"""Maximum size of a ``job.json``; a larger file was not written by this package."""
MAX_TIME = 253_370_764_800.0
"""End of the valid range of times: the year 9999, in seconds since the epoch."""
_LOCATION = ("folder", "place")  # fields of a ``RunRecord`` that are not in ``job.json``
# `bundle` from the submit, `bundle-<digest>` from a cell that resumed the job.
_BUNDLE_NAME = re.compile(r"bundle(-[A-Za-z0-9]{1,64})?")


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The contents of ``job.json``, and the location of the job's folder."""

    job_id: str
    name: str
    created: float
    """Seconds since the epoch."""
    format: int = RECORD_FORMAT
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
    """Working folder of the notebook that submitted the job."""
    bundle_file: str = BUNDLE_FILE
    """Name of the bundle's file; it changes when a cell resumes the job."""
    host: str = ""
    """Machine that submitted the job, or last resumed it."""
    place: str = ""
    """URL of the job in a bucket, where ``folder`` is a local copy; empty for a job in a folder."""
    signature: str = ""
    """Signature by this user's kernel (see ``ownership``); empty if the user has no key."""

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
        return {k: value for k, value in vars(self).items() if k not in _LOCATION}


class Recorded:
    """A job or a study, by its record."""

    record: RunRecord
    """The record in the run store."""

    @property
    def id(self) -> str:
        """Unique id: the name followed by eight hexadecimal digits. Also its folder's name."""
        return self.record.job_id

    @property
    def name(self) -> str:
        """The name, which several jobs or studies may share."""
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
        ValueError: If the folder has no valid record; the message gives the reason.
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
        ValueError: If the record is invalid; the message gives the reason.
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
    _check_format(values)
    # Ignore unknown keys: a newer version may have written them.
    known: dict[str, Any] = {
        k: values.get(k) for k in RunRecord.__dataclass_fields__ if k not in _LOCATION
    }
    _check_types(known)
    # A copied or forged record must not be accepted as that of another job.
    if not is_job_id(known["job_id"]) or known["job_id"] != folder.name:
        raise ValueError(
            f"its job_id is {plain_line(known['job_id'], 60)!r}, which is not the name of its "
            "folder"
        )
    # The bundle's name becomes part of a path, so it must not contain a separator.
    if not _BUNDLE_NAME.fullmatch(known["bundle_file"]):
        raise ValueError("bundle_file is not a valid bundle name")
    name = known["name"] if is_job_id(known["name"]) else safe_name(known["name"])
    return RunRecord(**{**known, "name": name, "folder": folder, "place": place})


def _check_format(values: Mapping[str, Any]) -> None:
    found = values.get("format")
    if found == RECORD_FORMAT and type(found) is int:
        return
    is_newer = isinstance(found, int) and found > RECORD_FORMAT
    raise ValueError(
        f"it is from etrain-jupyter {plain_line(str(values.get('version') or 'unknown'), 40)}, and "
        f"version {__version__} cannot read it. Nothing was changed. "
        + ("Upgrade etrain-jupyter" if is_newer else "Train again, or use etrain-jupyter 0.1")
    )


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
        elif name == "format":
            fits = True  # it was checked first
        else:
            fits = isinstance(value, str)
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
