"""Every pool passes the shipped contract."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from etrain_jupyter.pools.local import LocalPool
from etrain_jupyter.pools.state_dir import LocalSettings
from etrain_jupyter.testing.pool_contract import PoolContract
from tests.unit.pools import standins


class TestLocalPool(PoolContract):
    @pytest.fixture
    def make_pool(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], LocalPool]:
        monkeypatch.setenv("ETRAIN_STATE", str(tmp_path / "state"))
        settings = LocalSettings(
            idle_s=60, coordinator=standins.COORDINATOR, supervisor=standins.SUPERVISOR
        )
        return lambda: LocalPool(settings=settings)
