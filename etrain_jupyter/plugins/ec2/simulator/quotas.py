"""Service Quotas' ``GetServiceQuota``, for EC2's limits on vCPUs."""

from __future__ import annotations

from typing import Any

from etrain_jupyter.plugins.ec2.simulator.wire import ApiError

DEFAULT_VCPUS = 64.0
SPOT_VCPUS = ("L-3819A6DF", "L-7212CCBC", "L-C4BD4855", "L-34B43A08")
"""Codes of the quotas of spot vCPUs: G and VT, P4 to P2, P5, and the standard families."""


class Quotas:
    """The account's limits."""

    def __init__(self) -> None:
        self.vcpus: dict[str, float] = {}
        """Limits that differ from the default, by code."""

    def get(self, request: dict[str, Any]) -> dict[str, Any]:
        """Process ``GetServiceQuota``.

        Raises:
            ApiError: If the quota does not exist.
        """
        service, code = request.get("ServiceCode"), request.get("QuotaCode")
        if service != "ec2" or code not in SPOT_VCPUS:
            raise ApiError("NoSuchResourceException", f"The quota {service}/{code} does not exist.")
        value = self.vcpus.get(code, DEFAULT_VCPUS)
        quota = {"ServiceCode": service, "QuotaCode": code, "Value": value, "Unit": "None"}
        return {"Quota": quota}
