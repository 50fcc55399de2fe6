"""What is made for a cluster before its first node: network, template, files. And its removal."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import tarfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from etrain_jupyter.errors import PoolError
from etrain_jupyter.plugins.ec2 import launch_context
from etrain_jupyter.plugins.ec2.bootstrap import (
    BootFacts,
    config_of,
    keys_folder,
    make_template,
    put_node_files,
    tags_of,
    user_data,
)
from etrain_jupyter.plugins.ec2.client.check import check_account
from etrain_jupyter.plugins.ec2.client.pool import AwsSpotPool
from etrain_jupyter.plugins.ec2.client.remote_pool import AwsRemotePool
from etrain_jupyter.plugins.ec2.ec2_api import Clients, list_instances
from etrain_jupyter.plugins.ec2.network import Network, find_subnets, open_network
from etrain_jupyter.plugins.ec2.prices import Prices, on_demand_rate, spot_history
from etrain_jupyter.plugins.ec2.reaping import by_cluster, find_tagged, remove, should_remove
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec
from etrain_jupyter.process.cluster_dir import ClusterDir
from etrain_jupyter.process.cluster_settings import ClusterSettings
from etrain_jupyter.process.tls import mint_certificates, write_certificates

pytestmark = pytest.mark.aws

BOOT = BootFacts(keys="keys/0123", owner="123456789012")
DIGEST = "ab" * 32


@pytest.fixture
def tls_dir(tmp_path: Path) -> Path:
    write_certificates(tmp_path / "tls", mint_certificates("c1"))
    return tmp_path / "tls"


def change(spec: AwsSpotSpec, **keys: Any) -> AwsSpotSpec:
    return AwsSpotSpec.parse(spec.to_dict() | keys)


def tags(spec: AwsSpotSpec, cluster: str = "c1", seconds: float = 3600) -> dict[str, str]:
    return tags_of(spec, cluster, expires_at=time.time() + seconds)


def launch(clients: Clients, template: str) -> str:
    made = clients.ec2.run_instances(
        LaunchTemplate={"LaunchTemplateId": template},
        InstanceType="g5.xlarge",
        MinCount=1,
        MaxCount=1,
    )
    return str(made["Instances"][0]["InstanceId"])


def set_up(clients: Clients, spec: AwsSpotSpec, cluster: str = "c1", seconds: float = 3600) -> str:
    own = tags(spec, cluster, seconds)
    network = open_network(clients.ec2, spec, cluster, own)
    return make_template(clients, spec, cluster, network, own, BOOT)


# --- network ---


def test_default_vpc_gives_one_subnet_per_zone(clients: Clients, spec: AwsSpotSpec) -> None:
    vpc, subnets = find_subnets(clients.ec2, spec)

    assert vpc.startswith("vpc-")
    assert sorted(subnets)[:2] == ["us-east-1a", "us-east-1b"]
    some = change(spec, capacity={"zones": ["us-east-1b"]})
    assert list(find_subnets(clients.ec2, some)[1]) == ["us-east-1b"]


def test_zone_without_a_subnet_is_refused(clients: Clients, spec: AwsSpotSpec) -> None:
    wrong = change(spec, capacity={"zones": ["us-east-1z"]})
    with pytest.raises(PoolError, match="there is no subnet in us-east-1z"):
        find_subnets(clients.ec2, wrong)


def test_missing_default_vpc_error_has_the_command(clients: Clients, spec: AwsSpotSpec) -> None:
    for subnet in clients.ec2.describe_subnets()["Subnets"]:
        clients.ec2.delete_subnet(SubnetId=subnet["SubnetId"])

    with pytest.raises(PoolError, match=r"no default VPC .*`aws ec2 create-default-vpc"):
        find_subnets(clients.ec2, spec)


def test_security_group_allows_its_members_only(clients: Clients, spec: AwsSpotSpec) -> None:
    network = open_network(clients.ec2, spec, "c1", tags(spec))
    again = open_network(clients.ec2, spec, "c1", tags(spec))

    assert again.security_group == network.security_group
    (group,) = clients.ec2.describe_security_groups(GroupIds=[network.security_group])[
        "SecurityGroups"
    ]
    (rule,) = group["IpPermissions"]
    assert [pair["GroupId"] for pair in rule["UserIdGroupPairs"]] == [network.security_group]
    assert rule["IpRanges"] == []
    assert {t["Key"] for t in group["Tags"]} >= {"etrain:cluster", "etrain:owner", "etrain:expires"}


def test_unknown_security_group_is_refused(clients: Clients, spec: AwsSpotSpec) -> None:
    wrong = change(spec, network={"security_group": "sg-0123456789abcdef0"})

    with pytest.raises(PoolError, match=r"no such security group.*Correct network.security_group"):
        open_network(clients.ec2, wrong, "c1", tags(spec))


# --- template and files ---


def test_template_requires_tokens_and_terminates_on_shutdown(
    clients: Clients, spec: AwsSpotSpec
) -> None:
    template = set_up(clients, spec)

    assert set_up(clients, spec) == template  # a head that starts again
    (version,) = clients.ec2.describe_launch_template_versions(LaunchTemplateId=template)[
        "LaunchTemplateVersions"
    ]
    data = version["LaunchTemplateData"]
    assert data["MetadataOptions"]["HttpTokens"] == "required"
    assert data["MetadataOptions"]["HttpPutResponseHopLimit"] == 1
    assert data["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert data["IamInstanceProfile"] == {"Name": "etrain-node"}
    tagged = {one["ResourceType"] for one in data["TagSpecifications"]}
    assert tagged >= {"instance", "volume"}
    assert data["BlockDeviceMappings"][0]["Ebs"]["DeleteOnTermination"]
    script = base64.b64decode(data["UserData"]).decode()
    assert script == user_data(spec, "c1", BOOT)


def test_user_data_arms_the_timer_first_and_holds_no_secret(spec: AwsSpotSpec) -> None:
    full = change(
        spec,
        image={
            "ami": "ami-12345678",
            "setup": ["nvidia-smi"],
            "archive": "s3://my-bucket/e.tar.gz",
            "archive_sha256": DIGEST,
        },
    )
    lines = user_data(full, "c1", BOOT).splitlines()

    assert lines[:2] == ["#!/bin/bash", "shutdown -h +15"]
    assert lines[-2:] == [
        "/opt/pytorch/bin/python -m etrain_jupyter.plugins.ec2.machine.agent "
        "s3://my-bucket/etrain/clusters/c1 --keys keys/0123 --owner 123456789012",
        "shutdown -h now",
    ]
    assert lines.index("nvidia-smi") > 2
    assert len(user_data(full, "c1", BOOT)) < 1024


def test_environment_is_installed_after_the_setup_and_before_the_agent(spec: AwsSpotSpec) -> None:
    image = {"environment": {"manifest": DIGEST}, "setup": ["apt-get update"]}
    lines = user_data(change(spec, image=image), "c1", BOOT).splitlines()

    install = next(line for line in lines if line.startswith("python3 -I -c"))
    assert lines.index("apt-get update") < lines.index(install)
    for part in (f"--manifest {DIGEST}", "--cluster c1", "--owner 123456789012", "shutdown -h now"):
        assert part in install
    agent = f'"$ETRAIN_ROOT/environments/{DIGEST[:16]}/bin/python" -m etrain_jupyter.plugins.ec2'
    assert lines[-2].startswith(agent)
    # Room for image.setup remains within EC2's 16 KiB.
    assert len("\n".join(lines)) < 10_000
    checked = subprocess.run(["bash", "-n"], input="\n".join(lines), text=True, check=False)
    assert checked.returncode == 0


ARCHIVE = {"ami": "ami-12c6146b", "archive": "s3://my-bucket/e.tar.gz"}


def test_archive_without_a_digest_is_refused_with_the_digest_to_add(
    clients: Clients, spec: AwsSpotSpec
) -> None:
    """Review S7: user-data unpacked at / as root whatever lay at that key."""
    plain = change(spec, image=ARCHIVE)
    clients.bucket_at("my-bucket").put("e.tar.gz", b"environment", "test")
    digest = hashlib.sha256(b"environment").hexdigest()

    for refuse in (
        lambda: check_account(clients, plain),
        lambda: AwsSpotPool("spot", plain).price(2),
    ):
        with pytest.raises(PoolError, match=rf"add to this pool.*archive_sha256: '{digest}'"):
            refuse()
    with pytest.raises(PoolError, match=r"`sha256sum e.tar.gz` prints"):
        user_data(plain, "c1", BOOT)
    check_account(clients, change(spec, image=ARCHIVE | {"archive_sha256": digest}))


def test_archive_that_cannot_be_read_is_refused_with_the_command(
    clients: Clients, spec: AwsSpotSpec
) -> None:
    with pytest.raises(
        PoolError, match=r"it does not exist.*`aws s3 cp s3://my-bucket/e.tar.gz - "
    ):
        check_account(clients, change(spec, image=ARCHIVE))


@pytest.mark.parametrize("is_right", [True, False])
def test_node_unpacks_the_archive_only_if_its_digest_matches(
    spec: AwsSpotSpec, tmp_path: Path, is_right: bool
) -> None:
    """Review S7: the script is run as a node runs it, with stand-ins for its commands."""
    target = tmp_path / "unpacked"
    archive = tmp_path / "e.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.addfile(tarfile.TarInfo(str(target).lstrip("/")))
    for name, text in {
        "aws": f'echo "$@" > {tmp_path}/asked; for last; do :; done; cp {archive} "$last"',
        "shutdown": f'echo "$@" >> {tmp_path}/shutdowns',
        "python": f"touch {tmp_path}/agent",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    digest = hashlib.sha256(archive.read_bytes()).hexdigest() if is_right else "00" * 32
    own = change(
        spec, image=ARCHIVE | {"archive_sha256": digest, "python": str(tmp_path / "python")}
    )

    done = subprocess.run(
        ["bash", "-c", user_data(own, "c1", BOOT)],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )

    assert target.exists() is is_right
    assert (tmp_path / "agent").exists() is is_right
    assert ("Nothing was unpacked" in done.stdout) is not is_right
    assert (tmp_path / "shutdowns").read_text().splitlines() == ["-h +15", "-h now"]
    asked = (tmp_path / "asked").read_text()
    assert "--bucket my-bucket --key e.tar.gz --expected-bucket-owner 123456789012" in asked


def test_setup_that_is_too_long_or_contains_a_key_is_refused(spec: AwsSpotSpec) -> None:
    with pytest.raises(PoolError, match=r"is 20.* bytes long; EC2's limit is 16384"):
        user_data(change(spec, image={"setup": ["#" * 20_000]}), "c1", BOOT)
    with pytest.raises(PoolError, match=r"image.setup contains a private key"):
        user_data(change(spec, image={"setup": ["echo '-----BEGIN PRIVATE KEY-----'"]}), "c1", BOOT)


def test_unknown_image_is_refused(clients: Clients, spec: AwsSpotSpec) -> None:
    network = Network(subnets={}, security_group="sg-1", is_ours=True)
    for ami in ("ami-0123456789abcdef0", "ssm:/aws/service/none"):
        with pytest.raises(PoolError, match=r"image.ami=.*[cC]orrect image.ami"):
            make_template(
                clients, change(spec, image={"ami": ami}), "c1", network, tags(spec), BOOT
            )


def test_node_files_have_a_secret_key_folder_and_only_the_worker_key(
    clients: Clients, spec: AwsSpotSpec, tls_dir: Path
) -> None:
    config = config_of(spec, "c1", fingerprint={"python": "3.11"})
    boot = put_node_files(clients, "c1", config, tls_dir)

    # Review S5: all nodes share a role, so only a cluster's own nodes know where its keys are.
    assert re.fullmatch(r"keys/[0-9a-f]{32}", boot.keys)
    assert boot.keys == keys_folder(tls_dir)  # a head that starts again finds the same
    assert boot.owner == "123456789012"
    assert clients.bucket.keys("clusters/c1", "list") == [
        "clusters/c1/config.json",
        f"clusters/c1/{boot.keys}/ca.pem",
        f"clusters/c1/{boot.keys}/worker.key",
        f"clusters/c1/{boot.keys}/worker.pem",
    ]
    data = json.loads(clients.bucket.get("clusters/c1/config.json", "get") or b"")
    assert (data["lease_ttl_s"], data["lifetime_s"], data["fingerprint"]) == (
        300.0,
        43200.0,
        {"python": "3.11"},
    )


def test_missing_bucket_is_an_error(clients: Clients, spec: AwsSpotSpec, tls_dir: Path) -> None:
    elsewhere = Clients(change(spec, bucket="other-bucket"))
    config = config_of(spec, "c1")

    with pytest.raises(PoolError, match="there is no such bucket"):
        put_node_files(elsewhere, "c1", config, tls_dir)


def test_machines_of_an_on_demand_head_get_the_stored_environment(
    spec: AwsSpotSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    remote = change(spec, head="on-demand")
    seen: list[str] = []

    def stop(clients: Clients, own: AwsSpotSpec, *_: Any) -> None:
        seen.append(own.image.manifest)
        raise PoolError("enough")

    monkeypatch.setattr(launch_context, "set_up", stop)
    settings = ClusterSettings(spec=remote.with_manifest(DIGEST).to_dict())
    with pytest.raises(PoolError, match="enough"):
        AwsRemotePool("spot", remote)._launch(Clients(remote), ClusterDir(tmp_path), settings)

    assert seen == [DIGEST]


# --- prices ---


def test_built_in_rates_are_used_if_the_pricing_api_fails(
    clients: Clients, spec: AwsSpotSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Silent:
        def get_products(self, **_: Any) -> Any:
            raise KeyError("no such service")

    monkeypatch.setattr(Clients, "pricing", Silent())
    prices = Prices(clients=clients, region="eu-west-1")
    prices.refresh(["g5.xlarge", "x9.huge"], since=time.time() - 60, now=time.time())

    assert prices.book.on_demand == {"g5.xlarge": 1.006}
    words = prices.describe()
    assert "built-in table, us-east-1, 2025-06 (your region is eu-west-1)" in words
    assert "no on-demand rate for x9.huge" in words


def test_rates_of_the_pricing_api_are_read() -> None:
    product = {
        "terms": {
            "OnDemand": {
                "a": {"priceDimensions": {"b": {"unit": "Hrs", "pricePerUnit": {"USD": "1.1"}}}}
            }
        }
    }

    class Pricing:
        def get_products(self, **told: Any) -> Any:
            assert {"Type": "TERM_MATCH", "Field": "regionCode", "Value": "eu-west-1"} in told[
                "Filters"
            ]
            return {"PriceList": [json.dumps(product)]}

    assert on_demand_rate(Pricing(), "g5.xlarge", "eu-west-1") == 1.1


def test_spot_history_is_sorted_by_pool() -> None:
    def price(zone: str, second: int, usd: str) -> dict[str, Any]:
        at = datetime.fromtimestamp(1_800_000_000 + second, UTC)
        told = {"InstanceType": "g5.xlarge", "AvailabilityZone": zone, "SpotPrice": usd}
        return told | {"Timestamp": at, "ProductDescription": "Linux/UNIX"}

    class Ec2:
        def get_paginator(self, name: str) -> Any:
            return self

        def paginate(self, **_: Any) -> Any:
            yield {"SpotPriceHistory": [price("a", 9, "0.5"), price("b", 3, "0.2")]}
            yield {"SpotPriceHistory": [price("a", 1, "0.4")]}

    assert spot_history(Ec2(), ["g5.xlarge"], 0.0) == {
        ("g5.xlarge", "a"): [(1_800_000_001.0, 0.4), (1_800_000_009.0, 0.5)],
        ("g5.xlarge", "b"): [(1_800_000_003.0, 0.2)],
    }


# --- removal ---


def test_everything_of_a_cluster_is_found_and_removed_by_its_tag(
    clients: Clients, spec: AwsSpotSpec, tls_dir: Path
) -> None:
    put_node_files(clients, "c1", config_of(spec, "c1"), tls_dir)
    clients.bucket.put("ledgers/c1.json", b"{}", "ledger")
    nodes = {launch(clients, set_up(clients, spec)) for _ in range(2)}
    other = launch(clients, set_up(clients, spec, "c2"))

    found = find_tagged(clients, "us-east-1", cluster_id="c1")
    kinds = [one.kind for one in found]
    assert kinds == ["instance", "instance", "launch-template", "security-group"]
    assert {one.id for one in found if one.kind == "instance"} == nodes
    assert {(one.owner, one.home) for one in found} == {("me", "s3://my-bucket/etrain/clusters/c1")}
    assert [one.usd_per_h for one in found if one.kind == "instance"] == [1.006, 1.006]

    left = remove(clients, "us-east-1", "c1", pause=lambda seconds: None)
    assert not left, str(left)
    assert find_tagged(clients, "us-east-1", cluster_id="c1") == []
    assert clients.bucket.keys("clusters", "list") == []
    assert clients.bucket.get("ledgers/c1.json", "get") == b"{}"
    assert [i.id for i in list_instances(clients.ec2, states=["running"])] == [other]
    assert not remove(clients, "us-east-1", "c1", pause=lambda seconds: None)


def test_only_expired_clusters_are_reaped_unless_others_are_requested(
    clients: Clients, spec: AwsSpotSpec
) -> None:
    launch(clients, set_up(clients, spec, "old", seconds=-5))
    launch(clients, set_up(clients, spec, "new"))

    found = by_cluster(find_tagged(clients, "us-east-1"))

    def chosen(cluster_id: str = "", *, all_clusters: bool = False) -> list[str]:
        return [
            name
            for name, own in found.items()
            if should_remove(own, cluster_id=cluster_id, all_clusters=all_clusters)
        ]

    assert chosen() == ["old"]
    assert chosen("new") == ["new"]
    assert chosen("none") == []
    assert chosen(all_clusters=True) == ["new", "old"]


def test_machines_that_do_not_terminate_are_named(
    clients: Clients, spec: AwsSpotSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = launch(clients, set_up(clients, spec))
    monkeypatch.setattr("etrain_jupyter.plugins.ec2.reaping.terminate", lambda ec2, ids: None)

    left = remove(clients, "us-east-1", "c1", timeout_s=0.0, pause=lambda seconds: None)

    assert [words.split()[0] for words in left.processes] == [node]
