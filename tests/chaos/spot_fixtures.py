"""Fixtures with spot clusters, which need the plug-in for EC2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from etrain_jupyter.plugins.ec2.simulator import FakeAws
from tests.chaos.spot import Spot, open_cloud, open_spot


@pytest.fixture(scope="module")
def spot_cloud() -> Iterator[FakeAws]:
    """Provide one cloud per test file; machines get network namespaces if the system allows it."""
    with open_cloud() as cloud:
        yield cloud


@pytest.fixture
def spot(
    spot_cloud: FakeAws,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> Iterator[Spot]:
    """Provide a new user's folder in the reset cloud; the test must leave nothing behind."""
    yield from open_spot(spot_cloud, monkeypatch, tmp_path, request.node.name)
