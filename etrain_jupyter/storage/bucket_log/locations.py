"""Locations of a bucket's jobs, in the bucket and on this machine.

::

    s3://bucket/prefix/<job_id>/job.json     bundle     checkpoints/     manifests/
                                log/         newest events, one object every few seconds
                                packs/       older events, 1,000 or 20,000 per object
                                events.segments/   the latter as columns
                                exhibits/    figures, texts and tables that eval.score returned
                                alive.json   status and heartbeat, rewritten every few seconds

    <state>/runs/<bucket>-<digits>/<job_id>/   this machine's copy: a regular run folder

The coordinator writes to its machine's folder first; a reader's folder is filled from the bucket.
The folder is not temporary, because events that could not be uploaded yet exist only there.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from etrain_jupyter.config.store_url import S3, split_s3_url
from etrain_jupyter.errors import ConfigError
from etrain_jupyter.untrusted import without_link


def is_remote(root: object) -> bool:
    """Return whether a run store is in a bucket."""
    return isinstance(root, str) and root.startswith(S3)


def check_root(url: str) -> str:
    """Return the URL of a run store as written in records: without a trailing ``/``.

    Raises:
        ConfigError: If the URL is invalid.
    """
    try:
        bucket, prefix = split_s3_url(url)
    except ValueError as exc:
        raise ConfigError(
            f"the run store {exc}. Nothing was done.", hint="set ETRAIN_RUNS to s3://bucket/prefix"
        ) from exc
    return f"{S3}{bucket}/{prefix}".rstrip("/")


def private_root() -> Path:
    """Return the folder that only this user may write, and that survives a restart."""
    own = os.environ.get("ETRAIN_STATE")
    state = Path(own).expanduser() if own else Path.home() / ".local" / "state" / "etrain"
    return without_link(state.absolute())


def spool_of_root(root: str) -> Path:
    """Return the folder with this machine's copies of a run store's jobs."""
    # The bucket's name is for readability; the digest distinguishes run stores in one bucket.
    bucket, _ = split_s3_url(root)
    digest = hashlib.sha256(root.encode()).hexdigest()[:12]
    return private_root() / "runs" / f"{bucket}-{digest}"


def spool_of(place: str) -> Path:
    """Return the folder with this machine's copy of the job at ``place``."""
    root, _, job_id = place.rpartition("/")
    return spool_of_root(root) / job_id
