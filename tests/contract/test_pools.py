"""Every pool passes the shipped contract."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from etrain_jupyter.plugins.ec2.client.pool import AwsSpotPool
from etrain_jupyter.plugins.ec2.simulator import FakeAws
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec
from etrain_jupyter.plugins.slurm.pool import SlurmPool
from etrain_jupyter.plugins.slurm.simulator import FakeSlurm
from etrain_jupyter.plugins.slurm.spec import SlurmSpec
from etrain_jupyter.pools.address.pool import AddressPool
from etrain_jupyter.pools.base import Pool
from etrain_jupyter.pools.local import LocalPool
from etrain_jupyter.process.cluster_settings import ClusterSettings
from etrain_jupyter.testing.pool_contract import PoolContract
from tests.capabilities import needs_module
from tests.integration.dask_cluster import DaskCluster
from tests.unit.pools import standins


class TestLocalPool(PoolContract):
    @pytest.fixture
    def make_pool(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], LocalPool]:
        monkeypatch.setenv("ETRAIN_STATE", str(tmp_path / "state"))
        settings = ClusterSettings(
            idle_s=60, coordinator=standins.COORDINATOR, supervisor=standins.SUPERVISOR
        )
        return lambda: LocalPool(settings=settings)


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaskCluster]:
    cluster = DaskCluster(tmp_path_factory.mktemp("dask"))
    yield cluster
    assert cluster.is_alive("scheduler"), "it is not ours to end"
    cluster.close()


class TestAddressPool(PoolContract):
    """A scheduler that is there for the whole module; each test begins without workers."""

    starts_nodes = False
    owns_cluster = False

    @pytest.fixture
    def make_pool(self, scheduler: DaskCluster) -> Iterator[Callable[[], AddressPool]]:
        self.scheduler = scheduler
        yield lambda: AddressPool(scheduler.address)
        scheduler.end_workers()

    def bring_nodes(self, pool: Pool, count: int) -> None:
        for _ in range(count):
            self.scheduler.start_worker()


class TestAwsSpotPool(PoolContract):
    """Machines of the fake cloud, with a head, agents and workers as on EC2."""

    @pytest.fixture
    def make_pool(
        self, cloud: FakeAws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Callable[[], AwsSpotPool]:
        monkeypatch.setenv("ETRAIN_STATE", str(tmp_path / "state"))
        account = cloud.make_account()
        spec = AwsSpotSpec.parse(
            {
                "region": account.region,
                "bucket": account.bucket,
                "head_host": cloud.host_address,
                "workers": {"max": 3},
                "tick": "1 s",
                "capacity": {"types": ["g5.xlarge", "g6.xlarge"]},
                "image": {"ami": account.image, "python": sys.executable},
                # A minute of these machines is a second.
                "lifetime": {"lease_ttl": "30 s", "boot": "60 min"},
            }
        )
        return lambda: AwsSpotPool("spot", spec)


@needs_module("dask_jobqueue")
class TestSlurmPool(PoolContract):
    """Jobs of the simulated SLURM, with a head and workers as on a real one."""

    @pytest.fixture
    def make_pool(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[Callable[[], SlurmPool]]:
        monkeypatch.setenv("ETRAIN_STATE", str(tmp_path / "state"))
        monkeypatch.setenv("DASK_CONFIG", str(tmp_path / "dask"))
        spec = SlurmSpec.parse(
            {
                "cores": 1,
                "memory": "1 GiB",
                "folder": str(tmp_path / "shared"),
                "head_host": "127.0.0.1",
                "tick": "0.5 s",
            }
        )

        def change(settings: ClusterSettings) -> ClusterSettings:
            return dataclasses.replace(
                settings, coordinator=standins.COORDINATOR, supervisor=standins.SUPERVISOR
            )

        with FakeSlurm() as slurm:
            monkeypatch.setenv("PATH", slurm.path)
            yield lambda: SlurmPool("hpc", spec, change=change)
            assert slurm.running() == []
        assert list((tmp_path / "shared").iterdir()) == []
