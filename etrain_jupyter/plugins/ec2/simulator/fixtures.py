"""pytest fixtures: one simulated cloud per session, reset for each test, with a leak check.

In a ``conftest.py``::

    from etrain_jupyter.plugins.ec2.simulator.fixtures import *

A test that uses ``cloud`` finds boto3 configured for it, and fails if it leaves anything behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from etrain_jupyter.plugins.ec2.simulator.cloud import FakeAws

__all__ = ["cloud", "cloud_process", "fresh_cloud", "loopback_cloud_process"]

# Variables of this machine that would take precedence over those of the simulated cloud.
_REPLACED = (
    "AWS_PROFILE",
    "AWS_SESSION_TOKEN",
    "AWS_ENDPOINT_URL_S3",
    "AWS_EC2_METADATA_SERVICE_ENDPOINT",
)


@pytest.fixture(scope="session")
def cloud_process() -> Iterator[FakeAws]:
    """Provide one cloud for the session, with namespaces if possible."""
    with FakeAws(minute_s=1.0) as cloud:
        yield cloud


@pytest.fixture(scope="session")
def loopback_cloud_process() -> Iterator[FakeAws]:
    """Provide one cloud for the session with instances on the loopback interface."""
    with FakeAws("loopback", minute_s=1.0) as cloud:
        yield cloud


@pytest.fixture
def fresh_cloud(
    cloud_process: FakeAws, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[FakeAws]:
    """Provide a reset cloud for boto3, for tests of components that do not clean up."""
    cloud_process.reset()
    point_boto_at(cloud_process, monkeypatch, tmp_path)
    yield cloud_process
    cloud_process.reset()


@pytest.fixture
def cloud(fresh_cloud: FakeAws) -> Iterator[FakeAws]:
    """Provide a reset cloud for boto3, and check afterwards that nothing is left in it."""
    yield fresh_cloud
    fresh_cloud.set_faults()  # faults would also affect the check
    assert fresh_cloud.leftovers() == {}


def point_boto_at(cloud: FakeAws, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Make boto3 use this cloud only, regardless of this machine's configuration."""
    for name in _REPLACED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(folder / "aws_config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(folder / "aws_credentials"))
    for name, value in cloud.environment.items():
        monkeypatch.setenv(name, value)
