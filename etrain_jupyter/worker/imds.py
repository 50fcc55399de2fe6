"""The instance metadata service of EC2, version 2: what a machine is told of itself.

It is asked over the link-local network and never through a proxy. A token opens it; one that has
expired is renewed. What is not there (a notice, before it comes) is no error.
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
"""How long a token is asked for: the most that the service gives."""
RENEW_S = 60.0
"""A token is renewed so long before it expires."""
MOST_BYTES = 65_536
VENDOR_FILE = Path("/sys/class/dmi/id/sys_vendor")


class ImdsError(OSError):
    """The metadata service did not answer, or with an error; it may later."""


@dataclass(frozen=True, kw_only=True)
class ImdsResponse:
    """What the service says at one path."""

    text: str
    at: float
    """When, in seconds since the epoch, by the service's clock; by ours if it does not tell."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Which machine this is."""

    instance_id: str
    type: str
    region: str
    zone: str
    private_ip: str
    lifecycle: str
    """``spot`` or ``on-demand``."""
    age_s: float
    """How long ago it was launched, when this was read; both instants by AWS's clock."""


class Imds:
    """A client; may be used by several threads.

    Args:
        endpoint: Where the service is; by default what boto3 would use.
        timeout_s: How long it may be silent.
    """

    def __init__(self, endpoint: str | None = None, *, timeout_s: float = 2.0) -> None:
        endpoint = endpoint or os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT")
        self._base = (endpoint or DEFAULT_ENDPOINT).rstrip("/")
        self._timeout_s = timeout_s
        # A proxy would answer for its own machine, and see the tokens.
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        self._lock = threading.Lock()
        self._token = ""
        self._renew_at = 0.0

    def get(self, path: str) -> str | None:
        """Return what is at ``path`` below ``/latest/``; None if nothing is.

        Raises:
            ImdsError: If the service cannot be asked now.
        """
        answer = self.ask(path)
        return None if answer is None else answer.text

    def ask(self, path: str) -> ImdsResponse | None:
        """Do as ``get``, and say when it was answered."""
        for is_last in (False, True):
            token = self._current_token(is_new=is_last)
            request = urllib.request.Request(
                f"{self._base}/latest/{path}", headers={"X-aws-ec2-metadata-token": token}
            )
            try:
                return self._read(request)
            except urllib.error.HTTPError as exc:
                exc.close()
                if exc.code == 404:
                    return None
                if exc.code != 401 or is_last:
                    raise ImdsError(f"{self._base}/latest/{path} answered {exc.code}") from exc
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
                    raise ImdsError(f"no token of {self._base}: {exc}") from exc
                self._renew_at = time.monotonic() + TOKEN_S - RENEW_S
            return self._token

    def _read(self, request: urllib.request.Request) -> ImdsResponse:
        with self._open(request, timeout=self._timeout_s) as answer:
            text = answer.read(MOST_BYTES).decode()
            return ImdsResponse(text=text, at=_instant_of(answer.headers.get("Date")))

    def identity(self) -> Identity:
        """Return which machine this is.

        Raises:
            ImdsError: If the service cannot be asked, or does not know.
        """
        answer = self.ask("dynamic/instance-identity/document")
        if answer is None:
            raise ImdsError(f"{self._base} has no identity document: this is no EC2 instance")
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
    """Tell whether this machine has a metadata service to watch, without asking for it."""
    if os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return False
    if os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT"):
        return True
    if (wished := os.environ.get("ETRAIN_NOTICES")) is not None:
        return wished == "imds"
    try:
        return VENDOR_FILE.read_text().strip() == "Amazon EC2"
    except OSError:
        return False


def instant_of_iso(text: str) -> float:
    """Return seconds since the epoch of a time as AWS writes it.

    Raises:
        ValueError: If it is none.

    >>> instant_of_iso("2026-11-22T08:00:00Z")
    1795334400.0
    """
    found = datetime.datetime.fromisoformat(text)
    return (found if found.tzinfo else found.replace(tzinfo=datetime.UTC)).timestamp()


def _instant_of(header: str | None) -> float:
    try:
        return email.utils.parsedate_to_datetime(header or "").timestamp()
    except ValueError:
        return time.time()
