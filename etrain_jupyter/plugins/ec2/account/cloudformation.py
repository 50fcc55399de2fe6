"""A CloudFormation template with a pool's resources, for accounts that restrict IAM.

An administrator reviews and deploys it; afterwards, the command in its outputs writes the entry of
``pools.yaml``. The policies are the same as those that ``init`` creates.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import yaml

from etrain_jupyter.plugins.ec2.account.bucket import (
    ABORT_DAYS,
    CLUSTER_DAYS,
    ENCRYPTED,
    PRIVATE,
)
from etrain_jupyter.plugins.ec2.account.roles import INLINE, SESSIONS, split_policy
from etrain_jupyter.plugins.ec2.account.site import Site, tag_pairs
from etrain_jupyter.plugins.ec2.client.policy import (
    Policy,
    head_policy,
    launcher_policy,
    node_policy,
    trust_policy,
)

GROUP_TOKEN = "sg-00000000000000000"
"""Stands for the security group's id in a policy, until CloudFormation knows it."""
VPC_TOKEN = "VpcId"


def template_of(site: Site, *, vpc: str, subnets: tuple[str, ...] = ()) -> str:
    """Return the template in YAML.

    Args:
        site: The pool's place in the account.
        vpc: Default of the template's parameter; empty for none.
        subnets: Subnets for the command in the outputs.
    """
    name, spec = site.name, site.spec
    head = spec.iam.head_profile if spec.head == "on-demand" else ""
    document = {
        "AWSTemplateFormatVersion": "2010-09-09",
        "Description": f"Resources of the etrain-jupyter pool {name} in {spec.region}",
        "Parameters": {
            VPC_TOKEN: {
                "Type": "AWS::EC2::VPC::Id",
                "Description": "VPC of the machines",
                **({"Default": vpc} if vpc else {}),
            }
        },
        "Resources": _resources(site, head),
        "Outputs": {
            "Command": {
                "Description": "Writes the pool's entry in pools.yaml",
                "Value": {"Fn::Sub": _command(site, subnets, head)},
            }
        },
    }
    # Aliases, which the same object in two places would become, are not allowed in templates.
    plain = json.loads(json.dumps(document))
    text: str = yaml.safe_dump(plain, sort_keys=False, width=100)
    return text


def _resources(site: Site, head: str) -> dict[str, Any]:
    """Return the resources by logical id.

    Args:
        site: The pool's place in the account.
        head: Role of the scheduler's own machine; empty if it has none.
    """
    name, spec, tags = site.name, site.spec, tag_pairs(site.tags())
    node = spec.iam.instance_profile
    resources: dict[str, Any] = {
        "Bucket": _bucket(site, tags),
        **_security_group(site, tags),
        **_role("Node", node, lambda: node_policy(spec), tags),
    }
    network = spec.network.model_copy(update={"security_group": GROUP_TOKEN})
    grouped = spec.model_copy(update={"network": network})
    if head:
        managed = [SESSIONS] if spec.head_tunnel == "ssm" else []
        policy = head_policy(grouped, node_role=node, account=site.account)
        resources |= _role("Head", head, lambda: policy, tags, managed)
    launcher = launcher_policy(grouped, node_role=node, account=site.account, head_role=head)
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


def _security_group(site: Site, tags: list[dict[str, str]]) -> dict[str, Any]:
    return {
        "Group": {
            "Type": "AWS::EC2::SecurityGroup",
            "Properties": {
                "GroupName": site.group_name,
                "GroupDescription": f"etrain-jupyter pool {site.name}: its own members only",
                "VpcId": {"Ref": VPC_TOKEN},
                "Tags": tags,
            },
        },
        # A rule of its own: a group cannot refer to itself while it is created.
        "Members": {
            "Type": "AWS::EC2::SecurityGroupIngress",
            "Properties": {
                "GroupId": {"Fn::GetAtt": ["Group", "GroupId"]},
                "IpProtocol": "-1",
                "SourceSecurityGroupId": {"Fn::GetAtt": ["Group", "GroupId"]},
            },
        },
    }


def _command(site: Site, subnets: tuple[str, ...], head: str) -> str:
    spec = site.spec
    words = [f"etrain pools init {site.name} --region {spec.region} --bucket {spec.bucket}"]
    words.append(f"--role {spec.iam.instance_profile} --security-group ${{Group.GroupId}}")
    words.append(f"--types {','.join(spec.capacity.types)} --workers {spec.workers.max}")
    words += [f"--subnet {','.join(subnets)}"] if subnets else []
    words += ["--head on-demand"] if head else []
    return " ".join([*words, "--yes"])


def _bucket(site: Site, tags: list[dict[str, str]]) -> dict[str, Any]:
    [rule] = ENCRYPTED["Rules"]
    default = rule["ApplyServerSideEncryptionByDefault"]
    prefix = site.spec.prefix
    return {
        "Type": "AWS::S3::Bucket",
        # Checkpoints must survive the deletion of the stack.
        "DeletionPolicy": "Retain",
        "UpdateReplacePolicy": "Retain",
        "Properties": {
            "BucketName": site.spec.bucket,
            "PublicAccessBlockConfiguration": PRIVATE,
            "BucketEncryption": {
                "ServerSideEncryptionConfiguration": [{"ServerSideEncryptionByDefault": default}]
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
                "Policies": [{"PolicyName": INLINE, "PolicyDocument": _with_group(policy())}],
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
