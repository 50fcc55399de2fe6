"""Faults of S3, described as data, and a WSGI middleware that injects them.

The middleware also does what S3 does and moto does not: it verifies checksums of uploads, refuses a
request whose expected bucket owner is wrong, and serializes conditional writes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal
from urllib.parse import parse_qsl

from etrain_jupyter.testing.serving import Environ, Response, Wsgi, call_wsgi

Kind = Literal[
    "slow_down",
    "internal_error",
    "deny",
    "expire",
    "no_bucket",
    "slow",
    "reset",
    "lose_answer",
    "truncate",
    "spoil_upload",
    "spoil_answer",
    "ignore_conditions",
]
CONTROL = "/_etrain/"
OWNER = "123456789012"
"""Account that owns all buckets: moto's."""
OWNED = "expected owner"
"""Name of the counter for requests with an expected owner."""
AROUND = "X-Etrain-Around"
"""Requests with this header bypass all faults."""

_ERRORS: dict[str, tuple[str, str]] = {
    "slow_down": ("503 Slow Down", "SlowDown"),
    "internal_error": ("500 Internal Server Error", "InternalError"),
    "deny": ("403 Forbidden", "AccessDenied"),
    "expire": ("400 Bad Request", "ExpiredToken"),
    "no_bucket": ("404 Not Found", "NoSuchBucket"),
}


@dataclass(frozen=True, kw_only=True)
class S3Fault:
    """A fault that affects S3 requests from now on."""

    kind: Kind
    every: int = 1
    """Affects every n-th matching request."""
    count: int = 0
    """Maximum number of times; 0 for no limit."""
    match: str = ""
    """Affects only requests with this text in ``PUT /bucket/key?query ACCESS_KEY_ID``."""
    seconds: float = 0.0
    """Delay of ``slow``."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)


# Order in which the faults of one request apply:
#
#   slow                        delay, then the others
#   reset                       not executed; the connection is reset
#   _ERRORS                     not executed; an error response
#   spoil_upload                the body is changed, so that its checksum does not match
#   ignore_conditions           executed without If-None-Match
#   lose_answer                 executed; the connection is reset instead of a response
#   spoil_answer, truncate      executed; the response's body is changed or cut off
class FaultyS3:
    """WSGI middleware: injects faults before and after the inner application.

    ``POST /_etrain/faults`` with a JSON list replaces the faults; ``GET /_etrain/counts`` returns
    the number of requests and faults of each kind since then.
    """

    def __init__(self, app: Wsgi) -> None:
        self._app = app
        self._lock = threading.Lock()
        """Guards the next three attributes."""
        self._faults: list[S3Fault] = []
        self._seen: Counter[S3Fault] = Counter()
        self._counts: Counter[str] = Counter()
        self._serial = threading.Lock()
        """Serializes requests: moto checks If-None-Match and writes without a lock."""

    def __call__(self, environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Execute a request with the faults that apply to it."""
        length = int(environ.get("CONTENT_LENGTH") or 0)
        body = environ["wsgi.input"].read(length)
        if environ["PATH_INFO"].startswith(CONTROL):
            return self._control(environ["PATH_INFO"], body, start_response)
        query = environ.get("QUERY_STRING", "")
        signer = environ.get("HTTP_AUTHORIZATION", "").partition("Credential=")[2].partition("/")[0]
        line = f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}?{query} {signer}"
        kinds: dict[str, float] = {}
        if "HTTP_X_ETRAIN_AROUND" not in environ:
            operation = operation_of(environ["REQUEST_METHOD"], query)
            kinds = self._choose(line, operation, "HTTP_X_AMZ_EXPECTED_BUCKET_OWNER" in environ)
        for kind, seconds in kinds.items():
            if kind == "slow":
                time.sleep(seconds)
        if "reset" in kinds:
            return reset_connection(environ)
        status, headers, data = self._execute(environ, body, kinds)
        if "lose_answer" in kinds:
            return reset_connection(environ)
        if "spoil_answer" in kinds and status.startswith("2") and data:
            data = _corrupted(data)
        start_response(status, headers)
        # The headers keep the full Content-Length, as with a connection that breaks.
        if "truncate" in kinds and len(data) > 1:
            return _truncated(environ, data)
        return [data]

    def _execute(self, environ: Environ, body: bytes, kinds: dict[str, float]) -> Response:
        for kind, (status, code) in _ERRORS.items():
            if kind in kinds:
                return _error_response(environ, status, code)
        if "spoil_upload" in kinds and body:
            body = _corrupted(body)
        if environ.get("HTTP_X_AMZ_EXPECTED_BUCKET_OWNER", OWNER) != OWNER:
            return _error_response(environ, "403 Forbidden", "AccessDenied")
        given = environ.get("HTTP_X_AMZ_CHECKSUM_SHA256")
        if given and given != base64.b64encode(hashlib.sha256(body).digest()).decode():
            return _error_response(environ, "400 Bad Request", "BadDigest")
        if "ignore_conditions" in kinds:
            environ.pop("HTTP_IF_NONE_MATCH", None)
        with self._serial:
            return call_wsgi(self._app, environ, body)

    def _choose(self, line: str, operation: str, has_owner: bool) -> dict[str, float]:
        """Count a request and return the faults that affect it."""
        # `every` and `count` refer to the requests that match this fault, not to all requests:
        # with every=3 and count=2, the third and the sixth matching request are affected.
        with self._lock:
            self._counts[operation] += 1
            if has_owner:
                self._counts[OWNED] += 1
            chosen: dict[str, float] = {}
            for fault in self._faults:
                if fault.match not in line:
                    continue
                self._seen[fault] += 1
                times, rest = divmod(self._seen[fault], fault.every)
                if not rest and (not fault.count or times <= fault.count):
                    chosen[fault.kind] = fault.seconds
                    self._counts[fault.kind] += 1
            return chosen

    def _control(
        self, path: str, body: bytes, start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        with self._lock:
            if path == f"{CONTROL}faults":
                self._faults = [S3Fault(**fault) for fault in json.loads(body)]
                self._seen.clear()
                self._counts.clear()
            response = json.dumps(self._counts).encode()
        start_response("200 OK", [("Content-Length", str(len(response)))])
        return [response]


def operation_of(method: str, query: str) -> str:
    """Return a request's method and the distinctive part of its query.

    >>> operation_of("POST", "uploadId=1"), operation_of("GET", "list-type=2&prefix=a")
    ('POST uploadId', 'GET list-type')
    """
    names = {key for key, _ in parse_qsl(query, keep_blank_values=True)}
    known = [word for word in ("uploads", "uploadId", "list-type") if word in names]
    return " ".join([method, *known])


def _error_response(environ: Environ, status: str, code: str) -> Response:
    # S3 never sends a body in the response to HEAD, not even for errors.
    text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>injected</Message></Error>"
    data = b"" if environ["REQUEST_METHOD"] == "HEAD" else text.encode()
    return (
        status,
        [("Content-Type", "application/xml"), ("Content-Length", str(len(data)))],
        data,
    )


def _corrupted(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0x80]) + data[middle + 1 :]


def _truncated(environ: Environ, data: bytes) -> Iterator[bytes]:
    yield data[: len(data) // 2]
    with suppress(OSError):
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)


def reset_connection(environ: Environ) -> Iterable[bytes]:
    """Close the connection with a reset, like a router that has lost its state."""
    # With SO_LINGER and a timeout of 0, closing sends RST instead of FIN.
    connection: socket.socket = environ["werkzeug.socket"]
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    # The server holds two more references to the socket; this closes it now.
    connection.close()
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    raise ConnectionResetError("injected fault")
