"""The installer of a node: requests to S3, and the environment's interpreter."""

from __future__ import annotations

import ast
import os
import time
import urllib.parse
from pathlib import Path

import botocore.auth
import botocore.awsrequest
import botocore.credentials
import pytest

from etrain_jupyter.plugins.ec2.machine import install

KEYS = ("AKIAEXAMPLE", "secret", "token")


def test_installer_runs_with_the_python_of_an_old_image() -> None:
    source = Path(install.__file__).read_text()
    tree = ast.parse(source, feature_version=(3, 8))
    imported = {
        name.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for name in node.names
    }
    assert "etrain_jupyter" not in source.replace("etrain-install", "")
    assert imported <= {"argparse", "hashlib", "hmac", "json", "os", "re", "shutil", "subprocess",
                        "sys", "time", "urllib", "zipfile"}  # fmt: skip


@pytest.mark.parametrize("data", [b"", b"a report"])
@pytest.mark.parametrize("key", ["environments/a+b c.json", "wheels/torch-2.9.1+cu128-x.whl"])
def test_signature_is_that_of_botocore(
    monkeypatch: pytest.MonkeyPatch, key: str, data: bytes
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    bucket = install.Bucket("b", "etrain/", "eu-west-1", "111122223333", install.Metadata())
    url = f"https://b.s3.eu-west-1.amazonaws.com/{urllib.parse.quote(f'etrain/{key}')}"
    method = "PUT" if data else "GET"
    ours = bucket._sign(method, urllib.parse.urlsplit(url), data, *KEYS)
    request = botocore.awsrequest.AWSRequest(
        method=method,
        url=url,
        data=data,
        headers={"x-amz-expected-bucket-owner": "111122223333"},
    )
    request.headers["X-Amz-Content-SHA256"] = ours["x-amz-content-sha256"]
    credentials = botocore.credentials.Credentials(*KEYS)
    monkeypatch.setattr(
        botocore.auth, "get_current_datetime",
        lambda *_, **__: __import__("datetime").datetime.strptime(ours["x-amz-date"],
                                                                   "%Y%m%dT%H%M%SZ"),
    )  # fmt: skip
    signer = botocore.auth.S3SigV4Auth(credentials, "s3", "eu-west-1")
    signer.add_auth(request)
    assert ours["Authorization"] == request.headers["Authorization"]


def test_name_with_dots_is_part_of_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    one = install.Bucket("a.b", "", "cn-north-1", "", install.Metadata())
    assert one._base == "https://s3.cn-north-1.amazonaws.com.cn/a.b"


UV = """#!/bin/sh
case "$*" in
  *" venv "*) case "$PATH" in *:/usr/bin:*) ;; *) echo "error: no route" >&2; exit 2;; esac
    for folder; do :; done; mkdir -p $folder/bin; ln -s /usr/bin/env $folder/bin/python;;
esac
"""


def test_missing_interpreter_is_an_error_that_says_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uv = tmp_path / "uv"
    uv.write_text(UV)
    uv.chmod(0o755)
    folder = str(tmp_path / "environment")
    monkeypatch.setenv("PATH", "/bin")
    assert install.make_environment("3.6", str(tmp_path), folder, str(uv)) == os.path.realpath(
        "/usr/bin/env"
    )
    monkeypatch.setattr(install, "PLACES", ())
    with pytest.raises(install.InstallError) as caught:
        install.make_environment("3.6", str(tmp_path), folder, str(uv))
    for part in ("no Python 3.6", "uv could not download it: error: no route", "image.ami",
                 "python3.6", "network.public_ip: true"):  # fmt: skip
        assert part in str(caught.value)


def test_request_is_retried_until_it_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    results = iter([OSError("no route"), ValueError("empty"), "found"])

    def act() -> str:
        result = next(results)
        if isinstance(result, Exception):
            raise result
        return str(result)

    assert install.retry("reading", act) == "found"
    assert len(waits) == 2


def test_programs_do_not_see_the_variables_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("UV_INDEX_URL", "https://me:secret@host")
    shown = install.run(["env"], UV_CACHE_DIR="/cache").stdout
    assert "PYTHONPATH" not in shown
    assert "secret" not in shown
    assert "UV_CACHE_DIR=/cache" in shown
    assert os.environ["PYTHONPATH"] == "/elsewhere"
