"""``write_shards`` on the workers of an existing Dask cluster."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from etrain_jupyter.data import Shards, write_shards
from etrain_jupyter.errors import PoolError, ShardError
from etrain_jupyter.process.tls import mint_certificates, write_certificates
from tests.capabilities import long
from tests.integration.dask_cluster import DaskCluster
from tests.unit.data.indexed_rows import NUM_ROWS, ExitingRows, Rows, content

pytestmark = pytest.mark.timeout(300)
BLOCK_BYTES = 100


@pytest.fixture(autouse=True)
def closed_connections() -> Iterator[None]:
    """Raise the warning about leaked sockets in the test that caused it."""
    yield
    gc.collect()


def test_killed_dask_worker_changes_no_byte(tmp_path: Path) -> None:
    write_shards(Rows(), tmp_path / "one", block_bytes=BLOCK_BYTES, progress=False)
    cluster = DaskCluster(tmp_path / "dask")
    try:
        with pytest.raises(PoolError, match="has no workers"):
            write_shards(Rows(), tmp_path / "many", pool=cluster.address, progress=False)
        first = cluster.start_worker()
        cluster.start_worker()
        arguments = (cluster, first, tmp_path / "many")
        killer = threading.Thread(target=kill_one, args=arguments, daemon=True)
        killer.start()

        shards = write_shards(
            Rows(delay_s=0.02),
            tmp_path / "many",
            block_bytes=BLOCK_BYTES,
            pool=cluster.address,
            progress=False,
        )

        killer.join(timeout=60)
        assert not killer.is_alive(), "a worker was killed in the middle of its part"
    finally:
        cluster.close()
    assert content(tmp_path / "many") == content(tmp_path / "one")
    assert len(shards) == NUM_ROWS


@long
def test_cluster_that_is_lost_is_an_error_and_the_write_continues(tmp_path: Path) -> None:
    to = tmp_path / "set"
    cluster = DaskCluster(
        tmp_path / "dask", environment={"DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "0"}
    )
    try:
        cluster.start_worker()
        with pytest.raises(PoolError, match="exited while they ran the same task"):
            write_shards(
                ExitingRows(exit_at=5), tmp_path / "exits", pool=cluster.address, progress=False
            )
        cluster.start_worker()
        arguments = (cluster, "scheduler", to)
        killer = threading.Thread(target=kill_one, args=(*arguments, 1), daemon=True)
        killer.start()
        with pytest.raises(PoolError, match=r"connection to .* was lost"):
            write_shards(Rows(delay_s=0.02), to, pool=cluster.address, progress=False)
        killer.join(timeout=60)
        assert not killer.is_alive()
    finally:
        cluster.close()

    assert len(write_shards(Rows(), to, progress=False)) == NUM_ROWS


def kill_one(cluster: DaskCluster, name: str, to: Path, num_begun: int = 2) -> None:
    """Kill a process of the cluster once some parts have been begun."""
    while len(list((to / ".writing").glob("rows-*.partial"))) < num_begun:
        time.sleep(0.005)
    cluster.kill(name)


def test_pool_with_certificates_names_the_row_that_fails_and_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates = tmp_path / "tls"
    write_certificates(certificates, mint_certificates("theirs"))
    files = {"ca-file": "ca.pem", "cert": "worker.pem", "key": "worker.key"}
    tls = {option: str(certificates / name) for option, name in files.items()}
    cluster = DaskCluster(tmp_path / "dask", tls=tls)
    pools = tmp_path / "pools.yaml"
    pools.write_text(
        f"lab: {{kind: address, address: '{cluster.address}', tls: {{ca: tls/ca.pem, "
        "cert: tls/client.pem, key: tls/client.key}}\n"
    )
    monkeypatch.setenv("ETRAIN_POOLS", str(pools))
    try:
        cluster.start_worker()
        with pytest.raises(ShardError, match="row 217 of the source cannot be read"):
            write_shards(Rows(fail_at=217), tmp_path / "set", pool="lab", progress=False)
        with pytest.raises(ShardError, match="write has not finished"):
            len(Shards(tmp_path / "set"))

        shards = write_shards(Rows(), tmp_path / "set", pool="lab", progress=False)
    finally:
        cluster.close()
    assert sorted(row["id"] for row in shards) == list(range(NUM_ROWS))
