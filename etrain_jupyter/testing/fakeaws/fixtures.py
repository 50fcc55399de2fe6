"""Fixtures for pytest: one fake cloud for a session, as new for each test, and nothing left.

In a ``conftest.py``::

    from etrain_jupyter.testing.fakeaws.fixtures import *

Then a test that takes ``cloud`` finds boto3 pointed at it, and fails if it leaves anything behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from etrain_jupyter.testing.fakeaws.cloud import FakeAws
from etrain_jupyter.testing.fakeaws.networks import why_no_namespaces

__all__ = ["cloud", "cloud_process", "fresh_cloud", "loopback_cloud_process"]

_REPLACED = (
    "AWS_PROFILE",
    "AWS_SESSION_TOKEN",
    "AWS_ENDPOINT_URL_S3",
    "AWS_EC2_METADATA_SERVICE_ENDPOINT",
)


def needs_namespaces() -> pytest.MarkDecorator:
    """Skip, with the reason, where instances cannot have a network of their own."""
    reason = why_no_namespaces()
    return pytest.mark.skipif(bool(reason), reason=reason)


@pytest.fixture(scope="session")
def cloud_process() -> Iterator[FakeAws]:
    """Give one cloud for the session, with namespaces where they can be had."""
    with FakeAws(minute_s=1.0) as cloud:
        yield cloud


@pytest.fixture(scope="session")
def loopback_cloud_process() -> Iterator[FakeAws]:
    """Give one cloud for the session whose instances are on the loopback interface."""
    with FakeAws("loopback", minute_s=1.0) as cloud:
        yield cloud


@pytest.fixture
def fresh_cloud(
    cloud_process: FakeAws, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[FakeAws]:
    """Give it as new and as what boto3 finds, for tests of parts that do not clean up."""
    cloud_process.reset()
    point_boto_at(cloud_process, monkeypatch, tmp_path)
    yield cloud_process
    cloud_process.reset()


@pytest.fixture
def cloud(fresh_cloud: FakeAws) -> Iterator[FakeAws]:
    """Give it as new and as what boto3 finds; afterwards nothing may be left in it."""
    yield fresh_cloud
    fresh_cloud.set_faults()
    assert fresh_cloud.leftovers() == {}


def point_boto_at(cloud: FakeAws, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let boto3 find this cloud only, whatever this machine's configuration is."""
    for name in _REPLACED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(folder / "aws_config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(folder / "aws_credentials"))
    for name, value in cloud.environment.items():
        monkeypatch.setenv(name, value)
