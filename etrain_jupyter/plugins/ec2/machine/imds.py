"""Client for the EC2 instance metadata service, version 2, and a watch for its notices.

Requests use the link-local network, never a proxy, and carry a session token, which is renewed
before it expires. A missing path, such as the path of a notice that has not been issued, is not an
error.
"""

from __future__ import annotations

import datetime
import email.utils
import json
import logging
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etrain_jupyter.wire.messages import INTERRUPTION, REBALANCE
from etrain_jupyter.worker.preemption_watch import Notice, seconds_from_environment

DEFAULT_ENDPOINT = "http://169.254.169.254"
TOKEN_S = 21_600
"""Lifetime of a token in seconds: the maximum allowed by the service."""
RENEW_S = 60.0
"""Tokens are renewed this many seconds before they expire."""
MOST_BYTES = 65_536
"""Maximum size of a response, so that an unexpected server at the endpoint cannot exhaust
memory."""
VENDOR_FILE = Path("/sys/class/dmi/id/sys_vendor")


logger = logging.getLogger("etrain.notices")
POLL_S = 2.0
"""Polling interval in seconds. AWS recommends 5 s or less; notices arrive 120 s ahead, so every
second counts."""
INTERRUPTION_PATH = "meta-data/spot/instance-action"
REBALANCE_PATH = "meta-data/events/recommendations/rebalance"


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
    """Client for the service, by default at boto3's endpoint. Thread-safe."""

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
        # A 401 means that the token has expired or been revoked, so retry once with a new one.
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
    return is_made_by_ec2()


def is_made_by_ec2() -> bool:
    """Return whether this is certainly an EC2 machine."""
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


class NoticeWatch:
    """Watch for notices and report each one once, on the watch's thread.

    Never raises, whatever the service returns.
    """

    def __init__(
        self, imds: Imds, on_notice: Callable[[Notice], None], *, poll_s: float = POLL_S
    ) -> None:
        self._imds = imds
        self._on_notice = on_notice
        self._poll_s = poll_s
        self._told: dict[str, str] = {}  # by kind: the last reported response
        self._failing: dict[str, str] = {}  # by kind: the last request's error, or empty
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="etrain-notices", daemon=True)

    def start(self) -> None:
        """Start polling."""
        self._thread.start()

    def poll_now(self) -> None:
        """Check for an interruption now, on the caller's thread, and report it."""
        self._look(INTERRUPTION, INTERRUPTION_PATH)

    def stop(self, timeout_s: float = 5.0) -> None:
        """Stop polling; give up waiting for a hanging request after ``timeout_s``."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._end.is_set():
            # Check each path separately, so that an error in one does not hide the other.
            self._look(INTERRUPTION, INTERRUPTION_PATH)
            self._look(REBALANCE, REBALANCE_PATH)
            self._end.wait(self._poll_s)

    def _look(self, kind: str, path: str) -> None:
        try:
            answer = self._imds.ask(path)
            # A notice stays in the metadata; a new deadline changes its text, so it is reported
            # again.
            if answer is None or self._told.get(kind) == answer.text:
                self._note(kind, "")
                return
            notice = _read(kind, answer)
            self._note(kind, "")
            self._told[kind] = answer.text  # before the callback: not repeated if that raises
            logger.warning("notice for this machine: %s %s", kind, answer.text)
            self._on_notice(notice)
        except (ImdsError, ValueError, KeyError, TypeError) as exc:
            self._note(kind, f"{type(exc).__name__}: {exc}")
        except Exception:  # for example, from the callback: keep watching
            logger.exception("a notice could not be reported")

    def _note(self, kind: str, trouble: str) -> None:
        """Log when the service begins or stops returning errors."""
        before, self._failing[kind] = self._failing.get(kind, ""), trouble
        if trouble and not before:
            logger.warning("notices of the kind %s cannot be read; retrying: %s", kind, trouble)
        elif before and not trouble:
            logger.info("notices of the kind %s can be read again", kind)


def _read(kind: str, answer: ImdsResponse) -> Notice:
    told = json.loads(answer.text)
    if kind == REBALANCE:
        return Notice(kind=kind)
    # This machine's clock may be wrong, so compute the remaining time from AWS's clock alone.
    return Notice(kind=kind, deadline=time.time() + instant_of_iso(told["time"]) - answer.at)


def watch_if_on_ec2(on_notice: Callable[[Notice], None]) -> NoticeWatch | None:
    """Start to watch for notices about this machine; return None if it is not on EC2."""
    if not is_ec2():
        return None
    poll_s = seconds_from_environment("ETRAIN_NOTICE_POLL_S", POLL_S)
    watch = NoticeWatch(Imds(), on_notice, poll_s=poll_s)
    watch.start()
    return watch
