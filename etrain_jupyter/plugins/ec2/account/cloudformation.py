"""The CloudFormation template with a pool's resources.

``init`` deploys it. In accounts that restrict IAM, an administrator reviews and deploys it;
afterwards, the command in its outputs writes the entry of ``pools.yaml``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import Any

import yaml

from etrain_jupyter.plugins.ec2.account.site import POOL_TAG, Site
from etrain_jupyter.plugins.ec2.client.policy import (
    Policy,
    head_policy,
    launcher_policy,
    node_policy,
    trust_policy,
)
from etrain_jupyter.plugins.ec2.ec2_api import tag_list

PARTS = frozenset({"bucket", "group", "roles"})
GROUP_TOKEN = "sg-00000000000000000"
"""Placeholder for the security group's id in a policy, until CloudFormation knows the id."""
VPC_TOKEN = "VpcId"
SESSIONS = "arn:aws:iam::aws:policy/AmazonSSMManagedInstanceCore"
MAX_POLICY = 6144
"""IAM's limit for the characters of a managed policy, without white space."""
ABORT_DAYS = 1
"""Age at which S3 removes an incomplete upload, for example from a lost node."""
CLUSTER_DAYS = 90
"""Age at which S3 removes the keys and configuration of a cluster that was not shut down."""
LABELS = {
    "AWS::S3::Bucket": ("bucket", "BucketName"),
    "AWS::EC2::SecurityGroup": ("security group", "GroupName"),
    "AWS::EC2::SecurityGroupIngress": ("rule that admits the members of the group", ""),
    "AWS::IAM::Role": ("role", "RoleName"),
    "AWS::IAM::InstanceProfile": ("instance profile", "InstanceProfileName"),
    "AWS::IAM::ManagedPolicy": ("policy", "ManagedPolicyName"),
}
"""Display name of each resource type, and the property that holds a resource's own name."""


def template_of(
    site: Site, *, vpc: str, subnets: tuple[str, ...] = (), parts: Collection[str] = PARTS
) -> dict[str, Any]:
    """Return the template.

    ``vpc`` is the default of the template's parameter, and ``subnets`` are listed in the command
    in its outputs. The stack contains only ``parts`` of the pool; the other parts exist already.
    """
    name, spec = site.name, site.spec
    head = spec.iam.head_profile if spec.head == "on-demand" else ""
    outputs: dict[str, Any] = {
        "Command": {
            "Description": "Writes the pool's entry in pools.yaml",
            "Value": _with_group(_command(site, subnets, head, parts)),
        }
    }
    parameters = {}
    if "group" in parts:
        outputs["Group"] = {"Value": {"Fn::GetAtt": ["Group", "GroupId"]}}
        parameters[VPC_TOKEN] = {
            "Type": "AWS::EC2::VPC::Id",
            "Description": "VPC of the machines",
            **({"Default": vpc} if vpc else {}),
        }
    document = {
        "AWSTemplateFormatVersion": "2010-09-09",
        "Description": f"Resources of the etrain-jupyter pool {name} in {spec.region}",
        **({"Parameters": parameters} if parameters else {}),
        "Resources": _resources(site, head, parts),
        "Outputs": outputs,
    }
    # YAML writes an object that occurs twice as an alias, which templates do not allow.
    plain: dict[str, Any] = json.loads(json.dumps(document))
    return plain


def text_of(template: dict[str, Any]) -> str:
    """Return a template in YAML."""
    text: str = yaml.safe_dump(template, sort_keys=False, width=100)
    return text


def label_of(resource: dict[str, Any]) -> str:
    """Return the name of a resource in a template, such as ``role etrain-spot-node``."""
    kind, key = LABELS.get(resource["Type"], (resource["Type"], ""))
    return f"{kind} {resource['Properties'].get(key, '')}".rstrip()


def _resources(site: Site, head: str, parts: Collection[str]) -> dict[str, Any]:
    """Return the resources by logical id; ``head`` is the role of the scheduler's machine."""
    name, spec, tags = site.name, site.spec, tag_list({POOL_TAG: site.mark})
    node = spec.iam.instance_profile
    resources: dict[str, Any] = {}
    if "bucket" in parts:
        resources["Bucket"] = _bucket(site, tags)
    if "group" in parts:
        resources |= _security_group(site, tags)
        network = spec.network.model_copy(update={"security_group": GROUP_TOKEN})
        spec = spec.model_copy(update={"network": network})
    if "roles" not in parts:
        return resources
    resources |= _role("Node", node, lambda: node_policy(spec), tags)
    if head:
        managed = [SESSIONS] if spec.head_tunnel == "ssm" else []
        policy = head_policy(spec, node_role=node, account=site.account)
        resources |= _role("Head", head, lambda: policy, tags, managed)
    launcher = launcher_policy(spec, node_role=node, account=site.account, head_role=head)
    for number, part in enumerate(split_policy(launcher), start=1):
        suffix = "" if number == 1 else f"-{number}"
        resources[f"Launcher{'' if number == 1 else number}"] = {
            "Type": "AWS::IAM::ManagedPolicy",
            "Properties": {
                "ManagedPolicyName": f"{site.launcher_policy}{suffix}",
                "Description": f"For those who start clusters of the etrain-jupyter pool {name}",
                "PolicyDocument": _with_group(part),
            },
        }
    return resources


def split_policy(whole: Policy, *, most: int = MAX_POLICY) -> list[Policy]:
    """Split a policy by statements into parts that are small enough for IAM."""
    parts: list[Policy] = []
    for statement in whole["Statement"]:
        if parts:
            grown = {**parts[-1], "Statement": [*parts[-1]["Statement"], statement]}
            if len(json.dumps(grown, separators=(",", ":"))) <= most:
                parts[-1] = grown
                continue
        parts.append({**whole, "Statement": [statement]})
    return parts


def _security_group(site: Site, tags: list[dict[str, str]]) -> dict[str, Any]:
    return {
        "Group": {
            "Type": "AWS::EC2::SecurityGroup",
            "Properties": {
                "GroupName": site.stack_name,
                "GroupDescription": f"etrain-jupyter pool {site.name}: its own members only",
                "VpcId": {"Ref": VPC_TOKEN},
                "Tags": tags,
            },
        },
        # A separate resource, because a group cannot refer to itself while it is created.
        "Members": {
            "Type": "AWS::EC2::SecurityGroupIngress",
            "Properties": {
                "GroupId": {"Fn::GetAtt": ["Group", "GroupId"]},
                "IpProtocol": "-1",
                "SourceSecurityGroupId": {"Fn::GetAtt": ["Group", "GroupId"]},
            },
        },
    }


def _command(site: Site, subnets: tuple[str, ...], head: str, parts: Collection[str]) -> str:
    spec = site.spec
    group = GROUP_TOKEN if "group" in parts else spec.network.security_group
    words = [f"etrain pools init {site.name} --region {spec.region} --bucket {spec.bucket}"]
    words.append(f"--role {spec.iam.instance_profile} --security-group {group}")
    words.append(f"--types {','.join(spec.capacity.types)} --workers {spec.workers.max}")
    words += [f"--subnet {','.join(subnets)}"] if subnets else []
    words += ["--head on-demand"] if head else []
    return " ".join([*words, "--yes"])


def _bucket(site: Site, tags: list[dict[str, str]]) -> dict[str, Any]:
    prefix = site.spec.prefix
    return {
        "Type": "AWS::S3::Bucket",
        # Checkpoints must survive the deletion of the stack; `remove` deletes the bucket itself.
        "DeletionPolicy": "RetainExceptOnCreate",
        "UpdateReplacePolicy": "Retain",
        "Properties": {
            "BucketName": site.spec.bucket,
            "PublicAccessBlockConfiguration": {
                "BlockPublicAcls": True,
                "IgnorePublicAcls": True,
                "BlockPublicPolicy": True,
                "RestrictPublicBuckets": True,
            },
            "BucketEncryption": {
                "ServerSideEncryptionConfiguration": [
                    {"ServerSideEncryptionByDefault": {"SSEAlgorithm": "AES256"}}
                ]
            },
            "LifecycleConfiguration": {
                "Rules": [
                    {
                        "Id": "etrain-aborted-uploads",
                        "Status": "Enabled",
                        "Prefix": prefix,
                        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": ABORT_DAYS},
                    },
                    {
                        "Id": "etrain-dead-clusters",
                        "Status": "Enabled",
                        "Prefix": f"{prefix}clusters/",
                        "ExpirationInDays": CLUSTER_DAYS,
                    },
                ]
            },
            "Tags": tags,
        },
    }


def _role(
    key: str,
    name: str,
    policy: Callable[[], Policy],
    tags: list[dict[str, str]],
    managed: list[str] | None = None,
) -> dict[str, Any]:
    return {
        f"{key}Role": {
            "Type": "AWS::IAM::Role",
            "Properties": {
                "RoleName": name,
                "AssumeRolePolicyDocument": trust_policy(),
                "Policies": [{"PolicyName": "etrain", "PolicyDocument": _with_group(policy())}],
                **({"ManagedPolicyArns": managed} if managed else {}),
                "Tags": tags,
            },
        },
        f"{key}Profile": {
            "Type": "AWS::IAM::InstanceProfile",
            "Properties": {"InstanceProfileName": name, "Roles": [{"Ref": f"{key}Role"}]},
        },
    }


def _with_group(part: Any) -> Any:
    """Replace the token of the group's id with a reference to the group."""
    if isinstance(part, dict):
        return {key: _with_group(value) for key, value in part.items()}
    if isinstance(part, list):
        return [_with_group(one) for one in part]
    if isinstance(part, str) and GROUP_TOKEN in part:
        # "${!" is how a template writes "${", which policies contain for IAM's own variables.
        text = part.replace("${", "${!").replace(GROUP_TOKEN, "${Group.GroupId}")
        return {"Fn::Sub": text}
    return part
