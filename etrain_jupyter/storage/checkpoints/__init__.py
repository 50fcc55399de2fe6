"""Checkpoint stores, the manifest protocol, and retention.

Here, a part of a checkpoint is bytes or a file; ``trainer`` defines its content.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

from etrain_jupyter.errors import CheckpointError, ConfigError
from etrain_jupyter.storage.checkpoints.base import (
    CheckpointStore,
    ListedCheckpoint,
    OpenCheckpoint,
    choose_steps_to_keep,
    list_checkpoints,
    newest_valid,
    open_newest,
    open_step,
)
from etrain_jupyter.storage.checkpoints.local import LocalStore
from etrain_jupyter.storage.checkpoints.manifest import Manifest, Part, manifest_key
from etrain_jupyter.untrusted import check_job_id

__all__ = [
    "CheckpointStore",
    "ListedCheckpoint",
    "LocalStore",
    "Manifest",
    "OpenCheckpoint",
    "Part",
    "choose_steps_to_keep",
    "list_checkpoints",
    "manifest_key",
    "newest_valid",
    "open_newest",
    "open_step",
    "open_store",
    "place_of_job",
]


def open_store(url: str) -> CheckpointStore:
    """Return the store at a folder's path or a URL; nothing is read or written yet.

    Raises:
        CheckpointError: If the store's library is not installed.
        ConfigError: If there is no store for the scheme, or the URL is invalid.
    """
    if "://" not in url or urlsplit(url).scheme == "file":
        path = unquote(urlsplit(url).path) if "://" in url else url
        # Not Path.expanduser, which raises an error for an unknown user in another user's record.
        return LocalStore(os.path.expanduser(path))
    scheme = urlsplit(url).scheme
    if scheme != "s3":
        raise ConfigError(
            f"checkpoint.to={url!r}: there is no store for {scheme}://. Nothing was submitted.",
            path=("checkpoint", "to"),
            hint="Give the path of a folder, or s3://bucket/prefix.",
        )
    # Imported here because boto3 is an optional dependency, and slow to import.
    try:
        from etrain_jupyter.storage.checkpoints.s3 import S3Store
    except ModuleNotFoundError as exc:
        raise CheckpointError(
            f"checkpoint.to={url!r} needs boto3, which is not installed ({sys.executable}). "
            'Install it there: pip install "etrain-jupyter[s3]"'
        ) from exc
    try:
        return S3Store(url)
    except ValueError as exc:
        raise ConfigError(
            f"checkpoint.to {exc}. Nothing was submitted.",
            path=("checkpoint", "to"),
            hint="Write s3://bucket/prefix.",
        ) from exc


def place_of_job(to: str, job_id: str) -> str:
    """Return a job's folder below ``checkpoint.to``, which several jobs may share.

    Raises:
        ValueError: If ``job_id`` is not a valid id.

    >>> place_of_job("s3://bucket/runs/", "digits-0a1b2c3d")
    's3://bucket/runs/digits-0a1b2c3d'
    """
    check_job_id(job_id)
    if "://" in to:
        return f"{to.rstrip('/')}/{job_id}"
    return str(Path(os.path.expanduser(to)) / job_id)
