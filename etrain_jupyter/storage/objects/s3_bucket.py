"""Objects below one prefix of a bucket: small objects, listings, and multipart transfers."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, TypeVar

from botocore.exceptions import IncompleteReadError

from etrain_jupyter.errors import StoreError
from etrain_jupyter.storage.objects.s3_deadlines import current
from etrain_jupyter.storage.objects.s3_requests import (
    AccessDeniedError,
    CutShortError,
    MissingError,
    S3Requests,
    TakenError,
)
from etrain_jupyter.storage.objects.s3_transfers import (
    Stored,
    base64_sha256,
    download_chunks,
    read_chunk,
    upload_chunks,
)

T = TypeVar("T")

READ_BYTES = 64 << 10
"""Bytes of a body to read before the deadline is extended."""
MAX_SMALL_BYTES = 1_000_000


@dataclass(frozen=True, kw_only=True)
class AgedObject:
    """A small object and its age."""

    data: bytes
    age_s: float
    """Seconds since it was written. Only S3's clock is used, so local clocks do not matter."""


class Bucket(S3Requests):
    """The objects under a prefix; safe to use from several threads.

    In all methods, ``what`` is the beginning of the error message, such as ``"lease.json cannot be
    read"``. All methods raise ``StoreError`` and nothing else.
    """

    # --- small objects ---

    def head(self, key: str, what: str) -> dict[str, Any] | None:
        """Return the object's metadata; None if it does not exist."""
        return self._unless_absent(
            key, what, lambda: self.request("head_object", Key=key, ChecksumMode="ENABLED")
        )

    def get(self, key: str, what: str, *, most_bytes: int | None = None) -> bytes | None:
        """Return an object, at most its first ``most_bytes``; None if it does not exist."""

        def fetch() -> bytes:
            return self._read_body(self.request("get_object", Key=key), most_bytes)

        return self._unless_absent(key, what, fetch)

    def get_range(
        self,
        key: str,
        first: int,
        size: int,
        what: str,
        *,
        etag: str = "",
        check: Callable[[bytes], bool] = lambda data: True,
    ) -> bytes:
        """Return ``size`` bytes of an object, starting at ``first``.

        Request, body and check are retried together, because bytes that fail the check may have
        been corrupted in transit.

        Args:
            key: Relative to the prefix.
            first: Offset of the first byte.
            size: Number of bytes, at least 1.
            what: The action, for the error message.
            etag: The version that the object must have; empty for any.
            check: Returns False for bytes that must not be used.

        Raises:
            MissingError: If the object does not exist.
            TakenError: If the object has another version.
            StoreError: After the last attempt, and if the bytes never pass the check.
        """
        arguments = {"Range": f"bytes={first}-{first + size - 1}"}
        if etag:
            arguments["IfMatch"] = etag

        def fetch() -> bytes:
            data = self._read_body(self.request("get_object", Key=key, **arguments))
            if len(data) != size:
                raise CutShortError(f"got {len(data)} bytes instead of {size}")
            if not check(data):
                raise CutShortError("the bytes differ from their SHA-256 digest")
            return data

        return self.attempt(what, fetch, num_bytes=size)

    def get_aged(self, key: str, what: str) -> AgedObject | None:
        """Return a small object and its age; None if it does not exist."""

        def fetch() -> AgedObject:
            response = self.request("get_object", Key=key)
            data = self._read_body(response, MAX_SMALL_BYTES)
            date = response["ResponseMetadata"]["HTTPHeaders"].get("date", "")
            try:
                now = parsedate_to_datetime(date)
            except ValueError as exc:
                raise StoreError(f"{what} in {self}: the response has no Date ({date!r})") from exc
            age_s = (now - response["LastModified"]).total_seconds()
            return AgedObject(data=data, age_s=max(0.0, age_s))

        try:
            return self.attempt(what, fetch)
        except MissingError:
            return None

    def put(self, key: str, data: bytes, what: str) -> None:
        """Create or replace a small object."""
        self._put(key, data, what)

    def _put(self, key: str, data: bytes, what: str, **arguments: Any) -> None:
        arguments |= {"ChecksumAlgorithm": "SHA256", "ChecksumSHA256": base64_sha256(data)}
        self.send(what, "put_object", Key=key, Body=data, num_bytes=len(data), **arguments)

    def put_if_absent(self, key: str, data: bytes, what: str, *, token: str = "") -> bool:
        """Create an object if the key is free; return False if it exists.

        Args:
            key: Relative to the prefix.
            data: The object's bytes.
            what: The action, for the error message.
            token: Stored with the object to identify it. If the response to a successful request is
                lost, the retry recognizes our own object under the key, and returns True.
        """
        # Why the token is needed:
        #
        #   client                                  S3
        #   PUT key, If-None-Match: *  -----------> creates the object
        #                         X <-------------- 200, but the response is lost
        #   PUT key (a retry)  -------------------> 412: the key exists
        #   HEAD key  ----------------------------> metadata has our token: it is our own object
        try:
            self._put(key, data, what, IfNoneMatch="*", Metadata={"etrain": token})
        except TakenError:
            return bool(token) and self._has_token(key, token, what)
        return True

    def delete(self, key: str, what: str) -> None:
        """Delete an object; it need not exist."""
        with suppress(MissingError):
            self.send(what, "delete_object", Key=key)

    def _has_token(self, key: str, token: str, what: str) -> bool:
        known = self.head(key, what)
        return known is not None and known.get("Metadata", {}).get("etrain") == token

    def _read_body(self, response: Mapping[str, Any], most_bytes: int | None = None) -> bytes:
        size = int(response["ContentLength"])
        size = size if most_bytes is None else min(size, most_bytes)
        data = bytearray()
        with response["Body"] as body:
            while len(data) < size and (piece := body.read(min(READ_BYTES, size - len(data)))):
                data += piece
                # The caller does not know the size in advance, so the deadline grows with the
                # bytes. A server that sends less than slowest_bytes_per_s still exceeds it.
                if (deadline := current()) is not None:
                    deadline.extend(len(piece) / self.limits.slowest_bytes_per_s)
        # Neither urllib3 nor botocore detects a truncated body that is read in pieces.
        if len(data) < size:
            raise IncompleteReadError(actual_bytes=len(data), expected_bytes=size)
        return bytes(data)

    def _unless_absent(self, key: str, what: str, fetch: Callable[[], T]) -> T | None:
        try:
            return self.attempt(what, fetch)
        except MissingError:
            return None
        except AccessDeniedError:
            # For a missing object, a role that may not list the whole bucket gets "access denied"
            # instead of "not found". It may list our prefix, which distinguishes the two.
            with suppress(StoreError):
                full = self.full_key(key)
                if full not in [item["Key"] for item in self._listed(what, full)]:
                    return None
            raise

    # --- listings ---

    def keys(self, folder: str, what: str, *, after: str = "") -> list[str]:
        """Return all keys below a folder, or those after the key ``after``."""
        arguments = {"StartAfter": self.full_key(after)} if after else {}
        found = self._listed(what, self.full_key(f"{folder}/"), **arguments)
        return [self.relative_key(item["Key"]) for item in found]

    def versions(self, what: str) -> dict[str, tuple[int, str]]:
        """Return size and ETag of all objects below the prefix, by key."""
        found = self._listed(what, self.full_key(""))
        return {
            self.relative_key(item["Key"]): (int(item["Size"]), str(item["ETag"])) for item in found
        }

    def folders(self, what: str) -> list[str]:
        """Return the names of the folders directly below the prefix."""
        pages = self.pages(what, "list_objects_v2", self.full_key(""), Delimiter="/")
        found = [item["Prefix"] for page in pages for item in page.get("CommonPrefixes", ())]
        return [self.relative_key(name).rstrip("/") for name in found]

    def _listed(self, what: str, prefix: str, **arguments: str) -> list[dict[str, Any]]:
        """Return all objects whose full key has the prefix."""
        pages = self.pages(what, "list_objects_v2", prefix, **arguments)
        return [item for page in pages for item in page.get("Contents", ())]

    # --- multipart uploads and downloads ---

    def uploads(self, folder: str, what: str) -> list[tuple[str, str]]:
        """Return the key and ID of the incomplete multipart uploads below a folder."""
        pages = self.pages(what, "list_multipart_uploads", self.full_key(f"{folder}/"))
        found = [item for page in pages for item in page.get("Uploads", ())]
        return [(self.relative_key(item["Key"]), item["UploadId"]) for item in found]

    def abort(self, key: str, upload: str, what: str) -> None:
        """Abort a multipart upload and delete its parts."""
        with suppress(MissingError):
            self.send(what, "abort_multipart_upload", Key=key, UploadId=upload)

    def upload(
        self,
        key: str,
        source: memoryview | Path,
        size: int,
        what: str,
        progress: Callable[[int], None] = lambda num_bytes: None,
    ) -> Stored:
        """Create an object from bytes or a file, in chunks if it is large.

        Raises:
            StoreError: If the upload fails, or the key exists.
        """
        token = os.urandom(8).hex()
        if size <= self.limits.chunk_bytes:
            data = read_chunk(source, 0, size)
            is_ours = self.put_if_absent(key, data, what, token=token)
            digest = hashlib.sha256(data).hexdigest()
            checksum = base64_sha256(data)
            stored = Stored(sha256=digest, checksum=checksum, chunk_bytes=size, chunks=(digest,))
            progress(size)
        else:
            is_ours, stored = self._upload_in_chunks(key, source, size, token, what, progress)
        if not is_ours:
            raise StoreError(f"{key} already exists in {self}; keys are never used twice")
        return stored

    def replace_file(self, key: str, path: Path, what: str) -> None:
        """Create or replace an object with a file's bytes, in chunks if it is large."""
        size = path.stat().st_size
        if size <= self.limits.chunk_bytes:
            self.put(key, path.read_bytes(), what)
        else:
            # `upload` only creates. A reader finds no object until the upload is complete.
            self.delete(key, what)
            self.upload(key, path, size, what)

    def download(self, key: str, size: int, target: Path, what: str) -> None:
        """Write the first ``size`` bytes of an object to a new file, in chunks if it is large."""
        download_chunks(self, key, size, target, what)

    def _upload_in_chunks(
        self,
        key: str,
        source: memoryview | Path,
        size: int,
        token: str,
        what: str,
        progress: Callable[[int], None],
    ) -> tuple[bool, Stored]:
        begin: dict[str, Any] = {"ChecksumAlgorithm": "SHA256", "Metadata": {"etrain": token}}
        upload = str(self.send(what, "create_multipart_upload", Key=key, **begin)["UploadId"])
        is_ours = False
        try:
            parts, stored = upload_chunks(self, key, upload, source, size, what, progress)
            is_ours = self._complete(key, upload, parts, token, what)
        finally:
            # S3 charges for the parts of an upload that is neither completed nor aborted.
            if not is_ours:
                with suppress(StoreError):  # the next prune of the checkpoints aborts it
                    self.abort(key, upload, what)
        return is_ours, stored

    def _complete(
        self, key: str, upload: str, parts: list[dict[str, Any]], token: str, what: str
    ) -> bool:
        target: dict[str, Any] = {"Key": key, "UploadId": upload, "IfNoneMatch": "*"}
        try:
            self.send(what, "complete_multipart_upload", MultipartUpload={"Parts": parts}, **target)
        except (TakenError, MissingError):
            # Either an earlier attempt completed it and the response was lost, or another writer
            # has the key.
            return self._has_token(key, token, what)
        return True
