"""The objects below one URL of a run store; whatever fails is a ``RunStoreError``."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etrain_jupyter.config.store_url import split_s3_url
from etrain_jupyter.errors import CheckpointError, RunStoreError

if TYPE_CHECKING:
    from etrain_jupyter.storage.objects.s3_bucket import Bucket

DEADLINE_S = 20.0
"""Most time for one request without many bytes, however slowly it is answered."""
PROBE = ".etrain-runs"
"""An object at the root of each run store: proof that it can be written, and conditionally."""


class RunObjects:
    """Reads and writes whole objects. Nothing is asked before the first method needs it.

    Args:
        url: ``s3://bucket/prefix``, of a run store or of one job in it.
        patience_s: After which a request is not tried again.
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
                # boto3 comes with this import, which takes a moment: only where it is needed.
                from etrain_jupyter.storage.objects.s3_bucket import Bucket, S3Limits
            except ModuleNotFoundError as exc:
                raise RunStoreError(
                    f"the run store {self.url} needs boto3, which this Python lacks "
                    f'({sys.executable}). Install it there: pip install "etrain-jupyter[s3]"'
                ) from exc
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
        """Return an object, or the beginning of a larger one; None if it is not there."""
        with _as_run_store():
            return self._bucket.get(key, f"{key} cannot be read", most_bytes=most_bytes)

    def put(self, key: str, data: bytes) -> None:
        """Make or replace an object."""
        with _as_run_store():
            self._bucket.put(key, data, f"{key} cannot be written")

    def put_file(self, key: str, path: Path) -> None:
        """Make or replace an object with the bytes of a file; a large one is sent in pieces."""
        what, size = f"{key} cannot be written", path.stat().st_size
        with _as_run_store():
            if size <= self._bucket.limits.chunk_bytes:
                self._bucket.put(key, path.read_bytes(), what)
            else:
                self._bucket.delete(key, what)
                self._bucket.upload(key, path, size, what)

    def get_file(self, key: str, path: Path) -> bool:
        """Write an object to a new file; return False if it is not there."""
        what = f"{key} cannot be read"
        with _as_run_store():
            known = self._bucket.head(key, what)
            if known is not None:
                self._bucket.download(key, known["ContentLength"], path, what)
            return known is not None

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Make an object whose key is free; return False if it is not.

        False may also mean that it is ours: of a request that was sent twice, the answer to the
        first may have been lost.
        """
        with _as_run_store():
            return self._bucket.put_if_absent(key, data, f"{key} cannot be written")

    def delete(self, key: str) -> None:
        """Remove an object; it is no error if it is not there."""
        with _as_run_store():
            self._bucket.delete(key, f"{key} cannot be removed")

    def keys(self, folder: str, *, after: str = "") -> list[str]:
        """Return the keys below a folder that come after another one, in order."""
        with _as_run_store():
            return sorted(self._bucket.keys(folder, f"{folder} cannot be listed", after=after))

    def folders(self) -> list[str]:
        """Return the names of the folders at the top."""
        with _as_run_store():
            return self._bucket.folders("the jobs cannot be listed")

    def get_aged(self, key: str) -> tuple[dict[str, Any], float] | None:
        """Return a JSON object and the seconds since it was written; None without a readable one.

        Both instants are S3's own, so that no clock of ours matters.
        """
        with _as_run_store():
            found = self._bucket.get_dated(key, f"{key} cannot be read")
        if found is None:
            return None
        data, written_at, told_at = found
        now = parsedate_to_datetime(told_at).timestamp() if told_at else time.time()
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            return None
        return (value, max(0.0, now - written_at)) if isinstance(value, dict) else None

    def check_writable(self) -> None:
        """Write a small object, on the condition that it is not there, and see that S3 minds it.

        Raises:
            RunStoreError: If the store cannot be written, or would let two writers write one log.
        """
        if self.put_if_absent(PROBE, b"{}\n") and self.put_if_absent(PROBE, b"{}\n"):
            raise RunStoreError(
                f"{self.url}: its endpoint overwrites what is there although it was asked not to "
                "(If-None-Match). Use a store with conditional writes, or set ETRAIN_RUNS to a "
                "folder"
            )


@contextlib.contextmanager
def _as_run_store() -> Iterator[None]:
    try:
        yield
    except CheckpointError as exc:
        raise RunStoreError(f"the run store: {exc}") from exc
