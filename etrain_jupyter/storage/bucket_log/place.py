"""Where the jobs of a bucket lie, there and on this machine.

::

    s3://bucket/prefix/<job_id>/job.json     bundle     checkpoints/     manifests/
                                log/         the newest events, some seconds of them an object
                                packs/       older ones, 1,000 and 20,000 an object
                                events.segments/   the latter as columns
                                alive.json   how the job stands; written anew every few seconds

    <state>/runs/<bucket>-<digits>/<job_id>/   this machine's copy: a run folder like any other

The coordinator writes into its machine's folder first; who reads has the folder filled from the
bucket. It is no temporary one: what could not be uploaded yet is only there.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from etrain_jupyter.config.store_url import S3, split_s3_url
from etrain_jupyter.errors import ConfigError


def is_remote(root: object) -> bool:
    """Tell whether a run store is a bucket's."""
    return isinstance(root, str) and root.startswith(S3)


def check_root(url: str) -> str:
    """Return the URL of a run store as it is written in records: without a ``/`` at its end.

    Raises:
        ConfigError: If it is no such URL.
    """
    try:
        bucket, prefix = split_s3_url(url)
    except ValueError as exc:
        raise ConfigError(
            f"the run store {exc}. Nothing was done.", hint="set ETRAIN_RUNS to s3://bucket/prefix"
        ) from exc
    return f"{S3}{bucket}/{prefix}".rstrip("/")


def private_root(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder for what only this user may write, and a restart must not remove."""
    own = environment.get("ETRAIN_STATE")
    state = Path(own).expanduser() if own else Path.home() / ".local" / "state" / "etrain"
    return state.absolute()


def spool_root(environment: Mapping[str, str] = os.environ) -> Path:
    """Return where this machine's copies are: they must survive a restart of it."""
    return private_root(environment) / "runs"


def spool_of_root(root: str) -> Path:
    """Return the folder with this machine's copies of a run store's jobs."""
    bucket, _ = split_s3_url(root)
    return spool_root() / f"{bucket}-{hashlib.sha256(root.encode()).hexdigest()[:12]}"


def spool_of(place: str) -> Path:
    """Return the folder with this machine's copy of one job, which lies at ``place``."""
    root, _, job_id = place.rpartition("/")
    return spool_of_root(root) / job_id
