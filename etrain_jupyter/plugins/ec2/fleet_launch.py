"""Launch machines with EC2's CreateFleet, idempotently.

boto3 must not retry launches, because EC2 reports missing capacity as an HTTP 500. Transient
errors are retried here, with the same ``ClientToken`` in each of at most ``NUM_ATTEMPTS`` requests:
EC2 returns the same machines for the same token.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import Any

from etrain_jupyter.plugins.ec2.aws_messages import (
    AwsErrors,
    kind_of,
    kind_of_code,
    message_of_code,
)
from etrain_jupyter.plugins.ec2.ec2_api import tag_list
from etrain_jupyter.plugins.ec2.fleet_state import Ack, FleetResult, LaunchFailure, LaunchRequest
from etrain_jupyter.storage.objects.s3_messages import code_of

NUM_ATTEMPTS = 4
FIRST_PAUSE_S = 0.5


def create_fleet(
    launcher: Any,
    request: LaunchRequest,
    *,
    template_id: str,
    subnets: Mapping[str, str],
    allocation: str,
    tags: Mapping[str, str],
    pause: Callable[[float], Any] = time.sleep,
) -> FleetResult | None:
    """Request machines; return the result, or None if it is unknown.

    ``launcher`` is a client without retries, and ``subnets`` has the subnet of each zone.
    """
    arguments = _arguments(request, template_id, subnets, allocation, tags)
    for attempt in range(NUM_ATTEMPTS):
        if attempt:
            # Jitter, because several clusters of an account share one rate limit.
            pause(random.uniform(0.5, 1.0) * FIRST_PAUSE_S * 2.0**attempt)
        try:
            return _result(launcher.create_fleet(**arguments), request, subnets)
        except AwsErrors as exc:
            kind = kind_of(exc)
            # The reconciler renews the clients; the request stays unanswered and keeps its token.
            if kind == "credentials":
                raise
            if kind != "transient":
                # A rejection is also an answer: EC2 has rejected the whole request, so it has not
                # launched any machine.
                return FleetResult(refusals=(_refusal("", "", code_of(exc), str(exc)),))
    # EC2 may or may not have launched the machines. The caller repeats the request with its token.
    return None


def _arguments(
    request: LaunchRequest,
    template_id: str,
    subnets: Mapping[str, str],
    allocation: str,
    tags: Mapping[str, str],
) -> dict[str, Any]:
    is_spot = request.lifecycle == "spot"
    template = {"LaunchTemplateId": template_id, "Version": "$Latest"}
    overrides = [
        {"InstanceType": type, "SubnetId": subnets[zone]} for type, zone in request.overrides
    ]
    options = (
        {"SpotOptions": {"AllocationStrategy": allocation}}
        if is_spot
        # On-demand machines are not interrupted, so only their price counts.
        else {"OnDemandOptions": {"AllocationStrategy": "lowest-price"}}
    )
    # All machines in a request have the same number of workers. With WeightedCapacity, EC2 might
    # launch more workers than requested.
    return {
        # An instant fleet is launched synchronously and does not replace interrupted machines.
        "Type": "instant",
        "ClientToken": request.token,
        "LaunchTemplateConfigs": [
            {"LaunchTemplateSpecification": template, "Overrides": overrides}
        ],
        "TargetCapacitySpecification": {
            "TotalTargetCapacity": request.num_nodes,
            "OnDemandTargetCapacity": 0 if is_spot else request.num_nodes,
            "SpotTargetCapacity": request.num_nodes if is_spot else 0,
            "DefaultTargetCapacityType": request.lifecycle,
        },
        "TagSpecifications": [
            {"ResourceType": kind, "Tags": tag_list(tags)}
            # The template has these tags, too, but IAM conditions apply to those in the request
            # itself.
            for kind in ("fleet", "instance", "volume")
        ],
        **options,
    }


def _result(
    answer: Mapping[str, Any], request: LaunchRequest, subnets: Mapping[str, str]
) -> FleetResult:
    zones = {subnet: zone for zone, subnet in subnets.items()}
    now = time.time()

    def place(one: Mapping[str, Any]) -> tuple[str, str]:
        # EC2 returns the type and zone in different fields for machines and for errors.
        override = one.get("LaunchTemplateAndOverrides", {}).get("Overrides", {})
        zone = override.get("AvailabilityZone") or zones.get(override.get("SubnetId", ""), "")
        return one.get("InstanceType") or override.get("InstanceType", ""), zone

    acks = tuple(
        Ack(
            id=id,
            type=place(one)[0],
            zone=place(one)[1],
            lifecycle=one.get("Lifecycle") or request.lifecycle,
            workers=request.workers_each,
            at=now,
        )
        for one in answer.get("Instances", ())
        for id in one.get("InstanceIds", ())
    )
    refusals = tuple(
        _refusal(*place(one), one.get("ErrorCode", ""), one.get("ErrorMessage", ""))
        for one in answer.get("Errors", ())
    )
    return FleetResult(acks=acks, refusals=refusals)


def _refusal(type: str, zone: str, code: str, message: str) -> LaunchFailure:
    kind = kind_of_code(code)
    # Treat temporary errors like missing capacity, so that the pool backs off.
    kind = "capacity" if kind in ("transient", "credentials") else kind
    return LaunchFailure(
        type=type, zone=zone, code=code, message=message_of_code(code, message), kind=kind
    )
