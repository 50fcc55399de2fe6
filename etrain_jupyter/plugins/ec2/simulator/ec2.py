"""EC2 actions that moto lacks or simplifies, backed by a market and real machines.

Each method takes a call and returns a response, or None to let moto respond. ``after`` is called
with moto's response. All methods run while the backend's lock is held.
"""

from __future__ import annotations

import base64
import time
import uuid
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

from etrain_jupyter.plugins.ec2.simulator.backend import Backend
from etrain_jupyter.plugins.ec2.simulator.fleets import (
    Override,
    describe,
    error_entry,
    merged,
    read_demands,
)
from etrain_jupyter.plugins.ec2.simulator.hypervisor import Hypervisor
from etrain_jupyter.plugins.ec2.simulator.imds import timestamp
from etrain_jupyter.plugins.ec2.simulator.market import (
    BEFORE,
    Candidate,
    CapacityPool,
    Lifecycle,
    Market,
    MarketRefusal,
)
from etrain_jupyter.plugins.ec2.simulator.wire import (
    EC2_NAMESPACE,
    ApiError,
    Call,
    ec2_response,
    listed,
    nested,
    response,
    tags_by_kind,
)
from etrain_jupyter.testing.serving import Response

IDEMPOTENT = frozenset({"CreateFleet", "RunInstances"})
LOG_BYTES = 64 * 1024
_ZONE_IDS = {"a": 6, "b": 1, "c": 2, "d": 4, "e": 3, "f": 5}


class Ec2:
    """The actions, and their state."""

    def __init__(self, backend: Backend, market: Market, hypervisor: Hypervisor) -> None:
        self._backend = backend
        self.market = market
        self._hypervisor = hypervisor
        self._responses: dict[tuple[str, str, str], tuple[dict[str, Any], Response]] = {}
        self._born: dict[str, float] = {}
        self.lag_s = 0.0

    def reset(self, market: Market) -> None:
        """Reset the state."""
        self.market = market
        self._responses.clear()
        self._born.clear()
        self.lag_s = 0.0

    def handle(self, call: Call, call_moto: Callable[[], Response]) -> Response:
        """Process a call to EC2."""
        with self._backend.lock:
            query = nested(call.body)
            # A repeated request with the same token returns the first response, as in EC2: a client
            # that has not received it must not get a second fleet.
            token = query.get("ClientToken", "")
            key = (call.region, call.action, token)
            if token and call.action in IDEMPOTENT and key in self._responses:
                before, result = self._responses[key]
                if before != query:
                    raise ApiError(
                        "IdempotentParameterMismatch",
                        f"The client token '{token}' was used with other parameters.",
                    )
                return result
            # moto may create instances during the request. Compare before and after.
            known = set(self._backend.states())
            result = self._act(call, query, call_moto)
            if call.action in IDEMPOTENT and result[0].startswith("200"):
                self._responses[key] = (query, result)
            for instance_id in set(self._backend.states()) - known:
                self._born[instance_id] = time.monotonic()
            self._hypervisor.sync()
            return result

    def _act(
        self, call: Call, query: dict[str, Any], call_moto: Callable[[], Response]
    ) -> Response:
        match call.action:
            case "CreateFleet" if query.get("Type") == "instant":
                return self._create_fleet(call, query)
            case "RunInstances":
                self._check_launchable(call, query)
                return call_moto()
            case "DescribeSpotPriceHistory":
                return self._price_history(call, query)
            case "GetSpotPlacementScores":
                return self._placement_scores(call, query)
            case "GetConsoleOutput":
                return self._console_output(call, query)
            case "DescribeInstances" if self.lag_s:
                return self._lagging(query, call_moto())
        return call_moto()

    # CreateFleet --------------------------------------------------------------------------------

    def _create_fleet(self, call: Call, query: dict[str, Any]) -> Response:
        configs = listed(query, "LaunchTemplateConfigs")
        if not configs or "TargetCapacitySpecification" not in query:
            raise ApiError(
                "MissingParameter",
                "LaunchTemplateConfigs and TargetCapacitySpecification must be given",
            )
        overrides = list(self._overrides(call.region, configs))
        tags = tags_by_kind(query)
        self._backend.iam.check_signed(call)
        if query.get("DryRun") == "true":
            raise ApiError(
                "DryRunOperation", "Request would have succeeded, but DryRun flag is set.", 412
            )
        launched: list[dict[str, Any]] = []
        errors: list[dict[str, Any]] = []
        # Plan the on-demand part first, so that its machines are taken before the spot part is
        # planned.
        for demand in read_demands(query):
            usable, bad = self._usable(call.region, overrides, demand.lifecycle)
            errors += bad
            plan = self.market.plan([one.candidate for one in usable], demand, time.time())
            for candidate in plan.launches:
                chosen = overrides[candidate.place]
                launched.append(self._launch(call.region, chosen, demand.lifecycle, tags))
            for refusal in plan.refusals:
                of = overrides[refusal.candidate.place if refusal.candidate else 0]
                errors.append(error_entry(of, demand.lifecycle, refusal.code, refusal.message))
        return ec2_response(
            "CreateFleet",
            {
                "fleetId": f"fleet-{uuid.uuid4()}",
                "errorSet": errors,
                "fleetInstanceSet": merged(launched),
            },
        )

    def _overrides(self, region: str, configs: list[Any]) -> Iterator[Override]:
        # `place` counts the overrides of all configurations; the market's response refers to it.
        place = 0
        for config in configs:
            version = self._backend.template(region, config["LaunchTemplateSpecification"])
            for override in config.get("Overrides") or [{}]:
                subnet = override.get("SubnetId")
                zone = override.get("AvailabilityZone") or self._backend.zone_of(region, subnet)
                price = override.get("MaxPrice")
                candidate = Candidate(
                    pool=CapacityPool(override.get("InstanceType") or version.instance_type, zone),
                    place=place,
                    weight=float(override.get("WeightedCapacity", 1)),
                    max_price_usd=float(price) if price else None,
                    priority=float(override.get("Priority", place)),
                )
                place += 1
                yield Override(template=version, subnet=subnet, candidate=candidate)

    def _usable(
        self, region: str, overrides: list[Override], lifecycle: Lifecycle
    ) -> tuple[list[Override], list[dict[str, Any]]]:
        """Separate overrides that can be launched from invalid ones, such as a wrong image."""
        usable, errors = [], []
        for one in overrides:
            try:
                self._backend.check_image(region, one.template.image_id)
            except ApiError as exc:
                errors.append(error_entry(one, lifecycle, exc.code, exc.message))
            else:
                usable.append(one)
        return usable, errors

    def _launch(
        self, region: str, chosen: Override, lifecycle: Lifecycle, tags: dict[str, dict[str, str]]
    ) -> dict[str, Any]:
        pool = chosen.candidate.pool
        instance_id = self._backend.launch(
            chosen.template, pool, lifecycle, region=region, subnet=chosen.subnet, tags=tags
        )
        self.market.take(instance_id, pool, lifecycle)
        return {
            "launchTemplateAndOverrides": describe(chosen),
            "lifecycle": lifecycle,
            "instanceIds": [instance_id],
            "instanceType": pool.instance_type,
        }

    # RunInstances -------------------------------------------------------------------------------

    def _check_launchable(self, call: Call, query: dict[str, Any]) -> None:
        """Refuse what moto would accept: too little capacity, or an image that does not exist."""
        data: dict[str, Any] = {}
        if "LaunchTemplate" in query:
            data = self._backend.template(call.region, query["LaunchTemplate"]).data
        image = query.get("ImageId") or data.get("ImageId", "")
        options = query.get("InstanceMarketOptions") or data.get("InstanceMarketOptions") or {}
        lifecycle: Lifecycle = "spot" if options.get("MarketType") == "spot" else "on-demand"
        zone = (query.get("Placement") or {}).get("AvailabilityZone")
        zone = zone or self._backend.zone_of(call.region, query.get("SubnetId"))
        instance_type = query.get("InstanceType") or data.get("InstanceType") or "m1.small"
        pool = CapacityPool(instance_type, zone)
        # moto responds to a dry run itself.
        if query.get("DryRun") == "true":
            return
        self._backend.check_image(call.region, image)
        wanted = int(query.get("MinCount", 1))
        if self.market.free(pool, lifecycle) < wanted:
            refusal = MarketRefusal(
                lifecycle=lifecycle,
                code="InsufficientInstanceCapacity",
                candidate=Candidate(pool=pool),
            )
            raise ApiError(refusal.code, refusal.message)

    # Reads ----------------------------------------------------------------------------------------

    def _price_history(self, call: Call, query: dict[str, Any]) -> Response:
        self._backend.iam.check_signed(call)
        filters = {one["Name"]: listed(one, "Value") for one in listed(query, "Filter")}
        types = listed(query, "InstanceType") or filters.get("instance-type", [])
        zone = query.get("AvailabilityZone")
        zones = [zone] if zone else filters.get("availability-zone", [])
        products = listed(query, "ProductDescription") or filters.get("product-description", [])
        since, until = _instant(query.get("StartTime")), _instant(query.get("EndTime"))
        rows = []
        for pool in self.market.pools():
            if (types and pool.instance_type not in types) or (zones and pool.zone not in zones):
                continue
            if not pool.zone.startswith(call.region):
                continue
            if products and not any(name.startswith("Linux/UNIX") for name in products):
                continue
            for at, end, usd in self.market.periods(pool):
                # Also the price in force at the start of the time span.
                if (since is not None and end <= since) or (until is not None and at > until):
                    continue
                # A price that no test has set counts as one day old.
                shown = time.time() - 86_400 if at == BEFORE else at
                rows.append(
                    {
                        "instanceType": pool.instance_type,
                        "productDescription": "Linux/UNIX",
                        "spotPrice": f"{usd:.6f}",
                        "timestamp": timestamp(shown),
                        "availabilityZone": pool.zone,
                    }
                )
        # The newest price comes first, as in EC2's response.
        rows.sort(key=lambda row: (row["timestamp"], row["instanceType"]), reverse=True)
        return ec2_response(call.action, {"spotPriceHistorySet": rows, "nextToken": ""})

    def _placement_scores(self, call: Call, query: dict[str, Any]) -> Response:
        self._backend.iam.check_signed(call)
        types = listed(query, "InstanceType")
        units = int(query.get("TargetCapacity", 1))
        pools = [
            pool
            for pool in self.market.pools()
            if pool.zone.startswith(call.region) and (not types or pool.instance_type in types)
        ]
        # With fewer than three types, AWS returns low scores, regardless of capacity.
        most = 10 if len(types) >= 3 else 3
        by_zone = query.get("SingleAvailabilityZone") == "true"
        rows = []
        for zone in sorted({pool.zone for pool in pools}) if by_zone else [""]:
            score = self.market.score([pool for pool in pools if zone in ("", pool.zone)], units)
            row: dict[str, Any] = {"region": call.region, "score": min(most, score)}
            if zone:
                zone_id = f"{_short(call.region)}-az{_ZONE_IDS.get(zone[-1], 1)}"
                row["availabilityZoneId"] = zone_id
            rows.append(row)
        return ec2_response(call.action, {"spotPlacementScoreSet": rows})

    def _console_output(self, call: Call, query: dict[str, Any]) -> Response:
        self._backend.iam.check_signed(call)
        instance_id = query.get("InstanceId", "")
        self._backend.find(instance_id)
        output = self._hypervisor.console(instance_id)[-LOG_BYTES:]
        return ec2_response(
            call.action,
            {
                "instanceId": instance_id,
                "timestamp": timestamp(time.time()),
                "output": base64.b64encode(output).decode(),
            },
        )

    def _lagging(self, query: dict[str, Any], result: Response) -> Response:
        """Remove the instances that EC2's listings would not show yet."""
        # A request that names a hidden instance fails. Otherwise hidden instances are removed from
        # moto's XML, along with reservations that they leave empty.
        now = time.monotonic()
        hidden = {name for name, at in self._born.items() if now - at < self.lag_s}
        for instance_id in listed(query, "InstanceId"):
            if instance_id in hidden:
                raise ApiError(
                    "InvalidInstanceID.NotFound",
                    f"The instance ID '{instance_id}' does not exist",
                )
        if not hidden or not result[0].startswith("200"):
            return result
        ET.register_namespace("", EC2_NAMESPACE)
        root = ET.fromstring(result[2])
        for reservations in root.iterfind("{*}reservationSet"):
            for reservation in list(reservations):
                for instances in reservation.iterfind("{*}instancesSet"):
                    for item in list(instances):
                        if item.findtext("{*}instanceId") in hidden:
                            instances.remove(item)
                    if not len(instances):
                        reservations.remove(reservation)
        return response(200, ET.tostring(root), "text/xml")


def _instant(text: str | None) -> float | None:
    return datetime.fromisoformat(text).timestamp() if text else None


def _short(region: str) -> str:
    """Abbreviate a region as in zone ids.

    >>> _short("us-east-1")
    'use1'
    """
    area, side, number = region.rsplit("-", 2)
    return f"{area.replace('-', '')}{side[0]}{number}"
