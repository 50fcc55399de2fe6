"""Wire formats of AWS's services: queries, XML, JSON, errors.

Pure functions that convert bytes to values and back.
"""

from __future__ import annotations

import http.client
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl
from xml.sax.saxutils import escape

from etrain_jupyter.testing.serving import Environ, Response

ACCOUNT = "123456789012"
"""The fake cloud's account id: moto's own."""
EC2_NAMESPACE = "http://ec2.amazonaws.com/doc/2016-11-15/"
_STATUS_OF_CODE = {
    "AuthFailure": 401,
    "AccessDenied": 403,
    "InsufficientInstanceCapacity": 500,
    "InternalError": 500,
    "InternalFailure": 500,
    "RequestLimitExceeded": 503,
    "RequestTimeTooSkewed": 403,
    "ServiceUnavailable": 503,
    "SlowDown": 503,
    "UnauthorizedOperation": 403,
    "Unavailable": 503,
}


class ApiError(Exception):
    """An error response from a service."""

    def __init__(self, code: str, message: str, status: int = 0) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.status = status or _STATUS_OF_CODE.get(code, 400)


@dataclass(frozen=True, kw_only=True)
class Call:
    """One request to one service."""

    service: str
    region: str
    action: str
    """Name in the API reference; for S3, the HTTP method."""
    access_key: str
    body: bytes
    environ: Environ

    @property
    def line(self) -> str:
        """The text that faults are matched against."""
        path = f"{self.environ['REQUEST_METHOD']} {self.environ['PATH_INFO']}"
        return f"{path} {self.access_key} {self.body[:4000].decode('latin-1')}"


def read_call(environ: Environ, body: bytes) -> Call:
    """Return the caller, service and action of a request.

    Service and region are in the scope of the signature, as in
    ``Credential=AKIA.../20260101/us-east-1/ec2/aws4_request``.
    """
    # The action is in a header (JSON services), the method (S3) or the body (EC2, IAM, STS).
    scope = environ.get("HTTP_AUTHORIZATION", "").partition("Credential=")[2].partition(",")[0]
    parts = scope.split("/")
    access_key, region, service = parts[0], "", ""
    if len(parts) >= 5:
        region, service = parts[-3], parts[-2]
    target = environ.get("HTTP_X_AMZ_TARGET", "")
    if target:
        action = target.rpartition(".")[2]
    elif service == "s3":
        action = environ["REQUEST_METHOD"]
    else:
        action = dict(parse_qsl(body[:200_000].decode("latin-1"))).get("Action", "")
    return Call(
        service=service,
        region=region or "us-east-1",
        action=action,
        access_key=access_key,
        body=body,
        environ=environ,
    )


def nested(body: bytes) -> dict[str, Any]:
    """Parse a query into dictionaries and lists.

    >>> nested(b"Action=X&Tag.1.Key=a&Tag.2.Key=b&Spot.Price=1")
    {'Action': 'X', 'Tag': [{'Key': 'a'}, {'Key': 'b'}], 'Spot': {'Price': '1'}}
    """
    # First build dictionaries only ("Tag.1.Key" gives {"Tag": {"1": {"Key": ...}}}), then turn
    # those with numeric keys into lists.
    root: dict[str, Any] = {}
    for name, value in parse_qsl(body.decode(), keep_blank_values=True):
        *parents, last = name.split(".")
        place = root
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return {name: _lists(value) for name, value in root.items()}


def _lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value and all(name.isdecimal() for name in value):
        return [_lists(value[name]) for name in sorted(value, key=int)]
    return {name: _lists(inner) for name, inner in value.items()}


def listed(query: Mapping[str, Any], *names: str) -> list[Any]:
    """Return a list parameter, by any of its names; a single value becomes a list."""
    for name in names:
        value = query.get(name)
        if value not in (None, ""):
            return value if isinstance(value, list) else [value]
    return []


def tags_by_kind(data: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return the tags in a request or a launch template by resource type."""
    found: dict[str, dict[str, str]] = {}
    for one in listed(data, "TagSpecification", "TagSpecifications"):
        tags = {tag["Key"]: tag.get("Value", "") for tag in listed(one, "Tag", "Tags")}
        found.setdefault(one.get("ResourceType", ""), {}).update(tags)
    return found


def xml(value: Any, tag: str) -> str:
    """Format a value as an element; a list becomes ``item`` elements, and None is omitted.

    >>> xml({"ok": True, "names": ["a&b"], "none": None}, "answer")
    '<answer><ok>true</ok><names><item>a&amp;b</item></names></answer>'
    """
    if value is None:
        return ""
    if isinstance(value, Mapping):
        inner = "".join(xml(part, name) for name, part in value.items())
    elif isinstance(value, list | tuple):
        inner = "".join(xml(part, "item") for part in value)
    elif isinstance(value, bool):
        inner = str(value).lower()
    else:
        inner = escape(str(value))
    return f"<{tag}>{inner}</{tag}>"


def ec2_response(action: str, result: Mapping[str, Any]) -> Response:
    """Format EC2's response to an action."""
    inner = "".join(xml(part, name) for name, part in result.items())
    tag = f"{action}Response"
    text = (
        f'<?xml version="1.0" encoding="UTF-8"?><{tag} xmlns="{EC2_NAMESPACE}">'
        f"<requestId>{uuid.uuid4()}</requestId>{inner}</{tag}>"
    )
    return response(200, text.encode(), "text/xml")


def json_response(result: Any, status: int = 200) -> Response:
    """Format a response from a JSON service."""
    return response(status, json.dumps(result).encode(), "application/x-amz-json-1.1")


def error_response(call: Call, error: ApiError) -> Response:
    """Format an error as the called service does."""
    code, message = escape(error.code), escape(error.message)
    request_id = uuid.uuid4()
    if "HTTP_X_AMZ_TARGET" in call.environ:
        return json_response({"__type": error.code, "message": error.message}, error.status)
    inner = f"<Code>{code}</Code><Message>{message}</Message>"
    if call.service == "ec2":
        text = (
            f"<Response><Errors><Error>{inner}</Error></Errors>"
            f"<RequestID>{request_id}</RequestID></Response>"
        )
    elif call.service == "s3":
        text = f"<Error>{inner}<RequestId>{request_id}</RequestId></Error>"
    else:
        text = (
            f"<ErrorResponse><Error>{inner}</Error>"
            f"<RequestId>{request_id}</RequestId></ErrorResponse>"
        )
    # A response to HEAD has no body; the client sees the status only.
    is_head = call.environ["REQUEST_METHOD"] == "HEAD"
    return response(error.status, b"" if is_head else text.encode(), "text/xml")


def response(status: int, body: bytes, content_type: str) -> Response:
    """Assemble a response."""
    headers = [("Content-Type", content_type), ("Content-Length", str(len(body)))]
    return f"{status} {http.client.responses.get(status, 'Status')}", headers, body
