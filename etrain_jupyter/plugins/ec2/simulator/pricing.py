"""Service Quotas' ``GetServiceQuota``, and the Pricing API's ``GetProducts`` for EC2 on Linux."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from etrain_jupyter.plugins.ec2.simulator.imds import timestamp
from etrain_jupyter.plugins.ec2.simulator.market import Market
from etrain_jupyter.plugins.ec2.simulator.wire import ApiError

PUBLISHED_AT = 1767225600.0
"""Date of the prices: 2026-01-01."""
REGION_NAMES = {
    "ap-northeast-1": "Asia Pacific (Tokyo)",
    "eu-central-1": "EU (Frankfurt)",
    "eu-west-1": "EU (Ireland)",
    "us-east-1": "US East (N. Virginia)",
    "us-east-2": "US East (Ohio)",
    "us-west-2": "US West (Oregon)",
}


DEFAULT_VCPUS = 64.0
SPOT_VCPUS = ("L-3819A6DF", "L-7212CCBC", "L-C4BD4855", "L-34B43A08")
"""Codes of the quotas of spot vCPUs: G and VT, P4 to P2, P5, and the standard families."""


def get_quota(request: dict[str, Any], vcpus: Mapping[str, float]) -> dict[str, Any]:
    """Process ``GetServiceQuota``; ``vcpus`` has the limits that differ from the default.

    Raises:
        ApiError: If the quota does not exist.
    """
    service, code = request.get("ServiceCode"), request.get("QuotaCode")
    if service != "ec2" or code not in SPOT_VCPUS:
        raise ApiError("NoSuchResourceException", f"The quota {service}/{code} does not exist.")
    value = vcpus.get(code, DEFAULT_VCPUS)
    quota = {"ServiceCode": service, "QuotaCode": code, "Value": value, "Unit": "None"}
    return {"Quota": quota}


def get_products(request: dict[str, Any], market: Market) -> dict[str, Any]:
    """Process ``GetProducts``: return matching products, each as JSON text.

    The market has one on-demand price per type, which applies to all regions.

    Raises:
        ApiError: For services other than EC2.
    """
    if request.get("ServiceCode") != "AmazonEC2":
        code = request.get("ServiceCode")
        raise ApiError("NotFoundException", f"There are no prices of {code} here.")
    wanted = {one["Field"]: one["Value"] for one in request.get("Filters", [])}
    products = []
    for region, name in REGION_NAMES.items():
        for instance_type in market.on_demand_types():
            attributes = _attributes(instance_type, region, name)
            if all(attributes.get(field) == value for field, value in wanted.items()):
                usd = market.on_demand_usd(instance_type) or 0.0
                products.append(json.dumps(_product(attributes, usd)))
    # Paginate like the real API: NextToken is the index of the next product.
    most = int(request.get("MaxResults", 100))
    start = int(request.get("NextToken") or 0)
    response: dict[str, Any] = {
        "FormatVersion": "aws_v1",
        "PriceList": products[start : start + most],
    }
    if start + most < len(products):
        response["NextToken"] = str(start + most)
    return response


def _attributes(instance_type: str, region: str, name: str) -> dict[str, str]:
    return {
        "capacitystatus": "Used",
        "instanceType": instance_type,
        "licenseModel": "No License required",
        "location": name,
        "locationType": "AWS Region",
        "marketoption": "OnDemand",
        "operatingSystem": "Linux",
        "operation": "RunInstances",
        "preInstalledSw": "NA",
        "regionCode": region,
        "servicecode": "AmazonEC2",
        "tenancy": "Shared",
    }


def _product(attributes: dict[str, str], usd: float) -> dict[str, Any]:
    named = f"{attributes['instanceType']} {attributes['regionCode']}"
    sku = hashlib.sha256(named.encode()).hexdigest()[:16].upper()
    # AWS's own codes: JRTCKXETXF is the term "on demand", 6YS6EN2CT7 its rate per hour.
    term, rate = f"{sku}.JRTCKXETXF", f"{sku}.JRTCKXETXF.6YS6EN2CT7"
    described = f"${usd:.4f} per On Demand Linux {attributes['instanceType']} Instance Hour"
    dimension = {
        "appliesTo": [],
        "beginRange": "0",
        "description": described,
        "endRange": "Inf",
        "pricePerUnit": {"USD": f"{usd:.10f}"},
        "rateCode": rate,
        "unit": "Hrs",
    }
    on_demand = {
        "effectiveDate": timestamp(PUBLISHED_AT),
        "offerTermCode": "JRTCKXETXF",
        "priceDimensions": {rate: dimension},
        "sku": sku,
        "termAttributes": {},
    }
    return {
        "product": {"attributes": attributes, "productFamily": "Compute Instance", "sku": sku},
        "publicationDate": timestamp(PUBLISHED_AT),
        "serviceCode": "AmazonEC2",
        "terms": {"OnDemand": {term: on_demand}},
        "version": "20260101000000",
    }
