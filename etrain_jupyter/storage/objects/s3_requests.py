"""Send S3 requests with retries, deadlines and the expected bucket owner.

The client is configured as boto3 users expect: ``AWS_PROFILE``, ``AWS_ENDPOINT_URL`` or
``AWS_ENDPOINT_URL_S3``, ``AWS_REGION``, ``~/.aws/config``, the machine's role.

obstore 0.12.1 cannot replace boto3. It completes multipart uploads without a condition, it can
neither list nor abort those of a killed process, it does not return the headers ``Date`` and
``x-amz-checksum-sha256``, and its requests hang in a forked process.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import boto3
import botocore.session
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionClosedError,
    ConnectTimeoutError,
    IncompleteReadError,
    ReadTimeoutError,
    ResponseStreamingError,
)
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError

from etrain_jupyter.errors import StoreError
from etrain_jupyter.storage.objects.bucket_owners import VARIABLE as OWNERS
from etrain_jupyter.storage.objects.bucket_owners import expected_owner
from etrain_jupyter.storage.objects.s3_deadlines import Deadline, current, guard
from etrain_jupyter.storage.objects.s3_messages import (
    CREDENTIAL_CODES,
    code_of,
    endpoint_of,
    is_credentials_error,
    message_of,
)

T = TypeVar("T")

PROBE_S = 5.0
"""Timeout of the request that checks whether access was denied because of the bucket's owner."""

_MISSING = frozenset({"404", "NoSuchKey", "NoSuchUpload", "NotFound"})
_DENIED = frozenset({"403", "AccessDenied"})
_TAKEN = frozenset({"412", "PreconditionFailed"})
# boto3 retries these itself.
_UNAVAILABLE = frozenset(
    {
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "RequestLimitExceeded",
        "503",
        "ServiceUnavailable",
        "500",
        "InternalError",
    }
)
# boto3 does not retry these.
_TRANSIENT = frozenset(
    {
        "BadDigest",  # these three: the bytes were corrupted or cut off in transit
        "XAmzContentSHA256Mismatch",
        "IncompleteBody",
        "ConditionalRequestConflict",  # another conditional write of the key is in progress
        "409",
    }
)


class AccessDeniedError(StoreError):
    """The role lacks a permission, or the bucket belongs to another account."""


class MissingError(StoreError):
    """The object or the multipart upload does not exist."""


class TakenError(StoreError):
    """The key of a conditional write already exists."""


class CutShortError(OSError):
    """A response body ended early."""


@dataclass(frozen=True, kw_only=True)
class S3Limits:
    """Sizes, timeouts and retry limits."""

    chunk_bytes: int = 16 << 20
    """Size of an upload's parts and of a download's ranges; larger objects are split."""
    num_threads: int = 4
    """Maximum number of chunks transferred at once."""
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 20.0
    """Maximum time between two bytes of a response."""
    num_requests: int = 4
    """Attempts per request in boto3's standard retry mode, with its backoff."""
    num_attempts: int = 3
    """Attempts after errors that boto3 does not retry, such as a truncated body."""
    repeats_unavailable: bool = False
    """True to start another attempt if S3 was unavailable in all of boto3's attempts. Set it for
    requests whose failure ends a job; a failed checkpoint is followed by the next one."""
    page_size: int = 1000
    """Keys per list request; all pages are read."""
    patience_s: float = 60.0
    """No attempt starts more than this many seconds after the first."""
    deadline_s: float = 60.0
    """Timeout of a whole attempt. A server that sends one byte now and then never exceeds
    ``read_timeout_s``."""
    slowest_bytes_per_s: int = 64 << 10
    """Slowest acceptable transfer rate: extends ``deadline_s`` in proportion to the bytes."""


class S3Requests:
    """Requests to one bucket, retried within the limits; safe to use from several threads.

    Args:
        name: The bucket.
        prefix: Prepended to all keys, without a trailing ``/``; may be empty.
        limits: Sizes, timeouts and retry limits.
        setting: The setting that names the bucket, for messages.
        make_client: Creates a boto3 client; by default from the environment. Called again when the
            client's credentials have expired.
        owner: Returns the account that the bucket must belong to, empty for any; by default the one
            that the environment names.
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
        self.name = name
        self.prefix = prefix
        self.limits = limits
        self._setting = setting
        self._make_client = make_client or client_of_environment
        self._owner = owner or (lambda: expected_owner(name))
        self._client: Any = None
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return f"s3://{self.name}/{self.prefix}".rstrip("/")

    def attempt(self, what: str, act: Callable[[], T], *, num_bytes: int = 0) -> T:
        """Call ``act``, and retry after transient errors within the limits.

        Args:
            what: The action, for the error message.
            act: Sends the requests.
            num_bytes: Bytes to transfer, if known: extends the deadline.

        Raises:
            StoreError: If the last attempt failed; its subclasses distinguish expected cases.
        """
        # Three layers of timeouts and retries, from the inside out:
        #
        #   urllib3   connect_timeout_s and read_timeout_s, for each operation of the socket
        #   boto3     num_requests tries of one request, with its own backoff
        #   here      num_attempts calls to `act`, each with one Deadline over all of its requests
        #
        # `act` may be more than one request and reads the body, which boto3 no longer retries.
        limits = self.limits
        last_begin = time.monotonic() + limits.patience_s
        timeout_s = limits.deadline_s + num_bytes / limits.slowest_bytes_per_s
        for attempt in range(1, limits.num_attempts + 1):
            deadline = Deadline(timeout_s)
            try:
                with deadline:
                    return act()
            except (BotoCoreError, ClientError, HTTPError, OSError, ResponseParserError) as exc:
                # Do not retry, because in all our limits, deadline_s is at least patience_s.
                if deadline.is_over:
                    raise StoreError(
                        f"{what} in {self}: S3 did not complete the request within "
                        f"{timeout_s:.0f} s, so it was cancelled. Check the network"
                    ) from exc
                if is_credentials_error(exc):
                    self._client = None  # the next request reads the credentials again
                is_last = attempt == limits.num_attempts or time.monotonic() > last_begin
                is_repeated = limits.repeats_unavailable and _is_unavailable(exc)
                if is_last or not (is_repeated or _is_worth_retrying(exc)):
                    raise self._error_of(what, exc, attempt) from exc
            # Random, so that ranks whose requests failed together do not retry together.
            time.sleep(random.uniform(0, 0.2 * 2**attempt))
        raise AssertionError("unreachable")

    def _error_of(self, what: str, exc: Exception, num_attempts: int) -> StoreError:
        code = code_of(exc)
        if code in _MISSING:
            return MissingError(f"{what} in {self}: there is no such object")
        if code in _TAKEN:
            return TakenError(f"{what} in {self}: the key already exists")
        kind = AccessDeniedError if code in _DENIED else StoreError
        message = self._message_of(exc)
        if self.limits.repeats_unavailable and _is_unavailable(exc):
            message = message.replace(". The next request retries", "")
            message += f", also in {num_attempts} attempts. Try again later"
        return kind(f"{what} in {self}: {message}")

    def send(
        self, what: str, operation: str, *, num_bytes: int = 0, **arguments: Any
    ) -> dict[str, Any]:
        """Send one request about an object, and retry it as ``attempt`` does."""
        return self.attempt(what, lambda: self.request(operation, **arguments), num_bytes=num_bytes)

    def request(self, operation: str, *, Key: str, **arguments: Any) -> dict[str, Any]:
        """Send one request about an object, without additional retries."""
        call = getattr(self.connect(), operation)
        target = {"Bucket": self.name, "Key": self.full_key(Key), **self._owner_argument()}
        response: dict[str, Any] = call(**target, **arguments)
        return response

    def pages(
        self, what: str, operation: str, prefix: str, **arguments: str
    ) -> list[dict[str, Any]]:
        """Return all pages of a list request; ``prefix`` is a full key."""

        def fetch() -> list[dict[str, Any]]:
            found = []
            paginator = self.connect().get_paginator(operation)
            for page in paginator.paginate(
                Bucket=self.name,
                Prefix=prefix,
                PaginationConfig={"PageSize": self.limits.page_size},
                **self._owner_argument(),
                **arguments,
            ):
                found.append(page)
                # A listing has any number of pages, so each page gets the full timeout.
                if (deadline := current()) is not None:
                    deadline.renew()
            return found

        return self.attempt(what, fetch)

    def connect(self) -> Any:
        """Return the client; create it if there is none or its credentials have expired."""
        # Threads share one client, which is thread-safe; creating one parses the service's model.
        with self._lock:
            if self._client is None:
                core = botocore.session.get_session()
                retries = {name: _user_setting(core, name) for name in _RETRIES}
                self._client = guard(self._make_client(config_of(self.limits, retries)))
            return self._client

    def endpoint(self) -> str:
        """Return the address of the endpoint, for messages."""
        return endpoint_of(self.connect().meta.endpoint_url)

    def full_key(self, key: str) -> str:
        """Return a key with the prefix."""
        return f"{self.prefix}/{key}" if self.prefix else key

    def relative_key(self, key: str) -> str:
        """Return a key without the prefix."""
        return key[len(self.prefix) + 1 :] if self.prefix else key

    def _owner_argument(self) -> dict[str, str]:
        """Return the argument that makes S3 refuse access to another account's bucket."""
        owner = self._owner()
        return {"ExpectedBucketOwner": owner} if owner else {}

    def _message_of(self, exc: Exception) -> str:
        message = message_of(exc, setting=self._setting)
        # S3 reports a wrong owner as "access denied", like a missing permission. Only a request
        # without an expected owner distinguishes the two cases.
        owner = self._owner_argument().get("ExpectedBucketOwner")
        if code_of(exc) not in _DENIED or not owner:
            return message
        if not self._is_readable_without_owner():
            return f"{message}. If the role has it, the bucket is not owned by account {owner}"
        return (
            f"the bucket does not belong to account {owner}, but to another one: it may have been "
            "deleted and created again by another account. None of its data was used. If this is "
            f"intended, set {OWNERS}={self.name}=ACCOUNT, or bucket_owner in pools.yaml for the "
            "bucket of a pool"
        )

    def _is_readable_without_owner(self) -> bool:
        try:
            with Deadline(min(PROBE_S, self.limits.deadline_s)):
                self.connect().list_objects_v2(
                    Bucket=self.name, Prefix=self.full_key(""), MaxKeys=1
                )
        except (BotoCoreError, ClientError, HTTPError, OSError):
            return False
        return True


def config_of(limits: S3Limits, retries: Mapping[str, Any]) -> Config:
    """Return the client's configuration; endpoint and credentials come from the environment.

    Args:
        limits: Our defaults.
        retries: The user's ``max_attempts`` and ``retry_mode``, which take precedence.
    """
    return Config(
        connect_timeout=limits.connect_timeout_s,
        read_timeout=limits.read_timeout_s,
        retries={
            "mode": retries.get("retry_mode") or "standard",
            "total_max_attempts": retries.get("max_attempts") or limits.num_requests,
        },
        max_pool_connections=max(10, 2 * limits.num_threads),
        # We always send SHA-256; some endpoints do not support boto3's default CRC32.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        user_agent_extra="etrain-jupyter",
    )


def client_of_environment(config: Config, *, region: str = "") -> Any:
    """Return a client with the credentials that boto3 finds now."""
    # Do not use the default session, because it is shared, and it caches credentials.
    session = boto3.session.Session(botocore_session=botocore.session.get_session())
    region = region or session.region_name or "us-east-1"
    return session.client("s3", region_name=region, config=config)


_RETRIES = {"max_attempts": "AWS_MAX_ATTEMPTS", "retry_mode": "AWS_RETRY_MODE"}


def _user_setting(core: botocore.session.Session, name: str) -> Any:
    """Return the value from the environment or the profile; None if the user has not set it."""
    if _RETRIES[name] in os.environ or name in core.get_scoped_config():
        return core.get_config_variable(name)
    return None


def _is_unavailable(exc: Exception) -> bool:
    # Not an EndpointConnectionError: usually the address of the endpoint is wrong.
    return code_of(exc) in _UNAVAILABLE or isinstance(
        exc, ConnectionClosedError | ConnectTimeoutError
    )


def _is_worth_retrying(exc: Exception) -> bool:
    # boto3 has already retried the usual errors. The remaining cases:
    #
    #   a bare status as the code, not of HEAD    the error's body was cut off (HEAD has no body)
    #   invalid or expired credentials            the files or the role may have new ones by now
    #   reading the body failed                   boto3 returned the response before reading it
    #   anything else that boto3 raises           final
    #   the connection broke                      retry
    if isinstance(exc, ClientError):
        code = code_of(exc)
        if code in _MISSING | _TAKEN:
            return False
        is_cut_off = code.isdecimal() and not exc.operation_name.startswith("Head")
        return is_cut_off or code in _TRANSIENT or code in CREDENTIAL_CODES
    if isinstance(exc, BotoCoreError):  # check this first: some of them are also an OSError
        return isinstance(exc, ResponseStreamingError | IncompleteReadError | ReadTimeoutError)
    return isinstance(exc, HTTPError | CutShortError | ConnectionError | TimeoutError)
