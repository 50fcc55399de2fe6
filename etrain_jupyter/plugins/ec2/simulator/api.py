"""The simulated cloud as one WSGI application, which dispatches requests.

S3 requests go to moto through :class:`~etrain_jupyter.testing.s3_faults.FaultyS3`, EC2 requests
through ``ec2``; ``pricing`` has prices and quotas, and moto handles everything else. Faults and the
cloud's clock affect all of them.
"""

from __future__ import annotations

import io
import json
import re
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime, parsedate_to_datetime
from typing import Any

from etrain_jupyter.plugins.ec2.simulator.ec2 import Ec2
from etrain_jupyter.plugins.ec2.simulator.faults import FaultList
from etrain_jupyter.plugins.ec2.simulator.permissions import Enforcement
from etrain_jupyter.plugins.ec2.simulator.pricing import get_products, get_quota
from etrain_jupyter.plugins.ec2.simulator.wire import (
    ApiError,
    Call,
    error_response,
    json_response,
    read_call,
)
from etrain_jupyter.testing.s3_faults import CONTROL, FaultyS3, reset_connection
from etrain_jupyter.testing.serving import Environ, Response, Wsgi, call_wsgi

MAX_SKEW_S = 900
_MODIFIED = re.compile(rb"(?<=<LastModified>)[^<]+(?=</LastModified>)")


class CloudApi:
    """The WSGI application, in front of moto's."""

    def __init__(self, moto: Wsgi, ec2: Ec2, iam: Enforcement) -> None:
        self._moto = moto
        self._s3 = FaultyS3(moto)
        self._ec2 = ec2
        self._iam = iam
        self.faults = FaultList()
        self.vcpus: dict[str, float] = {}
        """Quotas that differ from the default, by code."""
        self.clock_skew_s = 0.0
        """Seconds by which the cloud's clock is ahead of this machine's."""

    def __call__(self, environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Check a request, and pass it to the service that it names."""
        if environ["PATH_INFO"].startswith(CONTROL):
            return self._s3(environ, start_response)
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        environ["wsgi.input"] = io.BytesIO(body)
        call = read_call(environ, body)
        # Order of the checks, each of which may respond with an error: the test's faults, the
        # caller's clock, its permissions. Then the service executes the request. A lost response is
        # injected last, because the request must have been executed.
        chosen = [] if "HTTP_X_ETRAIN_AROUND" in environ else self.faults.choose(call)
        for fault in chosen:
            time.sleep(fault.seconds)
        error = next((fault.error for fault in chosen if fault.error), None)
        error = error or self._skew_error(environ, call) or self._iam.find_refusal(call)
        if error is None and call.service == "s3":
            # S3 streams responses, and has its own faults.
            return self._call_s3(environ, start_response)
        result = error_response(call, error) if error is not None else self._execute(call)
        if any(fault.is_answer_lost for fault in chosen):
            return reset_connection(environ)
        status, headers, data = result
        start_response(status, self._dated(headers))
        return [data]

    def _execute(self, call: Call) -> Response:
        try:
            if call.service == "ec2":
                return self._ec2.handle(call, lambda: self._call_moto(call))
            if call.service == "pricing":
                return json_response(get_products(json.loads(call.body), self._ec2.market))
            if (call.service, call.action) == ("servicequotas", "GetServiceQuota"):
                return json_response(get_quota(json.loads(call.body), self.vcpus))
            if call.service == "cloudformation":
                from etrain_jupyter.plugins.ec2.simulator.stacks import teach_moto

                teach_moto()  # only now: it imports much of moto
            return self._call_moto(call)
        except ApiError as exc:
            return error_response(call, exc)
        except Exception as exc:  # a bug: boto3 must be able to parse the response
            traceback.print_exc()
            return error_response(call, ApiError("InternalError", repr(exc)))

    def _call_moto(self, call: Call) -> Response:
        try:
            return call_wsgi(self._moto, call.environ, call.body)
        except NotImplementedError:
            raise ApiError(
                "InvalidAction", f"The action {call.action} is not part of the fake cloud."
            ) from None

    # The clock ----------------------------------------------------------------------------------

    def _dated(self, headers: list[tuple[str, str]]) -> list[tuple[str, str]]:
        """Set the response's date according to the cloud's clock."""
        now = datetime.now(UTC) + timedelta(seconds=self.clock_skew_s)
        kept = [(name, value) for name, value in headers if name.lower() != "date"]
        return [*kept, ("Date", format_datetime(now, usegmt=True))]

    def _skew_error(self, environ: Environ, call: Call) -> ApiError | None:
        """Refuse requests whose signature time is too far from the cloud's clock, as AWS does."""
        # Checked only in tests that set a skew.
        signed = environ.get("HTTP_X_AMZ_DATE", "")
        if not self.clock_skew_s or not signed:
            return None
        at = datetime.strptime(signed, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()
        if abs(time.time() + self.clock_skew_s - at) <= MAX_SKEW_S:
            return None
        code = "RequestTimeTooSkewed" if call.service == "s3" else "RequestExpired"
        return ApiError(
            code, "The difference between the request time and the current time is too large."
        )

    def _call_s3(self, environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        # Shift the times that moto reports: the header Last-Modified of an object, and the element
        # LastModified in listings. Other bodies are passed on unchanged.
        shift = timedelta(seconds=self.clock_skew_s)
        is_listing = False

        def start(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Any:
            nonlocal is_listing
            is_listing = any(
                name.lower() == "content-type" and "xml" in value for name, value in headers
            )
            shown = [
                (name, format_datetime(parsedate_to_datetime(value) + shift, usegmt=True))
                if name.lower() == "last-modified"
                else (name, value)
                for name, value in headers
            ]
            return start_response(status, self._dated(shown))

        data = self._s3(environ, start)
        if not shift or not is_listing:
            return data
        return [_MODIFIED.sub(lambda found: _shifted(found.group(), shift), b"".join(data))]


def _shifted(text: bytes, shift: timedelta) -> bytes:
    """Shift a timestamp in a listing; the text keeps its length.

    >>> _shifted(b"2026-01-01T00:00:00.000Z", timedelta(seconds=90))
    b'2026-01-01T00:01:30.000Z'
    """
    at = datetime.fromisoformat(text.decode()) + shift
    shown = at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S")
    fraction = b".000" if b"." in text else b""
    return shown.encode() + fraction + b"Z"
