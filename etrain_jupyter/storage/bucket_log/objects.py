"""Objects below one URL of a run store; all failures are raised as ``RunStoreError``."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etrain_jupyter.config.store_url import split_s3_url
from etrain_jupyter.errors import RunStoreError
from etrain_jupyter.storage.objects import store_errors_as

if TYPE_CHECKING:
    from etrain_jupyter.storage.objects.s3_bucket import Bucket

DEADLINE_S = 20.0
"""Timeout of one request; it is extended while bytes arrive."""
PROBE = ".etrain-runs"
"""Key of the object at the root of each run store with which conditional writes are checked."""
_run_store_errors = functools.partial(store_errors_as, RunStoreError, "the run store: {}")


class RunObjects:
    """Read and write whole objects. The first method call connects to S3.

    Args:
        url: ``s3://bucket/prefix``, for a run store or for one of its jobs.
        patience_s: Seconds after which a request is no longer retried.
    """

    def __init__(self, url: str, *, patience_s: float = 15.0) -> None:
        self.url = url
        self._patience_s = patience_s
        self._opened: Bucket | None = None

    def __str__(self) -> str:
        return self.url

    @property
    def _bucket(self) -> Bucket:
        if self._opened is None:
            try:
                # Imported here because boto3 is an optional dependency, and slow to import.
                from etrain_jupyter.storage.objects.s3_bucket import Bucket
                from etrain_jupyter.storage.objects.s3_requests import S3Limits
            except ModuleNotFoundError as exc:
                raise RunStoreError(
                    f"the run store {self.url} needs boto3, which is not installed "
                    f'({sys.executable}). Install it there: pip install "etrain-jupyter[s3]"'
                ) from exc
            # Shorter than for checkpoints, because objects are small and a notebook may wait.
            limits = S3Limits(
                connect_timeout_s=3.0,
                read_timeout_s=10.0,
                num_requests=3 if self._patience_s > 5 else 2,
                num_attempts=2,
                patience_s=self._patience_s,
                deadline_s=DEADLINE_S,
            )
            name, prefix = split_s3_url(self.url)
            self._opened = Bucket(name, prefix, limits, setting="ETRAIN_RUNS")
        return self._opened

    def get(self, key: str, *, most_bytes: int | None = None) -> bytes | None:
        """Return an object, at most its first ``most_bytes``; None if it does not exist."""
        with _run_store_errors():
            return self._bucket.get(key, f"{key} cannot be read", most_bytes=most_bytes)

    def put(self, key: str, data: bytes) -> None:
        """Create or replace an object."""
        with _run_store_errors():
            self._bucket.put(key, data, f"{key} cannot be written")

    def put_file(self, key: str, path: Path) -> None:
        """Create or replace an object with a file's bytes, in chunks if it is large."""
        with _run_store_errors():
            self._bucket.replace_file(key, path, f"{key} cannot be written")

    def get_file(self, key: str, path: Path) -> bool:
        """Write an object to a new file; return False if the object does not exist."""
        what = f"{key} cannot be read"
        with _run_store_errors():
            known = self._bucket.head(key, what)
            if known is not None:
                self._bucket.download(key, known["ContentLength"], path, what)
            return known is not None

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Create an object if the key is free; return False if it exists.

        After a retry, the existing object may be our own: the response to the first attempt may
        have been lost.
        """
        with _run_store_errors():
            return self._bucket.put_if_absent(key, data, f"{key} cannot be written")

    def delete(self, key: str) -> None:
        """Delete an object; it need not exist."""
        with _run_store_errors():
            self._bucket.delete(key, f"{key} cannot be deleted")

    def keys(self, folder: str, *, after: str = "") -> list[str]:
        """Return the sorted keys below a folder that follow the key ``after``."""
        with _run_store_errors():
            return sorted(self._bucket.keys(folder, f"{folder} cannot be listed", after=after))

    def folders(self) -> list[str]:
        """Return the names of the top-level folders."""
        with _run_store_errors():
            return self._bucket.folders("the jobs cannot be listed")

    def get_aged(self, key: str) -> tuple[dict[str, Any], float] | None:
        """Return a JSON object and its age in seconds; None if it does not exist or is invalid."""
        with _run_store_errors():
            found = self._bucket.get_aged(key, f"{key} cannot be read")
        if found is None:
            return None
        try:
            value = json.loads(found.data)
        except (ValueError, RecursionError):
            return None
        return (value, found.age_s) if isinstance(value, dict) else None

    def check_writable(self) -> None:
        """Check that the store can be written, and that it supports conditional writes.

        Raises:
            RunStoreError: If a check fails. Without conditional writes, two writers could write the
                same log.
        """
        # The first request may create the probe. The second one must find it, so if it succeeds,
        # the endpoint has ignored the condition.
        if self.put_if_absent(PROBE, b"{}\n") and self.put_if_absent(PROBE, b"{}\n"):
            raise RunStoreError(
                f"{self.url}: its endpoint ignores the condition If-None-Match and overwrites "
                "existing objects. Use a store with conditional writes, or set ETRAIN_RUNS to a "
                "folder"
            )
