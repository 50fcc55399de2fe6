"""Helpers for tests of the fake cloud: launch templates, fleets and instances with boto3."""

from __future__ import annotations

import base64
import functools
import os
import socket
from typing import Any

import boto3
from botocore.config import Config

from etrain_jupyter.plugins.ec2.simulator import FakeAws
from etrain_jupyter.plugins.ec2.simulator.networks import CABLE, PREFIX

HELLO = "#!/bin/bash\necho hello\nexec sleep 1000\n"
TAGS = [{"Key": "etrain:cluster", "Value": "c-1"}]


def client(service: str) -> Any:
    """Return a client without retries, configured by the current environment."""
    names = ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    return _client(service, *(os.environ[name] for name in names))


@functools.cache  # creating a client takes 0.1 s
def _client(service: str, url: str, key: str, secret: str) -> Any:
    once = Config(retries={"mode": "standard", "total_max_attempts": 1})
    session = boto3.Session(key, secret, region_name="us-east-1")
    return session.client(service, endpoint_url=url, config=once)


def ec2() -> Any:
    """Return an EC2 client."""
    return client("ec2")


def make_template(cloud: FakeAws, user_data: str = HELLO, **data: Any) -> str:
    """Create a launch template like our pool's; return its id."""
    account = cloud.make_account()
    template = {
        "ImageId": account.image,
        "InstanceType": "g5.xlarge",
        "UserData": base64.b64encode(user_data.encode()).decode(),
        "InstanceInitiatedShutdownBehavior": "terminate",
        "IamInstanceProfile": {"Name": account.instance_profile},
        "MetadataOptions": {"HttpTokens": "required", "InstanceMetadataTags": "enabled"},
        "TagSpecifications": [
            {"ResourceType": "instance", "Tags": TAGS},
            {"ResourceType": "volume", "Tags": TAGS},
        ],
        **data,
    }
    made = ec2().create_launch_template(
        LaunchTemplateName=f"template-{len(ec2().describe_launch_templates()['LaunchTemplates'])}",
        LaunchTemplateData=template,
    )
    return str(made["LaunchTemplate"]["LaunchTemplateId"])


def fleet_request(
    template: str,
    num_spot: int = 1,
    *,
    num_on_demand: int = 0,
    overrides: list[dict[str, Any]] | None = None,
    **words: Any,
) -> dict[str, Any]:
    """Return the arguments of ``create_fleet`` for machines of types g5 and g6 in two zones."""
    default = [
        {"InstanceType": name, "AvailabilityZone": zone}
        for name in ("g5.xlarge", "g6.xlarge")
        for zone in ("us-east-1a", "us-east-1b")
    ]
    return {
        "Type": "instant",
        "LaunchTemplateConfigs": [
            {
                "LaunchTemplateSpecification": {
                    "LaunchTemplateId": template,
                    "Version": "$Latest",
                },
                "Overrides": default if overrides is None else overrides,
            }
        ],
        "TargetCapacitySpecification": {
            "TotalTargetCapacity": num_spot + num_on_demand,
            "SpotTargetCapacity": num_spot,
            "OnDemandTargetCapacity": num_on_demand,
            "DefaultTargetCapacityType": "spot",
        },
        "SpotOptions": {"AllocationStrategy": "price-capacity-optimized"},
        **words,
    }


def create_fleet(template: str, num_spot: int = 1, **words: Any) -> dict[str, Any]:
    """Request machines once."""
    answer: dict[str, Any] = ec2().create_fleet(**fleet_request(template, num_spot, **words))
    return answer


def ids_of(answer: dict[str, Any]) -> list[str]:
    """Return the instance ids in the response of a fleet request."""
    return [name for entry in answer["Instances"] for name in entry["InstanceIds"]]


def described() -> dict[str, dict[str, Any]]:
    """Return the instances that DescribeInstances lists, by id."""
    pages = ec2().get_paginator("describe_instances").paginate()
    return {
        one["InstanceId"]: one
        for page in pages
        for reservation in page["Reservations"]
        for one in reservation["Instances"]
    }


def links_of(pid: int) -> list[str]:
    """Return the bridge and the veth interfaces of a harness process."""
    names = [name for _, name in socket.if_nameindex()]
    return [name for name in names if name == f"{PREFIX}{pid}" or name.startswith(f"{CABLE}{pid}n")]


def launch(cloud: FakeAws, user_data: str = HELLO, **words: int) -> str:
    """Start one instance; return its id."""
    (instance_id,) = ids_of(create_fleet(make_template(cloud, user_data), **words))
    return instance_id


def wait_for_text(cloud: FakeAws, instance_id: str, text: str) -> str:
    """Wait until the console contains ``text``; return the console."""
    cloud.wait_until(lambda: text in cloud.console(instance_id))
    return cloud.console(instance_id)
