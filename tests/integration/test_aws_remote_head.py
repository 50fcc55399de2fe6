"""A head on its own EC2 machine: direct access, SSM tunnel, shutdown, loss and failed start."""

from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from etrain_jupyter import launch
from etrain_jupyter.config import parse_mapping
from etrain_jupyter.errors import ConfigError, PoolError
from etrain_jupyter.notebook.job.training_job import TrainingJob
from etrain_jupyter.plugins.ec2.client.pool import AwsSpotPool
from etrain_jupyter.plugins.ec2.simulator import Account, FakeAws
from etrain_jupyter.pools.registry import get_pool
from etrain_jupyter.process.cluster_dir import cluster_dirs
from tests.capabilities import long
from tests.chaos.workload import body

pytestmark = [pytest.mark.aws, pytest.mark.timeout(300)]

PATIENCE_S = 120.0
MakePool = Callable[..., AwsSpotPool]


@pytest.fixture
def account(cloud: FakeAws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Account:
    """Provide an account with both roles and a state directory for the test."""
    monkeypatch.setenv("ETRAIN_STATE", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    cloud.make_account(role="etrain-head")
    account = cloud.make_account()
    monkeypatch.setenv("ETRAIN_RUNS", f"s3://{account.bucket}/etrain/runs")
    spot = {"zone": f"{account.region}a", "capacity": 4, "price_usd": 0.3}
    cloud.set_market(
        [{"instance_type": "g5.xlarge", **spot}],
        [
            {"instance_type": "t3.medium", "price_usd": 0.05},
            {"instance_type": "g5.xlarge", "price_usd": 1.0},
        ],
    )
    return account


@pytest.fixture
def make_pool(account: Account, tmp_path: Path) -> MakePool:
    """Provide a function that writes pools.yaml and returns its pool."""

    def make(**changes: Any) -> AwsSpotPool:
        keys = {
            "kind": "aws-spot",
            "region": account.region,
            "bucket": account.bucket,
            "head": "on-demand",
            "workers": "{max: 2}",
            "tick": "1 s",
            "capacity": "{types: [g5.xlarge]}",
            "image": f"{{ami: {account.image}, python: {sys.executable}}}",
            # A minute of these machines takes one second.
            "lifetime": "{lease_ttl: 8 s, boot: 60 min, linger: 2 s}",
            **changes,
        }
        lines = [f"  {key}: {value}" for key, value in keys.items()]
        (tmp_path / "pools.yaml").write_text("\n".join(["spot:", *lines]) + "\n")
        pool = get_pool("spot")
        assert isinstance(pool, AwsSpotPool)
        return pool

    return make


def submit(**changes: Any) -> TrainingJob:
    keys = body(pool="spot", workers={"min": 1, "max": 2}, epochs=2, **changes)
    return launch.submit(launch.plan_job(parse_mapping(keys, {}), {}))


def running(cloud: FakeAws, role: str) -> list[str]:
    found = cloud.instances("pending", "running")
    return [one.instance_id for one in found if one.tags.get("etrain:role") == role]


def test_job_trains_with_a_remote_head_and_down_leaves_nothing(
    cloud: FakeAws, make_pool: MakePool
) -> None:
    pool = make_pool()
    job = submit()
    assert job.wait(PATIENCE_S) == "finished", job
    assert job.audit().ok
    assert job.cost().spent_usd > 0
    assert len(running(cloud, "head")) == 1

    assert pool.up() == get_pool("spot").up(), "another kernel finds the same head"
    assert not pool.down(timeout_s=PATIENCE_S)
    assert cluster_dirs() == []


def test_remote_head_refuses_a_job_with_a_local_run_store(
    cloud: FakeAws, make_pool: MakePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_pool()
    monkeypatch.setenv("ETRAIN_RUNS", str(tmp_path / "runs"))

    with pytest.raises(ConfigError, match="cannot reach") as caught:
        submit()

    assert "ETRAIN_RUNS=s3://" in caught.value.hint
    assert cloud.instances() == []


@long
def test_machines_terminate_after_the_loss_of_their_head_and_up_starts_a_new_cluster(
    cloud: FakeAws, make_pool: MakePool
) -> None:
    pool = make_pool()
    first = pool.up()
    pool.want(1, reason="test")
    cloud.wait_until(lambda: running(cloud, "node"))
    [head] = running(cloud, "head")

    cloud.preempt(head, silent=True)
    cloud.wait_until(lambda: not cloud.instances("pending", "running"))

    assert pool.up().cluster_id != first.cluster_id
    assert not pool.down(timeout_s=PATIENCE_S)


def test_head_that_fails_to_start_is_removed_and_its_console_is_shown(
    cloud: FakeAws, make_pool: MakePool, account: Account
) -> None:
    image = f"{{ami: {account.image}, python: /nowhere/python}}"
    pool = make_pool(image=image)

    with pytest.raises(PoolError, match="ended before its scheduler listened") as caught:
        pool.up()

    assert "/nowhere/python" in str(caught.value)
    assert cluster_dirs() == []


FORWARD = """
import asyncio, boto3, os, sys
words = dict(zip(sys.argv[3::2], sys.argv[4::2]))
ports = dict(pair.split("=") for pair in words["--parameters"].split(","))
found = boto3.client("ec2").describe_instances(InstanceIds=[words["--target"]])
host = found["Reservations"][0]["Instances"][0]["PrivateIpAddress"]
async def copy(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()
async def serve(reader, writer):
    there = await asyncio.open_connection(host, int(ports["portNumber"]))
    await asyncio.gather(copy(reader, there[1]), copy(there[0], writer), return_exceptions=True)
async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", int(ports["localPortNumber"]))
    await server.serve_forever()
asyncio.run(main())
"""
"""Stand-in for ``aws ssm start-session`` with port forwarding."""


@long
def test_client_outside_the_network_reaches_the_head_through_an_ssm_tunnel(
    cloud: FakeAws, make_pool: MakePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "bin" / "aws"
    script.parent.mkdir()
    script.write_text(f"#!{sys.executable}\n{textwrap.dedent(FORWARD)}")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    pool = make_pool(head_tunnel="ssm")

    address = pool.up()
    assert address.address.startswith("tls://127.0.0.1:")
    [cluster] = cluster_dirs()
    tunnel = json.loads((cluster.path / "tunnel.json").read_text())

    os.kill(tunnel["pid"], signal.SIGKILL)
    assert pool.up() == address, "the tunnel is reopened at the same port"
    assert not pool.down(timeout_s=PATIENCE_S)


def test_tunnel_without_the_aws_command_line_names_the_missing_program(
    cloud: FakeAws, make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etrain_jupyter.plugins.ec2.client.head_link.shutil.which", lambda _: None)
    pool = make_pool(head_tunnel="ssm")

    with pytest.raises(PoolError, match="needs the AWS command line"):
        pool.up()

    assert cloud.instances() == []
