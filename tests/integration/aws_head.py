"""Fixtures for a head of ``aws-spot`` on the fake cloud, with simulated worker connections."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from etrain_jupyter.head.coordinator.nodes import JobProgress
from etrain_jupyter.head.interfaces import HeadFacts
from etrain_jupyter.plugins.ec2.head.nodes import AwsNodes
from etrain_jupyter.plugins.ec2.simulator import FakeAws
from etrain_jupyter.plugins.ec2.simulator.fixtures import point_boto_at
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec
from etrain_jupyter.process.cluster_dir import ClusterDir
from etrain_jupyter.process.cluster_settings import ClusterSettings
from etrain_jupyter.process.tls import mint_certificates, write_certificates

__all__ = ["Head", "cloud", "cluster_dir", "machines", "make_head", "make_spec", "open_head"]

PATIENCE_S = 90.0
STAYS = "sleep 3600"
"""Command that a node runs instead of its agent."""


@pytest.fixture(scope="module")
def machines() -> Iterator[FakeAws]:
    """Provide one cloud whose machines are processes on the loopback interface."""
    with FakeAws("loopback") as cloud:
        yield cloud


@pytest.fixture
def cloud(machines: FakeAws, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeAws]:
    machines.reset()
    point_boto_at(machines, monkeypatch, tmp_path)
    machines.make_account()
    yield machines
    machines.set_faults()
    machines.set_lag(0)
    assert machines.leftovers() == {}


def make_spec(cloud: FakeAws, **keys: Any) -> AwsSpotSpec:
    account = cloud.make_account()
    usual: dict[str, Any] = {
        "region": cloud.region,
        "bucket": account.bucket,
        "workers": {"max": 4},
        "capacity": {"types": ["g5.xlarge", "g6.xlarge"]},
        "image": {"ami": account.image, "python": sys.executable, "setup": [STAYS]},
        "iam": {"instance_profile": account.instance_profile},
        "lifetime": {"linger": "0.2 s", "lease_ttl": "8 s"},
        "interruption": {"drain": "1 s"},
        "tick": "0.2 s",
    }
    return AwsSpotSpec.parse(usual | keys)


@dataclasses.dataclass
class Head:
    """Stand-in for the scheduler and the coordinator."""

    cloud: FakeAws
    nodes: AwsNodes
    connected: set[str] = dataclasses.field(default_factory=set)
    busy: set[str] = dataclasses.field(default_factory=set)
    gone: dict[str, str] = dataclasses.field(default_factory=dict)
    warnings: list[str] = dataclasses.field(default_factory=list)
    halts: list[str] = dataclasses.field(default_factory=list)
    notices: dict[str, float] = dataclasses.field(default_factory=dict)
    jobs: list[JobProgress] = dataclasses.field(default_factory=list)
    is_serving: bool = True
    """True if machines connect as soon as they are listed."""

    async def until(self, is_true: Callable[[], object]) -> None:
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + PATIENCE_S
        while not is_true():
            assert loop.time() < ends_at, (self.nodes.nodes(), self.warnings, self.halts)
            if self.is_serving:
                self.connected |= {node["worker"] for node in self.nodes.nodes()} - set(self.gone)
            self.nodes.reap()
            await asyncio.sleep(0.05)

    def running(self) -> list[str]:
        return [node["worker"] for node in self.nodes.nodes() if node["state"] == "running"]

    def launched(self) -> list[str]:
        return [one.instance_id for one in self.cloud.instances()]

    def living(self) -> list[str]:
        return [one.instance_id for one in self.cloud.instances("pending", "running")]


@pytest.fixture
def cluster_dir(tmp_path: Path) -> ClusterDir:
    (tmp_path / "state").mkdir()
    made = ClusterDir.create(tmp_path / "state", ClusterSettings())
    write_certificates(made.tls, mint_certificates(made.cluster_id))
    return made


def make_head(cloud: FakeAws, cluster_dir: ClusterDir, spec: AwsSpotSpec) -> Head:
    head: Head
    nodes = AwsNodes(
        HeadFacts(
            cluster=cluster_dir,
            settings=ClusterSettings(spec=spec.model_dump(mode="json", exclude_unset=True)),
            parent_pipe=-1,
            incarnation=1,
            is_connected=lambda worker: worker in head.connected,
            is_busy=lambda worker: worker in head.busy,
            on_gone=lambda worker, why: head.gone.update({worker: why}),
            on_warning=lambda text: head.warnings.append(text),
            on_note=lambda text: None,
            on_notice=lambda worker, at: head.notices.update({worker: at}),
            progress=lambda: head.jobs,
            on_halt=lambda text: head.halts.append(text),
        )
    )
    head = Head(cloud=cloud, nodes=nodes)
    return head


@pytest_asyncio.fixture
async def open_head(cloud: FakeAws, cluster_dir: ClusterDir) -> AsyncIterator[Any]:
    """Provide a function that starts a head; close all heads at the end."""
    made: list[Head] = []

    async def start(**keys: Any) -> Head:
        head = make_head(cloud, cluster_dir, make_spec(cloud, **keys))
        made.append(head)
        await head.nodes.start("tls://127.0.0.1:1")
        return head

    yield start
    for head in made:
        await head.nodes.close(grace_s=0.0)
