"""The pool as a kernel sees it, without a cluster."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from etrain_jupyter.errors import ConfigError, PoolError
from etrain_jupyter.plugins.slurm import commands
from etrain_jupyter.plugins.slurm.pool import SlurmPool
from etrain_jupyter.pools import clusters
from etrain_jupyter.pools.own_clusters import find_cluster_dir
from etrain_jupyter.pools.registry import get_pool, pool_of
from etrain_jupyter.process.cluster_dir import ClusterDir
from etrain_jupyter.process.cluster_settings import ClusterSettings
from tests.capabilities import needs_module


@pytest.fixture
def write_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], SlurmPool]:
    monkeypatch.setenv("ETRAIN_POOLS", str(tmp_path / "pools.yaml"))
    monkeypatch.setenv("ETRAIN_STATE", str(tmp_path / "state"))

    def write(keys: str) -> SlurmPool:
        (tmp_path / "pools.yaml").write_text(f"hpc: {{kind: slurm, {keys}}}\n")
        pool = get_pool("hpc")
        assert isinstance(pool, SlurmPool)
        return pool

    return write


@pytest.fixture
def with_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "check_commands", lambda: None)


def test_invalid_key_is_reported_with_its_line(write_pool: Any) -> None:
    with pytest.raises(ConfigError, match="unknown key 'quue'") as caught:
        write_pool("quue: gpu")

    assert "pools.yaml, line 1" in caught.value.render()[0]


def test_missing_library_is_reported_with_the_command(
    write_pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(PoolError, match=r"dask-jobqueue is not installed.*etrain-jupyter\[slurm\]"):
        write_pool("cores: 1").up()


@needs_module("dask_jobqueue")
@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("interface: nosuch0", "no address on interface 'nosuch0'.*head_host: ADDRESS"),
        ("interface: lo", "nodes cannot reach this machine at 127.0.0.1"),
    ],
)
def test_machine_that_nodes_cannot_reach_starts_nothing(
    write_pool: Any, with_commands: None, key: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(PoolError, match=message):
        write_pool(key).settings()

    assert not (tmp_path / "shared").exists()


@needs_module("dask_jobqueue")
def test_settings_of_the_head_contain_the_spec(write_pool: Any, with_commands: None) -> None:
    settings = write_pool("head_host: 10.0.0.1, queue: gpu, lifetime: {idle: 1 h}").settings()

    assert (settings.host, settings.idle_s, settings.pool) == ("10.0.0.1", 3600.0, "hpc")
    assert settings.spec["queue"] == "gpu"


def test_price_is_the_worst_case_or_unknown(write_pool: Any) -> None:
    assert write_pool("price: 1.5").price(2) == "at most $3 per hour for 2 SLURM jobs"
    assert write_pool("price: 1.5, workers: {max: 3}").price(9).startswith("at most $4.5")
    assert "unknown" in write_pool("queue: gpu").price(2)


def test_cluster_is_found_and_bound_to_the_spec_of_its_start(
    write_pool: Any, tmp_path: Path
) -> None:
    write_pool("queue: other")
    settings = ClusterSettings(pool="hpc", prefix="slurm-abc123", spec={"queue": "gpu"})
    (tmp_path / "state").mkdir(mode=0o700)
    cluster = ClusterDir.make(tmp_path / "state" / "slurm-abc123-def456", settings)

    found = find_cluster_dir("slurm-abc123-def456")
    assert found == cluster
    pool = pool_of(cluster)
    assert isinstance(pool, SlurmPool)
    assert (pool.name, pool.spec.queue) == ("hpc", "gpu")


def test_list_of_pools_shows_the_partition(write_pool: Any) -> None:
    write_pool("queue: gpu")

    assert "hpc: slurm, gpu (" in clusters.describe_pools()
