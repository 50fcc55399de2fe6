"""Evaluate each policy, with conditions, for requests that must be allowed or denied.

Review S5: conditions were stripped before a policy was tried. ``tests/contract/test_policies.py``
and ``tests/chaos/test_spot_faults.py`` try the same with what boto3 really asks for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError
from moto.core import set_initial_no_auth_action_count

from etrain_jupyter.plugins.ec2.client.policy import (
    head_policy,
    launcher_policy,
    node_policy,
    trust_policy,
)
from etrain_jupyter.plugins.ec2.ec2_api import Clients
from etrain_jupyter.plugins.ec2.simulator.iam import (
    SUPPORTED,
    Request,
    arn_matches,
    is_allowed,
    is_supported,
    kind_of,
    listed,
    statements_of,
)
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec

EC2 = "arn:aws:ec2:us-east-1:123456789012"
BUCKET = "arn:aws:s3:::my-bucket"
HOME = f"{BUCKET}/etrain/clusters/aws-0a1b2c-000001"
JOB = f"{BUCKET}/etrain/runs/digits-0a1b2c3d"
TAGS = {
    "aws:RequestTag/etrain:cluster": "aws-0a1b2c-000001",
    "aws:RequestTag/etrain:expires": "1800000000",
}
TEMPLATE = f"{EC2}:launch-template/lt-1"
NODE = {
    **TAGS,
    "ec2:InstanceType": "g6.xlarge",
    "ec2:MetadataHttpTokens": "required",
    "ec2:LaunchTemplate": TEMPLATE,
}
OURS = {"aws:ResourceTag/etrain:cluster": "aws-0a1b2c-000001"}
PASS = {"iam:PassedToService": "ec2.amazonaws.com"}
ROLE = "arn:aws:iam::123456789012:role"


def without(context: Mapping[str, str], *names: str, **changed: str) -> dict[str, str]:
    return {k: v for k, v in context.items() if k not in names} | changed


LAUNCHES = {
    "a fleet": Request("ec2:CreateFleet", f"{EC2}:fleet/new", TAGS),
    "a fleet's machine": Request(
        "ec2:CreateFleet", f"{EC2}:instance/new", TAGS | {"ec2:InstanceType": "g6.xlarge"}
    ),
    "a machine": Request("ec2:RunInstances", f"{EC2}:instance/new", NODE),
    "its disk": Request("ec2:RunInstances", f"{EC2}:volume/new", TAGS),
    "its interface": Request(
        "ec2:RunInstances", f"{EC2}:network-interface/new", {"ec2:LaunchTemplate": TEMPLATE}
    ),
    "its image": Request("ec2:RunInstances", "arn:aws:ec2:us-east-1::image/ami-12c6146b"),
    "its subnet": Request("ec2:RunInstances", f"{EC2}:subnet/subnet-1"),
    "its group": Request("ec2:RunInstances", f"{EC2}:security-group/sg-1", OURS),
    "its template": Request("ec2:RunInstances", TEMPLATE, OURS),
    "the fleet's template": Request("ec2:CreateFleet", TEMPLATE, OURS),
    "a spot request": Request("ec2:RunInstances", f"{EC2}:spot-instances-request/new"),
    "tags of a machine": Request(
        "ec2:CreateTags", f"{EC2}:instance/new", TAGS | {"ec2:CreateAction": "RunInstances"}
    ),
    "tags of a fleet": Request(
        "ec2:CreateTags", f"{EC2}:fleet/new", TAGS | {"ec2:CreateAction": "CreateFleet"}
    ),
    "the role of nodes": Request("iam:PassRole", f"{ROLE}/etrain-node", PASS),
    "a later expiry": Request(
        "ec2:CreateTags", f"{EC2}:instance/i-1", OURS | {"aws:TagKeys": ["etrain:expires"]}
    ),
    "the end of a machine": Request("ec2:TerminateInstances", f"{EC2}:instance/i-1", OURS),
    "the end of a template": Request("ec2:DeleteLaunchTemplate", TEMPLATE, OURS),
    "the lease": Request("s3:PutObject", f"{HOME}/lease.json"),
    "the ledger": Request("s3:PutObject", f"{BUCKET}/etrain/ledgers/aws-0a1b2c-000001.json"),
    "the log": Request("s3:PutObject", f"{JOB}/log/000000000001.jsonl"),
    "an exhibit": Request("s3:PutObject", f"{JOB}/exhibits/step_00000120/confusion.png"),
    "an old exhibit": Request("s3:DeleteObject", f"{JOB}/exhibits/step_00000120/confusion.png"),
    "jobs": Request("s3:ListBucket", BUCKET, {"s3:prefix": "etrain/runs/"}),
}
FRAME = {
    "a template": Request("ec2:CreateLaunchTemplate", f"{EC2}:launch-template/new", TAGS),
    "a group": Request("ec2:CreateSecurityGroup", f"{EC2}:security-group/new", TAGS),
    "a group of a VPC": Request("ec2:CreateSecurityGroup", f"{EC2}:vpc/vpc-1"),
    "a group's rule": Request(
        "ec2:AuthorizeSecurityGroupIngress", f"{EC2}:security-group/sg-1", OURS
    ),
    "the end of a group": Request("ec2:DeleteSecurityGroup", f"{EC2}:security-group/sg-1", OURS),
    "a job's record": Request("s3:PutObject", f"{JOB}/job.json"),
    "a job's bundle": Request("s3:PutObject", f"{JOB}/bundle"),
    "unfinished uploads": Request("s3:ListBucketMultipartUploads", BUCKET, {}),
}
NOT_TO_LAUNCH = {
    "a machine without tags": Request(
        "ec2:RunInstances", f"{EC2}:instance/new", without(NODE, *TAGS)
    ),
    "a machine that never expires": Request(
        "ec2:RunInstances",
        f"{EC2}:instance/new",
        without(NODE, "aws:RequestTag/etrain:expires"),
    ),
    "a machine of another type": Request(
        "ec2:RunInstances",
        f"{EC2}:instance/new",
        without(NODE) | {"ec2:InstanceType": "p5.48xlarge"},
    ),
    "a machine of no template": Request(
        "ec2:RunInstances", f"{EC2}:instance/new", without(NODE, "ec2:LaunchTemplate")
    ),
    "a machine that answers IMDSv1": Request(
        "ec2:RunInstances",
        f"{EC2}:instance/new",
        without(NODE) | {"ec2:MetadataHttpTokens": "optional"},
    ),
    "a fleet without tags": Request("ec2:CreateFleet", f"{EC2}:fleet/new"),
    "a fleet of another type": Request(
        "ec2:CreateFleet", f"{EC2}:instance/new", TAGS | {"ec2:InstanceType": "p5.48xlarge"}
    ),
    "another region": Request(
        "ec2:RunInstances", f"{EC2}:instance/new".replace("us-east-1", "eu-west-1"), NODE
    ),
    "another image": Request("ec2:RunInstances", "arn:aws:ec2:us-east-1::image/ami-0badbad0"),
    "a stranger's template": Request("ec2:RunInstances", TEMPLATE),
    "a stranger's group": Request("ec2:RunInstances", f"{EC2}:security-group/sg-2"),
    "a disk without tags": Request("ec2:RunInstances", f"{EC2}:volume/new"),
    "another role": Request("iam:PassRole", f"{ROLE}/admin", PASS),
    "our role for another service": Request(
        "iam:PassRole", f"{ROLE}/etrain-node", {"iam:PassedToService": "lambda.amazonaws.com"}
    ),
    "the end of a stranger's machine": Request("ec2:TerminateInstances", f"{EC2}:instance/i-2"),
    "a stop": Request("ec2:StopInstances", f"{EC2}:instance/i-1", OURS),
    "our tag on a stranger's machine": Request("ec2:CreateTags", f"{EC2}:instance/i-2", TAGS),
    "another tag on our machine": Request(
        "ec2:CreateTags",
        f"{EC2}:instance/i-1",
        OURS | TAGS | {"aws:TagKeys": ["etrain:expires", "etrain:cluster"]},
    ),
    "the role of maintained fleets": Request(
        "iam:CreateServiceLinkedRole",
        f"{ROLE}/aws-service-role/ec2fleet.amazonaws.com/AWSServiceRoleForEC2Fleet",
        {"iam:AWSServiceName": "ec2fleet.amazonaws.com"},
    ),
    "what is not ours": Request("s3:GetObject", f"{BUCKET}/payroll.csv"),
    "the whole bucket": Request("s3:ListBucket", BUCKET),
}
NODES = {
    "its configuration": Request("s3:GetObject", f"{HOME}/config.json"),
    "its keys": Request("s3:GetObject", f"{HOME}/keys/0123/worker.key"),
    "the lease": Request("s3:GetObject", f"{HOME}/lease.json"),
    "its state": Request("s3:PutObject", f"{HOME}/nodes/i-1.json"),
    "its environment": Request("s3:GetObject", f"{BUCKET}/etrain/environments/0a1b.json"),
    "a wheel": Request("s3:GetObject", f"{BUCKET}/etrain/environments/wheels/0a1b/a-1-any.whl"),
    "a part": Request("s3:PutObject", f"{JOB}/checkpoints/step_00000001/model.safetensors"),
    "a manifest": Request("s3:PutObject", f"{JOB}/manifests/step_00000001.json"),
    "an old part's end": Request("s3:DeleteObject", f"{JOB}/checkpoints/step_00000001/.begun"),
    "an upload's end": Request("s3:AbortMultipartUpload", f"{JOB}/checkpoints/step_00000001/a"),
    "manifests": Request(
        "s3:ListBucket", BUCKET, {"s3:prefix": "etrain/runs/digits-0a1b2c3d/manifests/"}
    ),
    "unfinished uploads": Request("s3:ListBucketMultipartUploads", BUCKET),
}
NOT_FOR_NODES = {
    "another wheel": Request("s3:PutObject", f"{BUCKET}/etrain/environments/wheels/0a1b/a.whl"),
    "the list of environments": Request(
        "s3:ListBucket", BUCKET, {"s3:prefix": "etrain/environments/"}
    ),
    "a job's record": Request("s3:PutObject", f"{JOB}/job.json"),
    "a job's bundle": Request("s3:PutObject", f"{JOB}/bundle"),
    "another bundle": Request("s3:PutObject", f"{JOB}/bundle-0a1b"),
    "a job's log": Request("s3:PutObject", f"{JOB}/log/000000000001.jsonl"),
    "a job's packs": Request("s3:PutObject", f"{JOB}/packs/000000000001-000000001000.jsonl.gz"),
    "the end of a log": Request("s3:DeleteObject", f"{JOB}/log/000000000001.jsonl"),
    "a job's state": Request("s3:PutObject", f"{JOB}/alive.json"),
    "a job's exhibit": Request("s3:PutObject", f"{JOB}/exhibits/step_00000120/confusion.png"),
    "reading a record": Request("s3:GetObject", f"{JOB}/job.json"),
    "the list of jobs": Request("s3:ListBucket", BUCKET, {"s3:prefix": "etrain/runs/"}),
    "the list of keys": Request(
        "s3:ListBucket", BUCKET, {"s3:prefix": "etrain/clusters/aws-0a1b2c-000001/keys/"}
    ),
    "the list of all": Request("s3:ListBucket", BUCKET),
    "a key": Request("s3:PutObject", f"{HOME}/keys/0123/worker.key"),
    "the configuration": Request("s3:PutObject", f"{HOME}/config.json"),
    "renewing the lease": Request("s3:PutObject", f"{HOME}/lease.json"),
    "a head's keys": Request("s3:GetObject", f"{HOME}/tls-head/client.key"),
    "the ledger": Request("s3:PutObject", f"{BUCKET}/etrain/ledgers/aws-0a1b2c-000001.json"),
    "machines": Request("ec2:DescribeInstances", "*"),
    "launches": LAUNCHES["a machine"],
    "roles": LAUNCHES["the role of nodes"],
}
NOT_FOR_HEADS = {
    **{
        f"making {what}": FRAME[what]
        for what in ("a template", "a group", "a group's rule", "the end of a group")
    },
    "a job's record": FRAME["a job's record"],
    "a job's bundle": FRAME["a job's bundle"],
    "the role of heads": Request("iam:PassRole", f"{ROLE}/etrain-head", PASS),
    "another head": Request(
        "ec2:RunInstances",
        f"{EC2}:instance/new",
        without(NODE) | {"ec2:InstanceType": "t3.medium"},
    ),
}


def statements(policy: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["Sid"]: one for one in policy["Statement"]}


def actions(policy: dict[str, Any]) -> set[str]:
    return {action for one in policy["Statement"] for action in one["Action"]}


def allowed(policy: dict[str, Any], tried: Mapping[str, Request]) -> set[str]:
    return {what for what, request in tried.items() if is_allowed([policy], request)}


MAKERS = {"launcher": launcher_policy, "head": head_policy, "node": node_policy}
SPECS: dict[str, dict[str, Any]] = {
    "plain": {},
    "named": {
        "network": {"subnets": ["subnet-1", "subnet-2"], "security_group": "sg-1"},
        "prefix": "",
    },
    "gpu": {"capacity": {"gpu": {"memory_gib": 16}}, "image": {}},
    "ssm": {"head": "on-demand", "head_tunnel": "ssm", "image": {"ami": "ssm:/mine/image"}},
}


def changed(spec: AwsSpotSpec, keys: dict[str, Any]) -> AwsSpotSpec:
    return AwsSpotSpec.parse(spec.to_dict() | keys)


@pytest.mark.parametrize("role", MAKERS)
@pytest.mark.parametrize("keys", SPECS)
def test_every_condition_key_is_supported_by_its_actions(
    role: str, keys: str, spec: AwsSpotSpec
) -> None:
    """Review R3: ``s3:prefix`` on ListBucketMultipartUploads allows nothing on AWS."""
    policy = MAKERS[role](changed(spec, SPECS[keys]))  # type: ignore[operator]

    assert wrong_keys(policy) == []
    assert not any("*" in action for action in actions(policy))
    assert len(json.dumps(policy, separators=(",", ":"))) < 6144  # most of a managed policy
    wide = {sid for sid, one in statements(policy).items() if one["Resource"] == ["*"]}
    assert wide <= {"Look", "ReadLimits"}


def wrong_keys(policy: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return action, type of resource and key of conditions that AWS would never find true."""
    wrong = []
    for statement in statements_of(policy):
        for action in listed(statement["Action"]):
            kinds = [k for k in map(kind_of, listed(statement["Resource"])) if k]
            known = [kind for kind in kinds if kind in SUPPORTED.get(action, {})]
            if kinds and not known:
                wrong.append((action, ", ".join(kinds), ""))
            for operator, keys in statement.get("Condition", {}).items():
                for kind in known:
                    wrong += [
                        (action, kind, key)
                        for key in keys
                        if not is_supported(action, kind, key) and not operator.endswith("IfExists")
                    ]
    return wrong


def test_condition_key_unsupported_by_an_action_is_found() -> None:
    """Review R3: the condition that the policies had."""
    statement = {
        "Effect": "Allow",
        "Action": ["s3:ListBucket", "s3:ListBucketMultipartUploads"],
        "Resource": [BUCKET],
        "Condition": {"StringLike": {"s3:prefix": ["etrain/*"]}},
    }

    found = wrong_keys({"Version": "2012-10-17", "Statement": [statement]})

    assert found == [("s3:ListBucketMultipartUploads", "bucket", "s3:prefix")]


def test_launcher_may_do_what_a_cluster_requires_and_no_more(spec: AwsSpotSpec) -> None:
    policy = launcher_policy(spec)

    assert allowed(policy, LAUNCHES | FRAME) == {*LAUNCHES, *FRAME}
    assert allowed(policy, NOT_TO_LAUNCH) == set()


def test_launcher_of_a_head_may_launch_its_type_with_its_role_too(spec: AwsSpotSpec) -> None:
    head = {name: NOT_FOR_HEADS[name] for name in ("another head", "the role of heads")}

    assert allowed(launcher_policy(spec), head) == set()
    assert allowed(launcher_policy(spec, head_role="etrain-head"), head) == set(head)


def test_head_may_launch_nodes_and_write_logs_but_no_more(spec: AwsSpotSpec) -> None:
    """Review S2, S5: a machine that talks to every worker."""
    policy = head_policy(spec)

    assert allowed(policy, LAUNCHES) == set(LAUNCHES)
    assert allowed(policy, NOT_TO_LAUNCH | NOT_FOR_HEADS) == set()


def test_node_may_write_checkpoints_and_its_state_but_no_more(spec: AwsSpotSpec) -> None:
    """Review S2: what nodes could write, the notebook of another job would run."""
    policy = node_policy(spec)

    assert allowed(policy, NODES) == set(NODES)
    assert allowed(policy, NOT_FOR_NODES) == set()


def test_node_of_one_cluster_cannot_read_another(spec: AwsSpotSpec) -> None:
    policy = node_policy(spec, cluster_id="aws-0a1b2c-000002")

    others = {what: one for what, one in NODES.items() if one.resource.startswith(HOME)}
    assert len(others) == 4
    assert allowed(policy, others) == set()


def test_launches_are_limited_to_the_named_subnets_and_groups(spec: AwsSpotSpec) -> None:
    own = changed(spec, SPECS["named"])
    policy = launcher_policy(own)
    subnets = {
        name: Request("ec2:RunInstances", f"{EC2}:subnet/{name}")
        for name in ("subnet-1", "subnet-3")
    }
    groups = {
        name: Request("ec2:RunInstances", f"{EC2}:security-group/{name}")
        for name in ("sg-1", "sg-2")
    }

    assert allowed(policy, subnets | groups) == {"subnet-1", "sg-1"}
    assert allowed(policy, FRAME) == {
        "a template",
        "a job's record",
        "a job's bundle",
        "the end of a group",
        "unfinished uploads",
    }


def test_image_of_aws_must_be_one_of_amazon(spec: AwsSpotSpec) -> None:
    policy = launcher_policy(changed(spec, {"image": {}}))
    image = "arn:aws:ec2:us-east-1::image/ami-0badbad0"

    assert is_allowed([policy], Request("ec2:RunInstances", image, {"ec2:Owner": "amazon"}))
    assert not is_allowed([policy], Request("ec2:RunInstances", image, {"ec2:Owner": "99"}))


def test_gpu_requirement_allows_families_with_gpus(spec: AwsSpotSpec) -> None:
    policy = launcher_policy(changed(spec, SPECS["gpu"]))
    types = {
        name: Request("ec2:RunInstances", f"{EC2}:instance/new", NODE | {"ec2:InstanceType": name})
        for name in ("g6.12xlarge", "p4d.24xlarge", "u-24tb1.112xlarge", "c7i.48xlarge")
    }

    assert allowed(policy, types) == {"g6.12xlarge", "p4d.24xlarge"}


def test_roles_of_machines_can_only_be_assumed_by_ec2() -> None:
    assert trust_policy()["Statement"][0]["Principal"] == {"Service": "ec2.amazonaws.com"}


# --- the evaluator ---


def policy_with(condition: dict[str, Any], **changed: Any) -> dict[str, Any]:
    statement = {"Effect": "Allow", "Action": "s3:GetObject", "Resource": "*"}
    return {"Statement": [statement | changed | {"Condition": condition}]}


@pytest.mark.parametrize(
    ("condition", "value", "expected"),
    [
        ({"StringEquals": {"k": "a"}}, "a", True),
        ({"StringEquals": {"k": ["b", "a"]}}, "a", True),
        ({"StringEquals": {"k": "a*"}}, "ab", False),
        ({"StringEquals": {"K": "a"}}, "a", True),
        ({"StringLike": {"k": "a*"}}, "ab/c", True),
        ({"StringLike": {"k": "a[b]*"}}, "ab", False),
        ({"StringLike": {"k": "*"}}, None, False),
        ({"StringEqualsIfExists": {"k": "a"}}, None, True),
        ({"StringEqualsIfExists": {"k": "a"}}, "b", False),
        ({"Null": {"k": "true"}}, None, True),
        ({"Null": {"k": "false"}}, None, False),
        ({"Null": {"k": "false"}}, "", True),
        ({"Bool": {"k": "true"}}, "True", True),
        ({"Bool": {"k": "true"}}, None, False),
        ({"ArnLike": {"k": "arn:aws:ec2:*:1:x/*"}}, "arn:aws:ec2:r:1:x/y", True),
        ({"ArnLike": {"k": "arn:*:x/*"}}, "arn:aws:ec2:r:1:x/y", False),
        ({"ForAllValues:StringEquals": {"k": ["a", "b"]}}, ["a"], True),
        ({"ForAllValues:StringEquals": {"k": ["a", "b"]}}, ["a", "c"], False),
        ({"ForAllValues:StringEquals": {"k": ["a"]}}, None, True),
        ({"ForAnyValue:StringEquals": {"k": ["a"]}}, ["c", "a"], True),
        ({"ForAnyValue:StringEquals": {"k": ["a"]}}, None, False),
        ({"StringEquals": {"k": "a", "other": "a"}}, "a", False),
        ({"StringEquals": {"k": "a"}, "Null": {"other": "true"}}, "a", True),
    ],
)
def test_conditions_are_evaluated_as_iam_does(
    condition: dict[str, Any], value: Any, expected: bool
) -> None:
    context = {} if value is None else {"k": value}

    request = Request("s3:GetObject", f"{BUCKET}/key", context)
    assert is_allowed([policy_with(condition)], request) is expected


def test_deny_overrides_allow_and_the_default_is_deny() -> None:
    request = Request("s3:GetObject", f"{BUCKET}/key", {})

    assert not is_allowed([], request)
    assert is_allowed([policy_with({})], request)
    assert not is_allowed([policy_with({}), policy_with({}, Effect="Deny")], request)
    assert not is_allowed([policy_with({}, Resource=f"{BUCKET}/other*")], request)
    assert not is_allowed([policy_with({}, Action="s3:Put*")], request)


@pytest.mark.parametrize(
    "changed", [{"NotAction": "s3:*"}, {"Condition": {"DateLessThan": {"k": "1"}}}]
)
def test_unsupported_policy_element_is_an_error(changed: dict[str, Any]) -> None:
    statement = {"Effect": "Allow", "Action": "s3:GetObject", "Resource": "*", **changed}

    with pytest.raises(ValueError, match="evaluator does not support"):
        is_allowed([{"Statement": statement}], Request("s3:GetObject", "*", {"k": "1"}))


def test_wildcard_of_an_arn_matches_only_within_its_part() -> None:
    assert arn_matches("arn:aws:s3:::b/*", "arn:aws:s3:::b/a/b")
    assert not arn_matches("arn:aws:*", "arn:aws:s3:::b")


# --- as moto enforces it ---


def client_of(user: str, policy: dict[str, Any] | None) -> Any:
    """Return an S3 client of a new user with the policy, or without permissions."""
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
def test_node_cannot_access_other_clusters(clients: Clients, spec: AwsSpotSpec) -> None:
    own, other = "etrain/clusters/c1", "etrain/clusters/c2"
    for folder in (own, other):
        for name in ("config.json", "lease.json", "keys/0123/worker.key"):
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
            "read key": get(node, f"{own}/keys/0123/worker.key"),
            "say state": put(node, f"{own}/nodes/i-1.json"),
            "write checkpoint": put(node, "etrain/runs/j/checkpoints/y"),
            "stranger reads config": get(stranger, f"{own}/config.json"),
            "renew lease": put(node, f"{own}/lease.json"),
            "replace key": put(node, f"{own}/keys/0123/worker.key"),
            "change config": put(node, f"{own}/config.json"),
            "remove key": delete(node, f"{own}/keys/0123/worker.key"),
            "read other cluster": get(node, f"{other}/keys/0123/worker.key"),
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
def test_launcher_can_access_only_its_prefix(clients: Clients, spec: AwsSpotSpec) -> None:
    launcher = client_of("launcher", launcher_policy(spec))

    @set_initial_no_auth_action_count(0)
    def ask() -> dict[str, str]:
        def put(key: str) -> str:
            return code_of_doing(lambda: launcher.put_object(Bucket=spec.bucket, Key=key, Body=b""))

        return {key: put(key) for key in ("etrain/clusters/c1/lease.json", "payroll.csv")}

    assert ask() == {"etrain/clusters/c1/lease.json": "allowed", "payroll.csv": "AccessDenied"}
