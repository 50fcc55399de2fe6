"""CreateFleet in the fake cloud: machines from a market, and an error for each empty pool."""

from __future__ import annotations

from typing import Any

import pytest

from etrain_jupyter.plugins.ec2.simulator import FakeAws
from tests.contract.fleets import create_fleet, described, ec2, ids_of, make_template


@pytest.fixture(autouse=True)
def nothing_boots(fresh_cloud: FakeAws) -> None:
    """Keep instances from booting: these tests check API responses only."""
    fresh_cloud.set_boot(1000)


def pool(name: str, zone: str, capacity: int, price_usd: float) -> dict[str, Any]:
    return {"instance_type": name, "zone": zone, "capacity": capacity, "price_usd": price_usd}


def test_fleet_gets_the_available_machines_and_an_error_for_each_empty_pool(
    fresh_cloud: FakeAws,
) -> None:
    fresh_cloud.set_market([pool("g5.xlarge", "us-east-1a", 1, 0.3)])

    got = create_fleet(make_template(fresh_cloud), 3)

    assert len(ids_of(got)) == 1
    assert got["Instances"][0]["Lifecycle"] == "spot"
    chosen = got["Instances"][0]["LaunchTemplateAndOverrides"]["Overrides"]
    assert (chosen["InstanceType"], chosen["AvailabilityZone"]) == ("g5.xlarge", "us-east-1a")
    refused = [
        (
            one["ErrorCode"],
            one["LaunchTemplateAndOverrides"]["Overrides"]["InstanceType"],
            one["LaunchTemplateAndOverrides"]["Overrides"]["AvailabilityZone"],
        )
        for one in got["Errors"]
    ]
    assert refused == [
        ("InsufficientInstanceCapacity", name, zone)
        for name in ("g5.xlarge", "g6.xlarge")
        for zone in ("us-east-1a", "us-east-1b")
    ]


def test_fleet_without_any_capacity_returns_errors_and_no_instance(
    fresh_cloud: FakeAws,
) -> None:
    template = make_template(fresh_cloud)
    fresh_cloud.set_capacity(0)

    got = create_fleet(template, 2)

    assert (ids_of(got), len(got["Errors"])) == ([], 4)


def test_single_zone_and_minimum_target_capacity_are_respected(fresh_cloud: FakeAws) -> None:
    fresh_cloud.set_market(
        [pool("g5.xlarge", "us-east-1a", 1, 0.1), pool("g6.xlarge", "us-east-1b", 2, 0.9)]
    )
    template = make_template(fresh_cloud)
    options = {"AllocationStrategy": "lowest-price", "SingleAvailabilityZone": True}

    too_many = create_fleet(template, 4, SpotOptions={**options, "MinTargetCapacity": 3})
    two = create_fleet(template, 2, SpotOptions=options)

    assert ids_of(too_many) == []
    assert too_many["Errors"][0]["ErrorCode"] == "UnfulfillableCapacity"
    zones = {described()[name]["Placement"]["AvailabilityZone"] for name in ids_of(two)}
    assert (len(ids_of(two)), zones) == (2, {"us-east-1b"})


def test_one_call_launches_on_demand_and_spot_with_the_tags_of_template_and_request(
    fresh_cloud: FakeAws,
) -> None:
    more = [{"Key": "etrain:role", "Value": "node"}]
    got = create_fleet(
        make_template(fresh_cloud),
        1,
        num_on_demand=1,
        TagSpecifications=[{"ResourceType": "instance", "Tags": more}],
    )

    lifecycles = {one["Lifecycle"]: one["InstanceIds"][0] for one in got["Instances"]}
    spot = described()[lifecycles["spot"]]
    tags = {tag["Key"]: tag["Value"] for tag in spot["Tags"]}
    volumes = ec2().describe_volumes(Filters=[{"Name": "tag:etrain:cluster", "Values": ["c-1"]}])
    assert (tags["etrain:cluster"], tags["etrain:role"]) == ("c-1", "node")
    assert spot["InstanceLifecycle"] == "spot"
    assert "InstanceLifecycle" not in described()[lifecycles["on-demand"]]
    assert spot["IamInstanceProfile"]["Arn"].endswith("instance-profile/etrain-node")
    assert spot["MetadataOptions"]["HttpTokens"] == "required"
    assert len(volumes["Volumes"]) == 2


def test_weighted_capacity_counts_as_several_units(fresh_cloud: FakeAws) -> None:
    heavy = [
        {"InstanceType": "g5.xlarge", "AvailabilityZone": "us-east-1a", "WeightedCapacity": 4.0}
    ]

    got = create_fleet(make_template(fresh_cloud), 8, overrides=heavy)

    assert len(ids_of(got)) == 2
