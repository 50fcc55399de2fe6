"""The objects of a cluster in S3, as one of its nodes sees them: with the role of its machine.

Every call ends within half a minute whatever the network does: a machine that cannot reach S3 must
be able to turn itself off.
"""

from __future__ import annotations

import email.utils
import threading
from dataclasses import dataclass
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from urllib3.exceptions import HTTPError

from etrain_jupyter.storage.objects.s3_deadlines import Deadline, guard

CONNECT_S = 3.0
READ_S = 5.0
TOTAL_S = 20.0
"""Most time for one object, which has some kilobytes."""
NUM_ATTEMPTS = 3

OLD_CREDENTIALS = frozenset(
    {"ExpiredToken", "InvalidToken", "InvalidAccessKeyId", "TokenRefreshRequired", "RequestExpired"}
)
MISSING = frozenset({"NoSuchKey", "404", "NotFound"})


class StoreError(OSError):
    """S3 did not answer, or refused."""


@dataclass(frozen=True, kw_only=True)
class StoredObject:
    """An object."""

    data: bytes
    age_s: float
    """How long ago it was written, by S3's own clock alone."""


class NodeStore:
    """Objects below one prefix; may be used by several threads.

    Args:
        url: ``s3://bucket/prefix``.
        region: The bucket's region.
        owner: The account that the bucket must belong to; empty for any.
    """

    def __init__(self, url: str, *, region: str, owner: str = "") -> None:
        self._bucket, _, prefix = url.removeprefix("s3://").partition("/")
        self._prefix = prefix.rstrip("/")
        self._region = region
        self._owned = {"ExpectedBucketOwner": owner} if owner else {}
        self._lock = threading.Lock()
        self._client = self._connect()

    def _connect(self) -> Any:
        config = Config(
            connect_timeout=CONNECT_S,
            read_timeout=READ_S,
            retries={"mode": "standard", "total_max_attempts": NUM_ATTEMPTS},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            user_agent_extra="etrain-jupyter",
        )
        # A session of its own: the default one would keep the credentials that it has found.
        return guard(boto3.session.Session().client("s3", region_name=self._region, config=config))

    def read(self, name: str) -> StoredObject | None:
        """Return an object; None if there is none.

        Raises:
            StoreError: If S3 cannot be asked, or refuses.
        """
        try:
            with Deadline(TOTAL_S):
                answer = self._ask("get_object", Key=self._key(name))
                data = answer["Body"].read()
        except ClientError as exc:
            if _code_of(exc) in MISSING:
                return None
            raise StoreError(f"{name}: {self._words_of(exc)}") from exc
        except (BotoCoreError, HTTPError, OSError) as exc:
            raise StoreError(f"{name}: {type(exc).__name__}: {exc}") from exc
        told = answer["ResponseMetadata"]["HTTPHeaders"].get("date", "")
        try:
            now = email.utils.parsedate_to_datetime(told)
        except ValueError as exc:
            raise StoreError(f"{name}: S3 does not tell what time it is ({told!r})") from exc
        return StoredObject(data=data, age_s=(now - answer["LastModified"]).total_seconds())

    def write(self, name: str, data: bytes) -> None:
        """Make or replace an object.

        Raises:
            StoreError: If S3 does not take it.
        """
        try:
            with Deadline(TOTAL_S):
                self._ask("put_object", Key=self._key(name), Body=data)
        except ClientError as exc:
            raise StoreError(f"{name}: {self._words_of(exc)}") from exc
        except (BotoCoreError, HTTPError, OSError) as exc:
            raise StoreError(f"{name}: {type(exc).__name__}: {exc}") from exc

    def _words_of(self, exc: ClientError) -> str:
        code = _code_of(exc)
        owner = self._owned.get("ExpectedBucketOwner")
        if code != "AccessDenied" or owner is None:
            return code
        return f"{code}: the role may not, or s3://{self._bucket} is not of account {owner}"

    def _ask(self, operation: str, **arguments: Any) -> Any:
        """Ask once, and once more with new credentials if ours have expired."""
        client = self._client
        try:
            return getattr(client, operation)(Bucket=self._bucket, **self._owned, **arguments)
        except ClientError as exc:
            if _code_of(exc) not in OLD_CREDENTIALS:
                raise
        with self._lock:
            if self._client is client:
                self._client = self._connect()
        return getattr(self._client, operation)(Bucket=self._bucket, **self._owned, **arguments)

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name


def _code_of(exc: ClientError) -> str:
    return str(exc.response.get("Error", {}).get("Code", "unknown"))
