"""Network of the nodes: a subnet per zone, and a security group for the cluster's members."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import ClientError

from etrain_jupyter.errors import PoolError
from etrain_jupyter.plugins.ec2.aws_messages import pool_error
from etrain_jupyter.plugins.ec2.ec2_api import CLUSTER_TAG, tag_list
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec
from etrain_jupyter.storage.objects.s3_messages import code_of

NOTHING = "Nothing was launched."


@dataclass(frozen=True, kw_only=True)
class Network:
    """Subnets and security group for launch requests."""

    subnets: Mapping[str, str]
    """Subnet of each zone."""
    security_group: str
    is_ours: bool
    """True if the group was created for the cluster, and is removed with it."""


def open_network(ec2: Any, spec: AwsSpotSpec, cluster_id: str, tags: Mapping[str, str]) -> Network:
    """Find the subnets, and find or create the security group.

    Raises:
        PoolError: If there are no subnets, or AWS refuses a request.
    """
    try:
        vpc_id, subnets = find_subnets(ec2, spec)
        group = spec.network.security_group
        if group != "auto":
            # Fail here with a clear message, not at the first launch.
            ec2.describe_security_groups(GroupIds=[group])
            return Network(subnets=subnets, security_group=group, is_ours=False)
        made = make_security_group(ec2, vpc_id, cluster_id, tags)
        return Network(subnets=subnets, security_group=made, is_ours=True)
    except ClientError as exc:
        raise pool_error(f"the network of {spec.region} cannot be used", exc, NOTHING) from exc


def find_subnets(ec2: Any, spec: AwsSpotSpec) -> tuple[str, dict[str, str]]:
    """Return the VPC and a subnet for each zone that the spec allows.

    Raises:
        PoolError: If there are none, or they belong to several VPCs.
        ClientError: If EC2 refuses the request.
    """
    named = spec.network.subnets
    if named == "auto":
        # One default subnet per zone, all in the default VPC.
        filters = [{"Name": "default-for-az", "Values": ["true"]}]
        found = _pages(ec2, "describe_subnets", "Subnets", Filters=filters)
        if not found:
            raise PoolError(
                f"{spec.region} has no default VPC with subnets. {NOTHING} List subnets in "
                "pools.yaml, network: {subnets: [subnet-...]}, or run `aws ec2 create-default-vpc`."
            )
    else:
        found = _pages(ec2, "describe_subnets", "Subnets", SubnetIds=list(named))
    vpcs = sorted({one["VpcId"] for one in found})
    # A security group cannot span VPCs either.
    if len(vpcs) > 1:
        raise PoolError(
            f"network.subnets belong to {len(vpcs)} VPCs ({', '.join(vpcs)}); workers can only "
            f"reach each other within one. {NOTHING} Keep the subnets of one of them."
        )
    # In each zone, choose the subnet with the most free addresses.
    found.sort(key=lambda one: (one["AvailabilityZone"], -one.get("AvailableIpAddressCount", 0)))
    subnets: dict[str, str] = {}
    for one in found:
        subnets.setdefault(one["AvailabilityZone"], one["SubnetId"])
    zones = spec.capacity.zones
    if zones != "auto":
        if missing := [zone for zone in zones if zone not in subnets]:
            raise PoolError(
                f"there is no subnet in {', '.join(missing)} (capacity.zones). Zones with a "
                f"subnet: {', '.join(subnets)}. {NOTHING} Correct capacity.zones, or add a subnet."
            )
        subnets = {zone: subnets[zone] for zone in zones}
    return vpcs[0], subnets


def make_security_group(ec2: Any, vpc_id: str, cluster_id: str, tags: Mapping[str, str]) -> str:
    """Return the cluster's security group, which admits only members; create it if missing.

    A notebook that runs the head must be a member, or be in ``network.security_group``.
    """
    name = f"etrain-{cluster_id}"
    ours = [
        {"Name": f"tag:{CLUSTER_TAG}", "Values": [cluster_id]},
        {"Name": "group-name", "Values": [name]},
    ]
    # A previous head of this cluster may have died between creating the group and its rule.
    for known in _pages(ec2, "describe_security_groups", "SecurityGroups", Filters=ours):
        if not admits_members(known):
            admit_members(ec2, known["GroupId"])
        return str(known["GroupId"])
    made: str = ec2.create_security_group(
        GroupName=name,
        Description=f"etrain cluster {cluster_id}: its own members only",
        VpcId=vpc_id,
        TagSpecifications=[{"ResourceType": "security-group", "Tags": tag_list(tags)}],
    )["GroupId"]
    admit_members(ec2, made)
    return made


def admits_members(group: Mapping[str, Any]) -> bool:
    """Return True if the rule exists; an on-demand head is not allowed to add it."""
    return any(
        rule.get("IpProtocol") == "-1" and pair.get("GroupId") == group["GroupId"]
        for rule in group.get("IpPermissions", ())
        for pair in rule.get("UserIdGroupPairs", ())
    )


def admit_members(ec2: Any, group: str) -> None:
    """Allow all traffic between the members of a group, unless it is allowed already."""
    rule = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]}
    try:
        ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[rule])
    except ClientError as exc:
        # Another head has added the rule since the check.
        if code_of(exc) != "InvalidPermission.Duplicate":
            raise


def _pages(ec2: Any, operation: str, key: str, **arguments: Any) -> list[dict[str, Any]]:
    pages: Sequence[dict[str, Any]] = ec2.get_paginator(operation).paginate(**arguments)
    return [one for page in pages for one in page[key]]
