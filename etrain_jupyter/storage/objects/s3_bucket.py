"""One prefix of one bucket: requests that are tried again within bounds, and whole parts moved.

What boto3 users set is what counts: ``AWS_PROFILE``, ``AWS_ENDPOINT_URL`` or
``AWS_ENDPOINT_URL_S3``, ``AWS_REGION``, ``~/.aws/config``, the role of the machine.
"""

from __future__ import annotations

import base64
import hashlib
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import boto3
import botocore.session
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    IncompleteReadError,
    ReadTimeoutError,
    ResponseStreamingError,
)
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError

from etrain_jupyter.errors import CheckpointError
from etrain_jupyter.storage.objects.bucket_owners import VARIABLE as OWNERS
from etrain_jupyter.storage.objects.bucket_owners import expected_owner
from etrain_jupyter.storage.objects.s3_deadlines import Deadline, current, guard
from etrain_jupyter.storage.objects.s3_messages import (
    code_of,
    is_of_credentials,
    place_of,
    words_of,
)

T = TypeVar("T")

PIECE_BYTES = 64 << 10
"""Of an answer, after each of which it is known that bytes still come."""
MOST_CHUNKS = 10_000
"""Of one multipart upload, which is S3's own limit."""

_MISSING = frozenset({"404", "NoSuchKey", "NoSuchUpload", "NotFound"})
_DENIED = frozenset({"403", "AccessDenied"})
_TAKEN = frozenset({"412", "PreconditionFailed"})
_TRANSIENT = frozenset(
    {
        "BadDigest",
        "XAmzContentSHA256Mismatch",
        "IncompleteBody",
        "ConditionalRequestConflict",
        "409",
    }
)
"""What boto3 does not try again: bytes that changed on their way, and another one's write in
flight, of which S3 cannot tell yet whether it will win."""


_MOST_DATED_BYTES = 1_000_000


@dataclass(frozen=True, kw_only=True)
class S3Limits:
    """How much at once, how long and how often."""

    chunk_bytes: int = 16 << 20
    """Of a multipart upload's parts and of the ranges of a download; what is larger is cut up."""
    num_threads: int = 4
    """Chunks that are under way at once."""
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 20.0
    """How long no byte may come."""
    num_requests: int = 4
    """Tries of one request, by boto3's standard mode with its pauses."""
    num_attempts: int = 3
    """Tries of what boto3 does not try again, such as a body that was cut short."""
    page_size: int = 1000
    """Keys that one request lists; there are as many requests as it takes."""
    patience_s: float = 60.0
    """After which no further attempt is begun."""
    deadline_s: float = 60.0
    """After which an attempt without many bytes is given up: a server may send one byte now and
    then for ever, and never be late by ``read_timeout_s``."""
    slowest_bytes_per_s: int = 64 << 10
    """An attempt that moves bytes may take so much longer as these take at this rate."""


def config_of(limits: S3Limits, retries: Mapping[str, Any]) -> Config:
    """Return the settings of the client; where it goes and as whom is left to the environment.

    Args:
        limits: Ours.
        retries: What the user has set of ``max_attempts`` and ``retry_mode``, which goes before.
    """
    return Config(
        connect_timeout=limits.connect_timeout_s,
        read_timeout=limits.read_timeout_s,
        retries={
            "mode": retries.get("retry_mode") or "standard",
            "total_max_attempts": retries.get("max_attempts") or limits.num_requests,
        },
        max_pool_connections=max(10, 2 * limits.num_threads),
        # Ours are SHA-256, always; others are not known to every endpoint.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        user_agent_extra="etrain-jupyter",
    )


@dataclass(frozen=True, kw_only=True)
class Stored:
    """What was uploaded."""

    sha256: str
    """Of all bytes, in hexadecimal digits."""
    checksum: str
    """As S3 tells it: in base64, and of a multipart upload that of its parts' and their number."""

    def is_vouched_for(self, known: dict[str, Any]) -> bool:
        """Whether S3 says of the object that it has these bytes; some leave the number out."""
        told = known.get("ChecksumSHA256")
        return told in (self.checksum, self.checksum.partition("-")[0])


class Bucket:
    """Access to the objects under a prefix; safe to use from several threads.

    All methods raise ``CheckpointError`` and nothing else.
    """

    def __init__(
        self,
        name: str,
        prefix: str,
        limits: S3Limits,
        *,
        setting: str = "checkpoint.to",
        make_client: Callable[[Config], Any] | None = None,
        owner: Callable[[], str] | None = None,
    ) -> None:
        self._make_client = make_client or _client_of_environment
        """Makes the client, anew when its credentials have expired."""
        self._owner = owner or (lambda: expected_owner(name))
        """Returns the account that the bucket must belong to; empty for any."""
        self.name = name
        self.prefix = prefix
        self.limits = limits
        self._setting = setting
        """What names this place, for messages."""
        self._client: Any = None
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return f"s3://{self.name}/{self.prefix}".rstrip("/")

    # --- objects ---

    def head(self, key: str, what: str) -> dict[str, Any] | None:
        """Return what S3 knows of an object; None if it is not there."""
        try:
            return self._if_there(what, "head_object", Key=key, ChecksumMode="ENABLED")
        except CheckpointError as exc:
            if self._is_absent(key, what, exc):
                return None
            raise

    def get(self, key: str, what: str, *, most_bytes: int | None = None) -> bytes | None:
        """Return a small object, or the beginning of a larger one; None if it is not there."""

        def fetch() -> bytes:
            return self._read_all(self._request("get_object", Key=key), most_bytes)

        try:
            return self._attempt(what, fetch)
        except _NotThereError:
            return None
        except CheckpointError as exc:
            if self._is_absent(key, what, exc):
                return None
            raise

    def put_if_absent(self, key: str, data: bytes, what: str, *, token: str = "") -> bool:
        """Store an object whose key is free; return False if it is not.

        Args:
            key: Below the prefix.
            data: Its bytes.
            what: What failed, for the message.
            token: Tells our own object from another one's: an answer may be lost after the object
                has been stored, and the request that is sent again then finds it there.
        """

        def put() -> None:
            self._request(
                "put_object",
                Key=key,
                Body=data,
                IfNoneMatch="*",
                ChecksumAlgorithm="SHA256",
                ChecksumSHA256=_base64_of(data),
                Metadata={"etrain": token},
            )

        try:
            self._attempt(what, put, num_bytes=len(data))
        except _TakenError:
            return bool(token) and self._is_ours(key, token, what)
        return True

    def _is_ours(self, key: str, token: str, what: str) -> bool:
        known = self.head(key, what)
        return known is not None and known.get("Metadata", {}).get("etrain") == token

    def put(self, key: str, data: bytes, what: str) -> None:
        """Make or replace a small object."""
        told = {"ChecksumAlgorithm": "SHA256", "ChecksumSHA256": _base64_of(data)}

        def put() -> None:
            self._request("put_object", Key=key, Body=data, **told)

        self._attempt(what, put, num_bytes=len(data))

    def get_dated(self, key: str, what: str) -> tuple[bytes, float, str] | None:
        """Return a small object, the instant of its writing and the answer's date, as S3 says."""

        def fetch() -> tuple[bytes, float, str]:
            answer = self._request("get_object", Key=key)
            data = self._read_all(answer, _MOST_DATED_BYTES)
            headers = answer["ResponseMetadata"]["HTTPHeaders"]
            return data, answer["LastModified"].timestamp(), headers.get("date", "")

        try:
            return self._attempt(what, fetch)
        except _NotThereError:
            return None

    def _read_all(self, answer: Mapping[str, Any], most_bytes: int | None = None) -> bytes:
        """Read an object, or its first bytes; a server that sends in time gets more time.

        Args:
            answer: That of ``get_object``.
            most_bytes: Where to stop; None for its end.

        Raises:
            IncompleteReadError: If the connection ended before that. Neither urllib3 nor botocore
                notices it where an answer is read in pieces.
        """
        size = int(answer["ContentLength"])
        size = size if most_bytes is None else min(size, most_bytes)
        data = bytearray()
        with answer["Body"] as body:
            while len(data) < size and (piece := body.read(min(PIECE_BYTES, size - len(data)))):
                data += piece
                if (deadline := current()) is not None:
                    deadline.allow(len(piece) / self.limits.slowest_bytes_per_s)
        if len(data) < size:
            raise IncompleteReadError(actual_bytes=len(data), expected_bytes=size)
        return bytes(data)

    def delete(self, key: str, what: str) -> None:
        """Remove an object; it is no error if it is not there."""
        self._if_there(what, "delete_object", Key=key)

    def keys(self, folder: str, what: str, *, after: str = "") -> list[str]:
        """Return the keys below a folder, however many there are, or those after one of them."""
        told = {"StartAfter": self._full(after)} if after else {}
        pages = self._pages(what, "list_objects_v2", self._full(folder) + "/", **told)
        return [self._below(item["Key"]) for page in pages for item in page.get("Contents", ())]

    def folders(self, what: str) -> list[str]:
        """Return the names of the folders at the top."""
        top = f"{self.prefix}/" if self.prefix else ""
        pages = self._pages(what, "list_objects_v2", top, Delimiter="/")
        found = [item["Prefix"] for page in pages for item in page.get("CommonPrefixes", ())]
        return [self._below(name).rstrip("/") for name in found]

    def uploads(self, folder: str, what: str) -> list[tuple[str, str]]:
        """Return key and id of the multipart uploads below a folder that were never completed."""
        pages = self._pages(what, "list_multipart_uploads", self._full(folder) + "/")
        found = [item for page in pages for item in page.get("Uploads", ())]
        return [(self._below(item["Key"]), item["UploadId"]) for item in found]

    def abort(self, key: str, upload: str, what: str) -> None:
        """Drop a multipart upload and what it has stored."""
        with suppress(_NotThereError):
            self._attempt(
                what, lambda: self._request("abort_multipart_upload", Key=key, UploadId=upload)
            )

    def _pages(
        self, what: str, operation: str, prefix: str, **arguments: str
    ) -> list[dict[str, Any]]:
        def fetch() -> list[dict[str, Any]]:
            found = []
            pages = (
                self._connect()
                .get_paginator(operation)
                .paginate(
                    Bucket=self.name,
                    Prefix=prefix,
                    PaginationConfig={"PageSize": self.limits.page_size},
                    **self._owned(),
                    **arguments,
                )
            )
            for page in pages:
                found.append(page)
                if (deadline := current()) is not None:
                    deadline.renew()
            return found

        return self._attempt(what, fetch)

    # --- whole parts ---

    def upload(
        self,
        key: str,
        source: memoryview | Path,
        size: int,
        what: str,
        progress: Callable[[int], None] = lambda num_bytes: None,
    ) -> Stored:
        """Store a part under a key that is free.

        Raises:
            CheckpointError: Also if the key is taken.
        """
        token = os.urandom(8).hex()
        if size <= self.limits.chunk_bytes:
            data = _read(source, 0, size)
            is_mine = self.put_if_absent(key, data, what, token=token)
            digest = hashlib.sha256(data)
            stored = Stored(sha256=digest.hexdigest(), checksum=_base64_of(data))
            progress(size)
        else:
            is_mine, stored = self._upload_in_chunks(key, source, size, token, what, progress)
        if not is_mine:
            raise CheckpointError(f"{key} is there already in {self}; keys are never used twice")
        return stored

    def _upload_in_chunks(
        self,
        key: str,
        source: memoryview | Path,
        size: int,
        token: str,
        what: str,
        progress: Callable[[int], None],
    ) -> tuple[bool, Stored]:
        begin = {"ChecksumAlgorithm": "SHA256", "Metadata": {"etrain": token}}
        upload: str = self._attempt(
            what, lambda: self._request("create_multipart_upload", Key=key, **begin)["UploadId"]
        )
        try:
            parts, stored = self._upload_chunks(key, upload, source, size, what, progress)
            is_mine = self._complete(key, upload, parts, token, what)
        except BaseException:
            is_mine = False
            raise
        finally:
            if not is_mine:
                with suppress(CheckpointError):  # prune tries again
                    self.abort(key, upload, what)
        return is_mine, stored

    def _upload_chunks(
        self,
        key: str,
        upload: str,
        source: memoryview | Path,
        size: int,
        what: str,
        progress: Callable[[int], None],
    ) -> tuple[list[dict[str, Any]], Stored]:
        chunk = max(self.limits.chunk_bytes, -(-size // MOST_CHUNKS))
        starts = range(0, size, chunk)

        def put(first: int) -> dict[str, Any]:
            data = _read(source, first, min(chunk, size - first))
            told = self._upload_chunk(key, upload, first // chunk + 1, data, what)
            progress(len(data))
            return told

        with self._threads() as pool:
            under_way = [pool.submit(put, first) for first in starts]
            whole = hashlib.sha256()
            for first in starts:
                whole.update(_read(source, first, min(chunk, size - first)))
            parts = _results(under_way)
        digests = b"".join(base64.b64decode(part["ChecksumSHA256"]) for part in parts)
        checksum = f"{_base64_of(digests)}-{len(parts)}"
        return parts, Stored(sha256=whole.hexdigest(), checksum=checksum)

    def _complete(
        self, key: str, upload: str, parts: list[dict[str, Any]], token: str, what: str
    ) -> bool:
        done = {"UploadId": upload, "MultipartUpload": {"Parts": parts}, "IfNoneMatch": "*"}
        try:
            self._attempt(what, lambda: self._request("complete_multipart_upload", Key=key, **done))
        except (_TakenError, _NotThereError):
            # Completed by a request whose answer was lost, or the key is another one's.
            return self._is_ours(key, token, what)
        return True

    def _upload_chunk(
        self, key: str, upload: str, number: int, data: bytes, what: str
    ) -> dict[str, Any]:
        digest = _base64_of(data)
        told = {"UploadId": upload, "PartNumber": number, "ChecksumAlgorithm": "SHA256"}
        told["ChecksumSHA256"] = digest
        answer = self._attempt(
            what,
            lambda: self._request("upload_part", Key=key, Body=data, **told),
            num_bytes=len(data),
        )
        return {"ETag": answer["ETag"], "PartNumber": number, "ChecksumSHA256": digest}

    def download(self, key: str, size: int, target: Path, what: str) -> None:
        """Write the first ``size`` bytes of an object to a new file, several ranges at once."""
        chunk = self.limits.chunk_bytes
        with _new_file(target, what) as file, self._threads() as pool:

            def fetch(first: int) -> None:
                num_bytes = min(chunk, size - first)
                self._attempt(
                    what, lambda: self._fetch_range(key, file, first, size), num_bytes=num_bytes
                )

            _results([pool.submit(fetch, first) for first in range(0, size, chunk)])

    def _fetch_range(self, key: str, file: int, first: int, size: int) -> None:
        end = min(first + self.limits.chunk_bytes, size)
        answer = self._request("get_object", Key=key, Range=f"bytes={first}-{end - 1}")
        with answer["Body"] as body:
            while data := body.read(1 << 20):
                first += os.pwrite(file, data, first)
        if first != end:
            raise _CutShortError(f"{end - first} bytes are missing")

    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.limits.num_threads, thread_name_prefix="etrain-s3")

    # --- requests ---

    def _if_there(self, what: str, operation: str, **arguments: Any) -> dict[str, Any] | None:
        try:
            return self._attempt(what, lambda: self._request(operation, **arguments))
        except _NotThereError:
            return None

    def _is_absent(self, key: str, what: str, exc: CheckpointError) -> bool:
        """Tell whether access was denied only because there is no such object.

        S3 says so to a role that may not list the whole bucket, which none of ours needs to.
        """
        if exc.__cause__ is None or code_of(exc.__cause__) not in _DENIED:
            return False
        try:
            pages = self._pages(what, "list_objects_v2", self._full(key))
            return all(
                item["Key"] != self._full(key)
                for page in pages
                for item in page.get("Contents", ())
            )
        except CheckpointError:
            return False

    def _attempt(self, what: str, act: Callable[[], T], *, num_bytes: int = 0) -> T:
        """Do something, again if that may help, until the bounds are reached.

        Args:
            what: What failed, for the message.
            act: Makes the requests.
            num_bytes: How many it sends or fetches, if it is known.
        """
        limits = self.limits
        last_begin = time.monotonic() + limits.patience_s
        most_s = limits.deadline_s + num_bytes / limits.slowest_bytes_per_s
        for attempt in range(1, limits.num_attempts + 1):
            deadline = Deadline(most_s)
            try:
                with deadline:
                    return act()
            except (
                BotoCoreError,
                ClientError,
                HTTPError,
                OSError,
                ResponseParserError,
            ) as exc:
                if deadline.is_over:
                    raise CheckpointError(
                        f"{what} in {self}: S3 answers so slowly that the request was given up "
                        f"after {most_s:.0f} s. Look at the network"
                    ) from exc
                code = code_of(exc)
                if code in _MISSING:
                    raise _NotThereError(f"{what} in {self}: it is not there") from exc
                if code in _TAKEN:
                    raise _TakenError(f"{what} in {self}: it is there already") from exc
                if is_of_credentials(exc):
                    self._client = None  # the next one reads the files again
                is_last = attempt == limits.num_attempts or time.monotonic() > last_begin
                if is_last or not _may_help_again(exc):
                    kind = AccessDeniedError if code in _DENIED else CheckpointError
                    raise kind(f"{what} in {self}: {self._words_of(exc)}") from exc
            time.sleep(random.uniform(0, 0.2 * 2**attempt))
        raise AssertionError("unreachable")

    def _request(self, operation: str, *, Key: str, **arguments: Any) -> dict[str, Any]:
        call = getattr(self._connect(), operation)
        place = {"Bucket": self.name, "Key": self._full(Key), **self._owned()}
        answer: dict[str, Any] = call(**place, **arguments)
        return answer

    def _owned(self) -> dict[str, str]:
        """Return the argument that has S3 refuse a request if the bucket is somebody else's."""
        owner = self._owner()
        return {"ExpectedBucketOwner": owner} if owner else {}

    def _words_of(self, exc: Exception) -> str:
        """Return what went wrong; S3 says no more than "access denied" of a wrong owner."""
        words = words_of(exc, setting=self._setting)
        if code_of(exc) not in _DENIED or not (owner := self._owned().get("ExpectedBucketOwner")):
            return words
        if not self._is_open_without_owner():
            return f"{words}. If the role may do it, the bucket is not one of account {owner}"
        return (
            f"the bucket does not belong to account {owner}, but to another one: it may have been "
            "deleted and made again by a stranger. Nothing of it was used. If it is meant, name "
            f"its account: {OWNERS}={self.name}=ACCOUNT, or bucket_owner in pools.yaml for the "
            "bucket of a pool"
        )

    def _is_open_without_owner(self) -> bool:
        """Tell whether the same place can be listed if no owner is expected."""
        try:
            folder = f"{self.prefix}/" if self.prefix else ""
            with Deadline(self.limits.deadline_s):
                self._connect().list_objects_v2(Bucket=self.name, Prefix=folder, MaxKeys=1)
        except (BotoCoreError, ClientError, HTTPError, OSError):
            return False
        return True

    def _connect(self) -> Any:
        with self._lock:
            if self._client is None:
                core = botocore.session.get_session()
                retries = {name: _asked_of(core, name) for name in _RETRIES}
                self._client = guard(self._make_client(config_of(self.limits, retries)))
            return self._client

    def endpoint(self) -> str:
        """Return where requests go, for messages."""
        return place_of(self._connect().meta.endpoint_url)

    def _full(self, key: str) -> str:
        return f"{self.prefix}/{key}" if self.prefix else key

    def _below(self, key: str) -> str:
        return key[len(self.prefix) + 1 :] if self.prefix else key


class AccessDeniedError(CheckpointError):
    """S3 does not let us."""


class _NotThereError(CheckpointError):
    """There is no such object, or no such upload."""


class _TakenError(CheckpointError):
    """The key is not free."""


class _CutShortError(OSError):
    """A body ended before its end."""


def _client_of_environment(config: Config) -> Any:
    """Return a client for what boto3's users set."""
    # A session of our own: the default one is shared, and never looks again.
    session = boto3.session.Session(botocore_session=botocore.session.get_session())
    return session.client("s3", region_name=session.region_name or "us-east-1", config=config)


_RETRIES = {"max_attempts": "AWS_MAX_ATTEMPTS", "retry_mode": "AWS_RETRY_MODE"}


def _asked_of(core: botocore.session.Session, name: str) -> Any:
    """Return what the environment or the profile says; None if the user has said nothing."""
    if _RETRIES[name] in os.environ or name in core.get_scoped_config():
        return core.get_config_variable(name)
    return None


def _may_help_again(exc: Exception) -> bool:
    """Whether another attempt may end otherwise; boto3 has tried the rest again already."""
    if isinstance(exc, ClientError):
        # A bare status instead of a code: the answer was cut short. Only HEAD's has no body.
        is_cut_short = code_of(exc).isdecimal() and not exc.operation_name.startswith("Head")
        return is_cut_short or code_of(exc) in _TRANSIENT
    if isinstance(exc, BotoCoreError):  # some are an OSError too
        return isinstance(exc, _IN_BODIES)
    return isinstance(exc, HTTPError | _CutShortError | ConnectionError | TimeoutError)


_IN_BODIES = (ResponseStreamingError, IncompleteReadError, ReadTimeoutError)
"""What comes of reading a body, of which boto3 has let go by then."""


def _results(futures: list[Future[T]]) -> list[T]:
    """Return what all came to; let none go on if one has failed."""
    try:
        return [future.result() for future in futures]
    except BaseException:
        for future in futures:
            future.cancel()
        raise


@contextmanager
def _new_file(path: Path, what: str) -> Iterator[int]:
    """Open a file that is not there yet, for several threads to write to."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as exc:
        raise CheckpointError(f"{what}: {path} cannot be made ({exc.strerror})") from exc
    try:
        yield file
    finally:
        os.close(file)


def _read(source: memoryview | Path, first: int, size: int) -> bytes:
    if isinstance(source, memoryview):
        return bytes(source[first : first + size])
    with source.open("rb") as file:
        return os.pread(file.fileno(), size, first)


def _base64_of(data: bytes) -> str:
    return base64.b64encode(hashlib.sha256(data).digest()).decode()
