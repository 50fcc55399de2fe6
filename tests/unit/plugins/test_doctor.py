"""Checks of ``%etrain doctor`` for pools of kinds that plug-ins add."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from etrain_jupyter.errors import PoolError
from etrain_jupyter.notebook.commands.doctor import Finding, examine
from etrain_jupyter.notebook.job.run_store import RunStore
from etrain_jupyter.plugins.ec2 import doctor as ec2_doctor
from etrain_jupyter.plugins.ec2 import reaping
from etrain_jupyter.plugins.ec2.reaping import Tagged

SECTION = "## "


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunStore:
    monkeypatch.setenv("ETRAIN_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("ETRAIN_POOLS", str(tmp_path / "pools.yaml"))
    return RunStore(tmp_path / "runs")


@pytest.fixture
def pools(store: RunStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of pools, on a machine on which boto3 finds no credentials."""
    for name in ("AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    return tmp_path / "pools.yaml"


def of_pools(store: RunStore) -> list[Finding]:
    return [finding for finding in examine(store) if finding.topic == "pools"]


SPOT = "spot: {kind: aws-spot, region: us-east-1, bucket: my-bucket}\n"


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (SPOT + "lab: {kind: adress, address: tcp://1.2.3.4:1}\n", "line 2, column 1: "),
        (SPOT + "big: {kind: aws-spot, region: us-east-1}\n", "line 2"),
        ("spot: [", "line 1"),
    ],
)
def test_error_in_pools_yaml_is_reported_with_its_position(
    pools: Path, store: RunStore, text: str, where: str
) -> None:
    pools.write_text(text)

    faults = [found for found in of_pools(store) if "AWS" not in str(found)]
    [wrong] = [found for found in faults if found.state == "wrong"]

    assert wrong.what.startswith(f"{pools}, {where}")
    assert wrong.remedy


def test_ec2_pool_without_credentials_or_boto3_is_found_without_a_request(
    pools: Path, store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools.write_text(SPOT)
    named, wrong = of_pools(store)
    assert (named.state, named.what) == ("ok", f"pool spot: aws-spot, us-east-1 ({pools})")
    assert (wrong.state, wrong.what) == (
        "wrong",
        "no AWS credentials: none were found on this machine",
    )

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    assert of_pools(store)[1].what.endswith("credentials from the environment")

    pools.write_text(SPOT.replace("}", ", profile: nobody}"))
    assert "nobody" in of_pools(store)[1].what

    known = ec2_doctor.version_of
    monkeypatch.setattr(
        ec2_doctor, "version_of", lambda name: "" if name == "boto3" else known(name)
    )
    assert of_pools(store)[1].remedy == "pip install 'etrain-jupyter[aws]'"


def test_slurm_pool_needs_the_commands_of_slurm(
    pools: Path, store: RunStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pools.write_text("hpc: {kind: slurm, queue: gpu}\n")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setenv("PATH", str(tmp_path))
    [wrong] = of_pools(store)
    assert wrong.state == "wrong"
    assert wrong.what.startswith("sbatch and squeue and scancel not found in PATH")

    for name in ("sbatch", "squeue", "scancel"):
        (tmp_path / name).touch(mode=0o755)
    [found] = of_pools(store)
    assert (found.state, found.what) == ("ok", f"pool hpc: slurm, gpu ({pools})")


def test_ec2_is_queried_only_on_request_and_expired_resources_are_wrong(
    pools: Path, store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def thing(cluster: str, expires_at: float, **facts: Any) -> Tagged:
        usual = {"kind": "instance", "id": "i-1", "region": "us-east-1", "usd_per_h": 0.25}
        return Tagged(cluster_id=cluster, expires_at=expires_at, **usual | facts)

    later = time.time() + 3600
    found = [
        thing("aws-1-a", later),
        thing("aws-1-a", later, kind="security-group", usd_per_h=0.0),
        thing("aws-1-b", 1.0),
    ]
    asked: list[str] = []

    def find_tagged(clients: object, region: str) -> list[Tagged]:
        asked.append(region)
        if region == "eu-west-1":
            raise PoolError("AWS does not allow it")
        return found

    monkeypatch.setattr(reaping, "find_tagged", find_tagged)
    pools.write_text(SPOT)

    assert len(of_pools(store)) == 2
    assert asked == []
    told = examine(store, with_all=True, region="eu-west-1")
    up, expired, refused = [finding for finding in told if finding.topic == "pools"][2:]
    assert (up.state, up.what) == (
        "ok",
        "cluster aws-1-a on EC2 in us-east-1: 1 machine, 1 other resource, $0.25/h",
    )
    assert (expired.state, expired.remedy) == ("wrong", "%etrain reap ends it")
    assert (refused.state, refused.what) == ("wrong", "AWS does not allow it")
