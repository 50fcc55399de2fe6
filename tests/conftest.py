"""For all tests: examples of hypothesis have no time limit; who asks gets an S3, or a cloud."""

from __future__ import annotations

import gc
import itertools
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import settings

from etrain_jupyter.testing.fakeaws.fixtures import *  # noqa: F403
from etrain_jupyter.testing.s3_server import S3Server

settings.register_profile("etrain", deadline=None)  # a shared machine is slow at times
settings.load_profile("etrain")

pytest_plugins = ("pytester", "tests.plugins.run_report")

_numbers = itertools.count(1)

PROCESSES = ("browser", "chaos", "contract", "integration", "notebooks")
"""Folders whose tests wait for real processes on a shared machine."""
TIMEOUT_S = 300
"""Of such a test, if it names none: what takes a minute may take several on a busy machine."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let such a test begin again once; the run's last lines name it, so that it gets fixed.

    Some 400 tests depend on when the system lets which process run. Pure logic has no excuse, and
    the long runs that look for what happens rarely (``make endurance``) take no second try.
    """
    for item in items:
        if item.path.relative_to(Path(__file__).parent).parts[0] in PROCESSES:
            item.add_marker(pytest.mark.flaky(reruns=1))
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session", autouse=True)
def _state_of_nobody(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the tests' keys and clusters out of the state directory of whoever runs them."""
    with pytest.MonkeyPatch.context() as patch:
        if "ETRAIN_STATE" not in os.environ:
            patch.setenv("ETRAIN_STATE", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="module", autouse=True)
def _forgotten_sockets(request: pytest.FixtureRequest) -> Iterator[None]:
    """Free what a file's tests have forgotten, before the next file's tests are blamed for it.

    Dask leaves plain sockets to the garbage collector. Its warning came in whatever test ran then,
    often one of another file, and failed it. What our processes leave behind is asserted by the
    tests themselves.
    """
    yield
    if request.path.relative_to(Path(__file__).parent).parts[0] in PROCESSES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()


@pytest.fixture(scope="session")
def s3_process() -> Iterator[S3Server]:
    """Give one server for the session."""
    with S3Server() as server:
        yield server


@pytest.fixture
def s3_server(s3_process: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> S3Server:
    """Give it without faults, as what boto3 finds."""
    s3_process.set_faults()
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "aws_config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "aws_credentials"))
    for name, value in s3_process.environment.items():
        monkeypatch.setenv(name, value)
    return s3_process


@pytest.fixture
def s3_bucket(s3_server: S3Server) -> str:
    """Give a new bucket's name."""
    name = f"bucket-{next(_numbers)}"
    s3_server.make_bucket(name)
    return name


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let retries follow at once."""
    clock = SimpleNamespace(sleep=lambda _: None, time=time.time, monotonic=time.monotonic)
    monkeypatch.setattr("botocore.endpoint.time", clock)
    monkeypatch.setattr("etrain_jupyter.storage.objects.s3_requests.time", clock)
