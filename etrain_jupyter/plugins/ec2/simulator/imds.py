"""Metadata service (IMDSv2) of one instance, with fault injection.

::

    pages = instance_pages(instance_id="i-1", zone="us-east-1a", lifecycle="spot")
    with ImdsServer(pages) as imds:
        os.environ["AWS_EC2_METADATA_SERVICE_ENDPOINT"] = imds.url
        imds.recommend_rebalance()
        imds.interrupt(at=time.time() + 120)
        imds.break_("hang")

It listens on 169.254.169.254 as on EC2 if the instance has its own network, otherwise on a port of
the loopback interface. All requests need a token, as with ``HttpTokens=required``.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, cast, get_args
from urllib.parse import unquote

from etrain_jupyter.testing.serving import Closing, serve_in_thread

Page = str | Callable[[], str | None]
"""The text at a path, or a function that returns it; None results in a 404 response."""
Broken = Literal["", "500", "hang", "expired"]
"""Kind of failure: none, error responses, no response, or tokens that expire before they are
used."""

MAX_TOKEN_S = 21600
MAX_HANG_S = 60.0
_TOKEN = "X-aws-ec2-metadata-token"
_TTL = f"{_TOKEN}-ttl-seconds"


def timestamp(at: float) -> str:
    """Format an instant as AWS does, truncated to seconds.

    >>> timestamp(1767225600.9)
    '2026-01-01T00:00:00Z'
    """
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def instance_pages(
    *,
    instance_id: str,
    instance_type: str = "g5.xlarge",
    zone: str = "us-east-1a",
    lifecycle: Literal["spot", "on-demand"] = "spot",
    address: str = "127.0.0.1",
    ami: str = "ami-00000000",
    account: str = "123456789012",
    launched_at: float | None = None,
    tags: Mapping[str, str] | None = None,
    user_data: str | None = None,
) -> dict[str, Page]:
    """Return the metadata of an instance, by path below ``/latest/``.

    The region is the zone without its letter, and ``launched_at`` is now by default. ``tags`` are
    visible with ``InstanceMetadataTags=enabled``; None hides them.
    """
    region = zone[:-1]
    identity = {
        "accountId": account,
        "architecture": "x86_64",
        "availabilityZone": zone,
        "imageId": ami,
        "instanceId": instance_id,
        "instanceType": instance_type,
        "pendingTime": timestamp(time.time() if launched_at is None else launched_at),
        "privateIp": address,
        "region": region,
        "version": "2017-09-30",
    }
    pages: dict[str, Page] = {
        "meta-data/ami-id": ami,
        "meta-data/instance-id": instance_id,
        "meta-data/instance-life-cycle": lifecycle,
        "meta-data/instance-type": instance_type,
        "meta-data/local-ipv4": address,
        "meta-data/placement/availability-zone": zone,
        "meta-data/placement/region": region,
        "dynamic/instance-identity/document": json.dumps(identity),
    }
    if user_data is not None:
        pages["user-data"] = user_data
    for key, value in (tags or {}).items():
        pages[f"meta-data/tags/instance/{key}"] = value
    return pages


class ImdsServer(Closing):
    """The service, in threads of this process."""

    def __init__(
        self, pages: Mapping[str, Page] | None = None, *, listener: socket.socket | None = None
    ) -> None:
        """Start the service with its content, by path below ``/latest/``.

        ``listener`` is a listening socket in another network namespace, by default a port on
        127.0.0.1.
        """
        self._lock = threading.Lock()
        """Guards the next four attributes."""
        self._pages: dict[str, Page] = dict(pages or {})
        self._tokens: dict[str, float] = {}
        self._requests: list[str] = []
        self._broken: Broken = ""
        self._is_responsive = threading.Event()  # cleared while the service hangs
        self._is_responsive.set()
        self._server = _ImdsServer(listener, self)
        self._thread = serve_in_thread(self._server, "imds")

    @property
    def url(self) -> str:
        """Value for ``AWS_EC2_METADATA_SERVICE_ENDPOINT``."""
        host, port = self._server.socket.getsockname()[:2]
        return f"http://{host}:{port}"

    def set(self, path: str, page: Page | None) -> None:
        """Set the content of a path below ``/latest/``; None removes it."""
        with self._lock:
            if page is None:
                self._pages.pop(path, None)
            else:
                self._pages[path] = page

    def recommend_rebalance(self, at: float | None = None) -> None:
        """Publish a rebalance recommendation with a time (by default now)."""
        noticed = json.dumps({"noticeTime": timestamp(time.time() if at is None else at)})
        self.set("meta-data/events/recommendations/rebalance", noticed)

    def interrupt(self, at: float) -> None:
        """Publish an interruption notice for a time (seconds since the epoch)."""
        # Publish the time under two paths; the second one is EC2's older interface.
        action = json.dumps({"action": "terminate", "time": timestamp(at)})
        self.set("meta-data/spot/instance-action", action)
        self.set("meta-data/spot/termination-time", timestamp(at))

    def set_role(self, role: str, credentials: Callable[[], str]) -> None:
        """Assign a role, and a function that returns its credentials as JSON."""
        self.set(f"meta-data/iam/security-credentials/{role}", credentials)
        self.set("meta-data/iam/security-credentials", role)

    def break_(self, how: Broken) -> None:
        """Start failing in this way; ``""`` ends the failure."""
        if how not in get_args(Broken):
            raise ValueError(
                f"A metadata service has no fault {how!r}. Use one of {get_args(Broken)}."
            )
        with self._lock:
            self._broken = how
        if how == "hang":
            self._is_responsive.clear()
        else:
            self._is_responsive.set()

    def expire_tokens(self) -> None:
        """Expire all existing tokens; new ones are valid."""
        with self._lock:
            self._tokens.clear()

    def requests(self) -> list[str]:
        """Return the paths of requests with a valid token, oldest first."""
        with self._lock:
            return list(self._requests)

    def close(self) -> None:
        """Stop it, and close its connections."""
        self._is_responsive.set()  # release the handlers that hang
        self._server.shutdown()
        self._server.close_all()
        self._thread.join()

    def issue_token(self, ttl_s: int) -> str:
        """Return a new token (for the request handler)."""
        token = secrets.token_urlsafe(40)
        with self._lock:
            self._tokens[token] = time.monotonic() + ttl_s  # when it expires
        return token

    def is_valid(self, token: str | None) -> bool:
        """Return whether a token is valid (for the request handler)."""
        with self._lock:
            ends_at = self._tokens.get(token or "", 0.0)
            return self._broken != "expired" and time.monotonic() < ends_at

    def fails_now(self) -> bool:
        """Block while the service hangs; return whether it responds with an error."""
        # A client gives up long before MAX_HANG_S, which serves only to end the handler's thread.
        self._is_responsive.wait(MAX_HANG_S)
        with self._lock:
            return self._broken == "500"

    def read(self, path: str) -> str | None:
        """Return the content of a path, or a listing of the paths below it, or None."""
        with self._lock:
            self._requests.append(path)
            page = self._pages.get(path)
            known = sorted(self._pages)
        # A function such as `Backend.role_credentials` acquires other locks, so call it without
        # holding this one.
        if page is not None:
            return page if isinstance(page, str) else page()
        # Like a directory listing: one line per entry, with a slash at the end of folders.
        folder = f"{path}/" if path else ""
        below = [key.removeprefix(folder) for key in known if key.startswith(folder)]
        names = {rest.split("/")[0] + ("/" if "/" in rest else "") for rest in below}
        return "\n".join(sorted(names)) if names else None


class _ImdsServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, listener: socket.socket | None, imds: ImdsServer) -> None:
        self.imds = imds
        self._open: set[socket.socket] = set()
        super().__init__(("127.0.0.1", 0), _ImdsHandler, bind_and_activate=listener is None)
        # A socket from another network namespace replaces the one created by the base class.
        if listener is not None:
            self.socket.close()
            self.socket = listener

    def server_bind(self) -> None:
        # Not HTTPServer's method, which looks up the machine's name in DNS.
        self.socket.bind(self.server_address)

    # Clients keep their connections open, and a handler blocks until the next request. Closing
    # the connections ends the handlers.
    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing when a client disconnects early."""

    def close_all(self) -> None:
        self.server_close()
        for connection in list(self._open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class _ImdsHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_PUT(self) -> None:
        imds = cast(_ImdsServer, self.server).imds
        if imds.fails_now():
            return self._respond(500)
        if self.path != "/latest/api/token":
            return self._respond(404)
        if self.headers.get("X-Forwarded-For"):
            return self._respond(403)  # the request came through a proxy
        ttl = self.headers.get(_TTL, "")
        if not ttl.isdecimal() or not 1 <= int(ttl) <= MAX_TOKEN_S:
            return self._respond(400)
        return self._respond(200, imds.issue_token(int(ttl)), {_TTL: ttl})

    def do_GET(self) -> None:
        imds = cast(_ImdsServer, self.server).imds
        if imds.fails_now():
            return self._respond(500)
        if not imds.is_valid(self.headers.get(_TOKEN)):
            return self._respond(401)
        path = unquote(self.path.partition("?")[0])
        if not f"{path}/".startswith("/latest/"):
            return self._respond(404)
        text = imds.read(path.removeprefix("/latest").strip("/"))
        return self._respond(404) if text is None else self._respond(200, text)

    def _respond(
        self, status: int, text: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""
