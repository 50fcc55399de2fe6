"""Policies: nothing wider than needed, and what a node may do to the bucket is proven."""

from __future__ import annotations

import json
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError
from moto.core import set_initial_no_auth_action_count

from etrain_jupyter.pools.aws_spot.ec2 import Clients
from etrain_jupyter.pools.aws_spot.policy import (
    head_policy,
    launcher_policy,
    node_policy,
    trust_policy,
)
from etrain_jupyter.pools.aws_spot.spec import AwsSpotSpec


def statements(policy: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["Sid"]: one for one in policy["Statement"]}


def actions(policy: dict[str, Any]) -> set[str]:
    return {action for one in policy["Statement"] for action in one["Action"]}


MAKERS = {"launcher": launcher_policy, "head": head_policy, "node": node_policy}


@pytest.mark.parametrize("role", MAKERS)
def test_no_policy_has_a_wildcard_action(role: str, spec: AwsSpotSpec) -> None:
    policy = MAKERS[role](spec)  # type: ignore[operator]

    assert not any("*" in action for action in actions(policy))
    assert len(json.dumps(policy)) < 6144  # most of a managed policy
    wide = {sid for sid, one in statements(policy).items() if one["Resource"] == ["*"]}
    assert wide <= {"Look", "Launch", "UseSpot"}


@pytest.mark.parametrize("maker", [launcher_policy, head_policy])
def test_only_tagged_machines_can_be_ended(maker: Any, spec: AwsSpotSpec) -> None:
    for one in maker(spec)["Statement"]:
        if any("Terminate" in action or "Delete" in action for action in one["Action"]) and not (
            one["Action"][0].startswith("s3:")
        ):
            assert one["Condition"] == {"StringLike": {"aws:ResourceTag/etrain:cluster": "*"}}


def test_one_role_can_be_passed_to_ec2_only(spec: AwsSpotSpec) -> None:
    own = statements(launcher_policy(spec, account="123456789012"))["PassOneRole"]

    assert own["Resource"] == ["arn:aws:iam::123456789012:role/etrain-node"]
    assert own["Condition"] == {"StringEquals": {"iam:PassedToService": "ec2.amazonaws.com"}}


def test_tags_can_be_set_only_while_something_is_made_but_for_its_expiry(spec: AwsSpotSpec) -> None:
    own = statements(launcher_policy(spec))["TagWhatIsMade"]

    assert own["Action"] == ["ec2:CreateTags"]
    assert "RunInstances" in own["Condition"]["StringEquals"]["ec2:CreateAction"]
    later = statements(launcher_policy(spec))["PutOffExpiry"]["Condition"]
    assert later["ForAllValues:StringEquals"] == {"aws:TagKeys": ["etrain:expires"]}
    assert "aws:ResourceTag/etrain:cluster" in later["StringLike"]


def test_head_cannot_change_the_frame_of_a_cluster(spec: AwsSpotSpec) -> None:
    head = actions(head_policy(spec))

    assert {"ec2:CreateFleet", "ec2:TerminateInstances", "iam:PassRole"} <= head
    assert not {a for a in head if "LaunchTemplate" in a or "SecurityGroup" in a} - {
        "ec2:DescribeLaunchTemplates",
        "ec2:DescribeSecurityGroups",
    }


def test_node_may_do_nothing_but_s3(spec: AwsSpotSpec) -> None:
    assert {action.partition(":")[0] for action in actions(node_policy(spec))} == {"s3"}
    assert trust_policy()["Statement"][0]["Principal"] == {"Service": "ec2.amazonaws.com"}


def client_of(user: str, policy: dict[str, Any] | None) -> Any:
    """Return an S3 client of a new user who may do what the policy says, or nothing."""
    iam = boto3.client("iam", region_name="us-east-1")
    iam.create_user(UserName=user)
    if policy is not None:
        iam.put_user_policy(UserName=user, PolicyName="p", PolicyDocument=json.dumps(policy))
    key = iam.create_access_key(UserName=user)["AccessKey"]
    return boto3.client(
        "s3",
        region_name="us-east-1",
        aws_access_key_id=key["AccessKeyId"],
        aws_secret_access_key=key["SecretAccessKey"],
    )


def code_of_doing(act: Any) -> str:
    try:
        act()
    except ClientError as exc:
        return str(exc.response["Error"]["Code"])
    return "allowed"


@pytest.mark.aws
def test_node_reaches_its_own_cluster_and_no_further(clients: Clients, spec: AwsSpotSpec) -> None:
    own, other = "etrain/clusters/c1", "etrain/clusters/c2"
    for folder in (own, other):
        for name in ("config.json", "lease.json", "tls/worker.key"):
            clients.bucket.put(f"{folder}/{name}".removeprefix("etrain/"), b"x", "setup")
    clients.bucket.put("runs/j/x", b"x", "setup")
    node = client_of("node", node_policy(spec, cluster_id="c1"))
    stranger = client_of("stranger", None)

    def get(client: Any, key: str) -> str:
        return code_of_doing(lambda: client.get_object(Bucket=spec.bucket, Key=key))

    def put(client: Any, key: str) -> str:
        return code_of_doing(lambda: client.put_object(Bucket=spec.bucket, Key=key, Body=b"y"))

    def delete(client: Any, key: str) -> str:
        return code_of_doing(lambda: client.delete_object(Bucket=spec.bucket, Key=key))

    @set_initial_no_auth_action_count(0)
    def ask() -> dict[str, str]:
        return {
            "read config": get(node, f"{own}/config.json"),
            "read lease": get(node, f"{own}/lease.json"),
            "read key": get(node, f"{own}/tls/worker.key"),
            "say state": put(node, f"{own}/nodes/i-1.json"),
            "write checkpoint": put(node, "etrain/runs/j/y"),
            "stranger reads config": get(stranger, f"{own}/config.json"),
            "renew lease": put(node, f"{own}/lease.json"),
            "replace key": put(node, f"{own}/tls/worker.key"),
            "change config": put(node, f"{own}/config.json"),
            "remove key": delete(node, f"{own}/tls/worker.key"),
            "read other cluster": get(node, f"{other}/tls/worker.key"),
            "speak for other cluster": put(node, f"{other}/nodes/i-1.json"),
            "change ledger": put(node, "etrain/ledgers/c1.json"),
        }

    told = ask()
    allowed = {what for what, code in told.items() if code == "allowed"}
    assert allowed == {
        "read config",
        "read lease",
        "read key",
        "say state",
        "write checkpoint",
    }
    assert {code for code in told.values() if code != "allowed"} == {"AccessDenied"}


@pytest.mark.aws
def test_launcher_reaches_its_prefix_only(clients: Clients, spec: AwsSpotSpec) -> None:
    launcher = client_of("launcher", launcher_policy(spec))

    @set_initial_no_auth_action_count(0)
    def ask() -> dict[str, str]:
        def put(key: str) -> str:
            return code_of_doing(lambda: launcher.put_object(Bucket=spec.bucket, Key=key, Body=b""))

        return {key: put(key) for key in ("etrain/clusters/c1/lease.json", "payroll.csv")}

    assert ask() == {"etrain/clusters/c1/lease.json": "allowed", "payroll.csv": "AccessDenied"}
