"""Parse ``CreateFleet`` requests, and format the parts of a response. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from etrain_jupyter.plugins.ec2.simulator.market import Candidate, Demand, Lifecycle


@dataclass(frozen=True, kw_only=True)
class Override:
    """One override of a fleet request: a pool and its launch template."""

    template: Any
    subnet: str | None
    candidate: Candidate


def read_demands(query: dict[str, Any]) -> list[Demand]:
    """Return the on-demand and the spot part of a fleet request, if present."""
    capacity = query["TargetCapacitySpecification"]
    total = float(capacity["TotalTargetCapacity"])
    targets: dict[Lifecycle, float] = {
        "on-demand": float(capacity.get("OnDemandTargetCapacity", 0)),
        "spot": float(capacity.get("SpotTargetCapacity", 0)),
    }
    default: Literal["spot", "on-demand"] = (
        "spot" if capacity.get("DefaultTargetCapacityType") == "spot" else "on-demand"
    )
    # Units of the total that neither target covers get the default type.
    targets[default] += max(0.0, total - sum(targets.values()))
    demands = []
    for lifecycle, name in (("on-demand", "OnDemandOptions"), ("spot", "SpotOptions")):
        options = query.get(name) or {}
        if not targets[lifecycle]:  # type: ignore[index]
            continue
        demands.append(
            Demand(
                lifecycle=lifecycle,  # type: ignore[arg-type]
                target=targets[lifecycle],  # type: ignore[index]
                strategy=options.get("AllocationStrategy", "lowest-price"),
                num_pools=int(options.get("InstancePoolsToUseCount", 1)),
                is_single_type=options.get("SingleInstanceType") == "true",
                is_single_zone=options.get("SingleAvailabilityZone") == "true",
                min_target=float(options.get("MinTargetCapacity", 0)),
            )
        )
    return demands


def describe(one: Override) -> dict[str, Any]:
    """Format the override of an instance or an error."""
    pool = one.candidate.pool
    return {
        "launchTemplateSpecification": {
            "launchTemplateId": one.template.template.id,
            "version": str(one.template.number),
        },
        "overrides": {
            "instanceType": pool.instance_type,
            "subnetId": one.subnet,
            "availabilityZone": pool.zone,
            "weightedCapacity": one.candidate.weight,
        },
    }


def error_entry(one: Override, lifecycle: Lifecycle, code: str, message: str) -> dict[str, Any]:
    """Format the error of an override."""
    return {
        "launchTemplateAndOverrides": describe(one),
        "lifecycle": lifecycle,
        "errorCode": code,
        "errorMessage": message,
    }


def merged(launched: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Group instances of one override and lifecycle into one entry, as EC2 does."""
    # Two entries belong together if they differ only in their instances.
    entries: list[dict[str, Any]] = []
    for one in launched:
        for entry in entries:
            if all(entry[name] == one[name] for name in one if name != "instanceIds"):
                entry["instanceIds"] += one["instanceIds"]
                break
        else:
            entries.append(one)
    return entries
