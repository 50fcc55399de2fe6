"""Find the run store for a folder, a URL or a job."""

from __future__ import annotations

import os

from etrain_jupyter.errors import ConfigError
from etrain_jupyter.notebook.job.job_record import RunRecord
from etrain_jupyter.notebook.job.run_store import ROOT_VARIABLE, RunStore
from etrain_jupyter.notebook.job.s3_run_store import S3RunStore
from etrain_jupyter.storage.bucket_log.locations import is_remote


def open_runs(root: str | os.PathLike[str] | None = None) -> RunStore:
    """Return the run store at a folder or a URL; by default the one in ``ETRAIN_RUNS``.

    Raises:
        ConfigError: If the URL is not that of a bucket.
    """
    root = root or os.environ.get(ROOT_VARIABLE) or None
    if is_remote(root):
        return S3RunStore(str(root))
    if isinstance(root, str) and "://" in root:
        raise ConfigError(
            f"the run store {root!r} is neither a folder nor a bucket",
            hint=f"set {ROOT_VARIABLE} to s3://bucket/prefix",
        )
    return RunStore(root)


def store_of(record: RunRecord) -> RunStore:
    """Return the run store of a job."""
    return open_runs(record.place.rpartition("/")[0] if record.place else record.folder.parent)
