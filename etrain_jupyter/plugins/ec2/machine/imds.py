"""Client for the EC2 instance metadata service, version 2.

Requests use the link-local network, never a proxy, and carry a session token, which is renewed
before it expires. A missing path, such as the path of a notice that has not been issued, is not an
error.
"""

from __future__ import annotations

import datetime
import email.utils
import json
import os
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEFAULT_ENDPOINT = "http://169.254.169.254"
TOKEN_S = 21_600
"""Lifetime of a token in seconds: the maximum allowed by the service."""
RENEW_S = 60.0
"""Tokens are renewed this many seconds before they expire."""
MOST_BYTES = 65_536
"""Maximum size of a response, so that an unexpected server at the endpoint cannot exhaust
memory."""
VENDOR_FILE = Path("/sys/class/dmi/id/sys_vendor")


class ImdsError(OSError):
    """The metadata service is unreachable or returned an error; a retry may succeed."""


@dataclass(frozen=True, kw_only=True)
class ImdsResponse:
    """The service's response for one path."""

    text: str
    at: float
    """Time of the response in seconds since the epoch, on the service's clock, or on the local
    clock if the response has no date."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """This machine's identity."""

    instance_id: str
    type: str
    region: str
    zone: str
    private_ip: str
    lifecycle: str
    """``spot`` or ``on-demand``."""
    age_s: float
    """Seconds from launch to this response, both by AWS's clock."""


class Imds:
    """Client for the service. Thread-safe.

    Args:
        endpoint: URL of the service; by default, the same as boto3's.
        timeout_s: Request timeout in seconds.
    """

    def __init__(self, endpoint: str | None = None, *, timeout_s: float = 2.0) -> None:
        endpoint = endpoint or os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT")
        self._base = (endpoint or DEFAULT_ENDPOINT).rstrip("/")
        self._timeout_s = timeout_s
        # A proxy would return its own machine's metadata, and see the tokens.
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        self._lock = threading.Lock()  # one thread renews the token, the others wait for it
        self._token = ""
        self._renew_at = 0.0  # by the monotonic clock

    def get(self, path: str) -> str | None:
        """Return the value at ``path`` below ``/latest/``; None if there is none.

        Raises:
            ImdsError: If the request fails.
        """
        answer = self.ask(path)
        return None if answer is None else answer.text

    def ask(self, path: str) -> ImdsResponse | None:
        """Return the response for ``path``, including its time; see ``get``."""
        # A 401 means that the token has expired or been revoked: retry once with a new one.
        for is_last in (False, True):
            token = self._current_token(is_new=is_last)
            request = urllib.request.Request(
                f"{self._base}/latest/{path}", headers={"X-aws-ec2-metadata-token": token}
            )
            try:
                return self._read(request)
            except urllib.error.HTTPError as exc:
                exc.close()  # it holds the connection
                if exc.code == 404:
                    return None  # for example: no notice has been issued
                if exc.code != 401 or is_last:
                    raise ImdsError(f"{self._base}/latest/{path} returned {exc.code}") from exc
            except (OSError, ValueError) as exc:
                raise ImdsError(f"{self._base}/latest/{path}: {exc or type(exc).__name__}") from exc
        raise AssertionError("unreachable")

    def _current_token(self, *, is_new: bool) -> str:
        with self._lock:
            if is_new or time.monotonic() >= self._renew_at:
                request = urllib.request.Request(
                    f"{self._base}/latest/api/token",
                    method="PUT",
                    headers={"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)},
                )
                try:
                    self._token = self._read(request).text.strip()
                except (OSError, ValueError) as exc:
                    if isinstance(exc, urllib.error.HTTPError):
                        exc.close()
                    raise ImdsError(f"no session token from {self._base}: {exc}") from exc
                self._renew_at = time.monotonic() + TOKEN_S - RENEW_S
            return self._token

    def _read(self, request: urllib.request.Request) -> ImdsResponse:
        with self._open(request, timeout=self._timeout_s) as answer:
            text = answer.read(MOST_BYTES).decode()
            return ImdsResponse(text=text, at=_instant_of(answer.headers.get("Date")))

    def identity(self) -> Identity:
        """Return this machine's identity.

        Raises:
            ImdsError: If the request fails, or the identity document is missing or invalid.
        """
        answer = self.ask("dynamic/instance-identity/document")
        if answer is None:
            raise ImdsError(f"{self._base} has no identity document: this is not an EC2 instance")
        lifecycle = self.get("meta-data/instance-life-cycle")
        try:
            known: dict[str, Any] = json.loads(answer.text)
            return Identity(
                instance_id=known["instanceId"],
                type=known["instanceType"],
                region=known["region"],
                zone=known["availabilityZone"],
                private_ip=known["privateIp"],
                lifecycle="spot" if lifecycle == "spot" else "on-demand",
                age_s=answer.at - instant_of_iso(known["pendingTime"]),
            )
        except (ValueError, KeyError, TypeError) as exc:
            raise ImdsError(f"the identity document of {self._base} cannot be read: {exc}") from exc


def is_ec2() -> bool:
    """Return whether this machine has a metadata service, without sending it a request."""
    if os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return False
    if os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT"):
        return True
    if (wished := os.environ.get("ETRAIN_NOTICES")) is not None:
        return wished == "imds"
    # Outside EC2, a request to the link-local address may hang until it times out.
    try:
        return VENDOR_FILE.read_text().strip() == "Amazon EC2"
    except OSError:
        return False


def instant_of_iso(text: str) -> float:
    """Convert a time in AWS's format to seconds since the epoch.

    Raises:
        ValueError: If the text is not a time.

    >>> instant_of_iso("2026-11-22T08:00:00Z")
    1795334400.0
    """
    found = datetime.datetime.fromisoformat(text)
    return (found if found.tzinfo else found.replace(tzinfo=datetime.UTC)).timestamp()


def _instant_of(header: str | None) -> float:
    try:
        return email.utils.parsedate_to_datetime(header or "").timestamp()
    except ValueError:  # missing or invalid date
        return time.time()
