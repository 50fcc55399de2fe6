"""Upload and download large objects in parallel chunks, and compute the SHA-256 of all bytes.

boto3's ``TransferManager`` cannot replace this: it has no conditional writes (``IfNoneMatch``),
and its threads read bodies outside of our deadlines.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from etrain_jupyter.errors import StoreError
from etrain_jupyter.storage.objects.s3_requests import CutShortError, S3Requests

T = TypeVar("T")

MAX_CHUNKS = 10_000
"""S3's limit on the number of parts of a multipart upload."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Checksums of an uploaded object."""

    sha256: str
    """SHA-256 of all bytes, in hexadecimal digits."""
    checksum: str
    """S3's checksum in base64. For a multipart upload, this is the checksum of its parts'
    checksums, followed by ``-`` and the number of parts."""
    chunk_bytes: int
    """Size of each chunk but the last."""
    chunks: tuple[str, ...]
    """SHA-256 of each chunk, in hexadecimal digits; S3 has verified them."""

    def is_confirmed_by(self, known: dict[str, Any]) -> bool:
        """Return whether S3 reports this checksum; some endpoints omit the number of parts."""
        return known.get("ChecksumSHA256") in (self.checksum, self.checksum.partition("-")[0])


def upload_chunks(
    s3: S3Requests,
    key: str,
    upload: str,
    source: memoryview | Path,
    size: int,
    what: str,
    progress: Callable[[int], None],
) -> tuple[list[dict[str, Any]], Stored]:
    """Send all parts of a multipart upload.

    Returns:
        The list of parts for ``complete_multipart_upload``, and the checksums.
    """
    chunk = max(s3.limits.chunk_bytes, -(-size // MAX_CHUNKS))
    starts = range(0, size, chunk)

    # Runs in the pool. Deadlines belong to a thread, so each chunk has its own deadline and
    # retries. After a broken connection, only 16 MiB are transferred again, not the whole object.
    def put(first: int) -> dict[str, Any]:
        data = read_chunk(source, first, min(chunk, size - first))
        part: dict[str, Any] = {
            "PartNumber": first // chunk + 1,
            "ChecksumSHA256": base64_sha256(data),
        }
        target = {"Key": key, "UploadId": upload, "ChecksumAlgorithm": "SHA256"}
        sent = s3.send(what, "upload_part", Body=data, num_bytes=len(data), **target, **part)
        progress(len(data))
        return {"ETag": sent["ETag"], **part}

    with _threads(s3) as pool:
        futures = [pool.submit(put, first) for first in starts]
        # S3 has no SHA-256 of the whole object, so compute it while the chunks are sent. A file is
        # read twice, usually from the page cache.
        whole = hashlib.sha256()
        for first in starts:
            whole.update(read_chunk(source, first, min(chunk, size - first)))
        parts = _results(futures)
    digests = [base64.b64decode(part["ChecksumSHA256"]) for part in parts]
    return parts, Stored(
        sha256=whole.hexdigest(),
        checksum=f"{base64_sha256(b''.join(digests))}-{len(parts)}",
        chunk_bytes=chunk,
        chunks=tuple(digest.hex() for digest in digests),
    )


def download_chunks(s3: S3Requests, key: str, size: int, target: Path, what: str) -> None:
    """Write the first ``size`` bytes of an object to a new file, several ranges at once."""
    chunk = s3.limits.chunk_bytes
    # Use a descriptor instead of a file object. Its pwrite needs no shared position, so several
    # threads can write their ranges at the same time.
    try:
        file = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as exc:
        raise StoreError(f"{what}: {target} cannot be created ({exc.strerror})") from exc

    def fetch(first: int) -> None:
        end = min(first + chunk, size)
        s3.attempt(what, lambda: _fetch_range(s3, key, file, first, end), num_bytes=end - first)

    try:
        with _threads(s3) as pool:
            _results([pool.submit(fetch, first) for first in range(0, size, chunk)])
    finally:
        os.close(file)


def _fetch_range(s3: S3Requests, key: str, file: int, first: int, end: int) -> None:
    response = s3.request("get_object", Key=key, Range=f"bytes={first}-{end - 1}")
    with response["Body"] as body:
        while data := body.read(1 << 20):
            first += os.pwrite(file, data, first)
    if first != end:
        raise CutShortError(f"{end - first} bytes are missing")


def _threads(s3: S3Requests) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(s3.limits.num_threads, thread_name_prefix="etrain-s3")


def _results(futures: list[Future[T]]) -> list[T]:
    try:
        return [future.result() for future in futures]
    except BaseException:
        # Do not start the chunks that are still queued. Those in transfer run to completion,
        # because leaving the pool's context waits for its threads.
        for future in futures:
            future.cancel()
        raise


def read_chunk(source: memoryview | Path, first: int, size: int) -> bytes:
    """Return ``size`` bytes of the source, starting at ``first``."""
    if isinstance(source, memoryview):
        return bytes(source[first : first + size])
    with source.open("rb") as file:
        return os.pread(file.fileno(), size, first)


def base64_sha256(data: bytes) -> str:
    """Return the SHA-256 in base64, the format that S3 uses."""
    return base64.b64encode(hashlib.sha256(data).digest()).decode()
