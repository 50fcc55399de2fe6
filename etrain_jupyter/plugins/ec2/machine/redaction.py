"""Remove credentials from a node's output.

Nodes log to the machine's console, which anyone allowed to describe instances can read.
"""

from __future__ import annotations

import logging
import re

HIDDEN = "[hidden]"

# Each alternative matches up to the end of the secret or of the text: output may be truncated in
# the middle of a key. Better to hide too much than too little.
_SECRETS = re.compile(
    r"""
    -----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY-----.*?(?:-----END[ ][A-Z ]*PRIVATE[ ]KEY-----|\Z)
    | \b(?:AKIA|ASIA)[A-Z0-9]{8,}
    | (?:X-Amz-(?:Signature|Credential|Security-Token)=)[^&\s"']+
    | (?:Signature=)[0-9a-f]{16,}
    | (?:[\w-]*(?:token|secret)[\w-]*["']?\s*[:=]\s*["']?)[^\s"',;&}]+
    """,
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)


def redact(text: str) -> str:
    """Hide everything in a text that may be a credential.

    >>> redact("GET /k?X-Amz-Signature=0f3a9c of AKIAIOSFODNN7EXAMPLE")
    'GET /k?[hidden] of [hidden]'
    """
    return _SECRETS.sub(HIDDEN, text)


class _Redacting(logging.Formatter):
    """Formats records and tracebacks with another formatter, then redacts the result."""

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        return redact(self._inner.format(record))


def redact_logs() -> None:
    """Redact the output of all log handlers of this process; call it after creating them."""
    for handler in logging.getLogger().handlers:
        # A filter would see only the message and its arguments, not the traceback, which the
        # formatter appends.
        handler.setFormatter(_Redacting(handler.formatter or logging.Formatter()))
