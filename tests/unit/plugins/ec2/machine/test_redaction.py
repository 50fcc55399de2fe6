"""No credential gets into a node's log, whatever writes it."""

from __future__ import annotations

import io
import logging

import pytest

from etrain_jupyter.plugins.ec2.machine.redaction import redact, redact_logs

SECRET = "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY"


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("key AKIAIOSFODNN7EXAMPLE here", "AKIAIOSFODNN7EXAMPLE"),
        ("key ASIAIOSFODNN7EXAMPLE here", "ASIAIOSFODNN7EXAMPLE"),
        (f'{{"SecretAccessKey" : "{SECRET}", "Code" : "Success"}}', SECRET),
        (f'{{"Token" : "{SECRET}=="}}', SECRET),
        (f"x-amz-security-token: {SECRET}", SECRET),
        (f"aws_session_token={SECRET}", SECRET),
        ("https://b/k?X-Amz-Signature=0f3a9c11&X-Amz-Expires=9", "0f3a9c11"),
        (f"https://b/k?X-Amz-Security-Token={SECRET}", SECRET),
        ("Signature=0123456789abcdef0123456789abcdef", "0123456789abcdef"),
        (f"-----BEGIN PRIVATE KEY-----\n{SECRET}\n-----END PRIVATE KEY-----", SECRET),
        (f"-----BEGIN EC PRIVATE KEY-----\n{SECRET}", SECRET),
    ],
)
def test_credential_is_redacted(text, secret):
    assert secret not in redact(text)
    assert "[hidden]" in redact(text)


@pytest.mark.parametrize(
    "text",
    [
        "worker i-0abc started as process 17",
        "the lease is 81 s old and holds for 60 s",
        "no session token from http://169.254.169.254: timed out",
        "torch 2.12.1 on i-1, 2.13.0 in the notebook",
    ],
)
def test_other_text_is_unchanged(text):
    assert redact(text) == text


def test_log_is_redacted_with_its_tracebacks():
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    root = logging.getLogger()
    root.addHandler(handler)
    formatters = {known: known.formatter for known in root.handlers}
    try:
        redact_logs()
        try:
            raise OSError(f"aws_session_token={SECRET}")
        except OSError:
            logging.getLogger("etrain.agent").exception("with AKIA%s", "IOSFODNN7EXAMPLE")
    finally:
        root.removeHandler(handler)
        for known, formatter in formatters.items():
            known.setFormatter(formatter)
    assert "Traceback" in stream.getvalue()
    assert SECRET not in stream.getvalue()
    assert "IOSFODNN7EXAMPLE" not in stream.getvalue()
