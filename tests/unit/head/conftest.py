"""A coordinator without a network for each test that names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.head.coordinator.rig import Rig


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(tmp_path, monkeypatch)
