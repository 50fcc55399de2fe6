"""Check that a pool's types, image and quota fit together, before anything is launched."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from botocore.exceptions import ClientError

from etrain_jupyter.config.source_map import did_you_mean
from etrain_jupyter.errors import PoolError
from etrain_jupyter.plugins.ec2.account.site import DENIED, reason_of
from etrain_jupyter.plugins.ec2.aws_messages import AwsErrors
from etrain_jupyter.plugins.ec2.bootstrap import describe_image
from etrain_jupyter.plugins.ec2.ec2_api import Clients, describe_types
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec
from etrain_jupyter.plugins.ec2.type_table import MACHINE_TYPES, ON_DEMAND_USD
from etrain_jupyter.storage.objects.s3_messages import code_of

SPOT_QUOTAS: Mapping[str, tuple[str, str]] = {
    "g": ("L-3819A6DF", "All G and VT Spot Instance Requests"),
    "vt": ("L-3819A6DF", "All G and VT Spot Instance Requests"),
    "p2": ("L-7212CCBC", "All P4, P3 and P2 Spot Instance Requests"),
    "p3": ("L-7212CCBC", "All P4, P3 and P2 Spot Instance Requests"),
    "p4": ("L-7212CCBC", "All P4, P3 and P2 Spot Instance Requests"),
    "p5": ("L-C4BD4855", "All P5 Spot Instance Requests"),
    **{
        letter: ("L-34B43A08", "All Standard (A, C, D, H, I, M, R, T, Z) Spot Instance Requests")
        for letter in "acdhimrtz"
    },
}
"""Code and name of each quota of spot vCPUs, by family or by family and generation."""


def check_machines(clients: Clients, spec: AwsSpotSpec) -> None:
    """Check that the types exist, and that the image runs on them.

    Raises:
        PoolError: If a type does not exist, or the image does not run on it.
        ClientError: If EC2 refuses a request.
    """
    if spec.capacity.gpu is not None:
        return
    types = describe_types(clients.ec2, spec.capacity.types)
    if unknown := [name for name in spec.capacity.types if name not in types]:
        hint = did_you_mean(unknown[0], [*MACHINE_TYPES, *ON_DEMAND_USD])
        raise PoolError(
            f"{spec.region} does not have the machine type {', '.join(unknown)}. Nothing was "
            f"created. {hint.capitalize() or 'Correct --types or capacity.types.'}"
        )
    image = find_architecture(clients, spec)
    for name, facts in types.items():
        if image and facts.architectures and image not in facts.architectures:
            raise PoolError(
                f"the image {spec.image.ami} is for {image}, but {name} is a machine for "
                f"{', '.join(facts.architectures)}. Nothing was created. Choose an image with "
                "--ami (image.ami), or other types with --types (capacity.types)."
            )


def find_architecture(clients: Clients, spec: AwsSpotSpec) -> str:
    """Return the architecture of the pool's image, such as ``x86_64``.

    Empty if these credentials may not look it up.

    Raises:
        PoolError: If the image does not exist.
    """
    try:
        return str(describe_image(clients, spec).get("Architecture", ""))
    except ClientError as exc:
        code = code_of(exc)
        if code.startswith("InvalidAMIID") or code == "ParameterNotFound":
            raise PoolError(
                f"{spec.region} does not have the image {spec.image.ami} ({code}). Nothing was "
                "created. Images belong to one region: name another one with --ami (image.ami)."
            ) from exc
        if code in DENIED:
            return ""
        raise


def check_quotas(clients: Clients, spec: AwsSpotSpec) -> Iterator[str]:
    """Compare the account's spot vCPU quotas with the pool's types; yield a line for each quota.

    Raises:
        PoolError: If a quota is too small for a single machine.
    """
    if spec.capacity.gpu is not None:
        return
    members: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for name, facts in describe_types(clients.ec2, spec.capacity.types).items():
        if quota := quota_of(name):
            members.setdefault(quota, []).append((facts.vcpus, name))
    for (code, title), sizes in members.items():
        quota_text = f"quota {title} ({code})"
        try:
            answer = clients.quotas.get_service_quota(ServiceCode="ec2", QuotaCode=code)
        except AwsErrors as exc:
            yield f"note  {quota_text}: unknown, {reason_of(exc)}"
            continue
        value, (size, name) = int(answer["Quota"]["Value"]), min(sizes)
        need = size * -(-spec.workers.max // max(1, spec.workers.per_node))
        request = (
            f"Request more: `aws service-quotas request-service-quota-increase --region "
            f"{spec.region} --service-code ec2 --quota-code {code} --desired-value {need}`"
        )
        if value < size:
            raise PoolError(
                f"{quota_text} is {value} vCPUs, and {name} has {size}: EC2 will refuse every "
                f"launch. {request}, which takes hours"
            )
        few = f", enough for {value // size} {name}, not for workers.max {spec.workers.max}. "
        yield (
            f"note  {quota_text}: {value} vCPUs{few}{request}"
            if value < need
            else (f"ok    {quota_text}: {value} vCPUs")
        )


def quota_of(name: str) -> tuple[str, str] | None:
    """Return code and name of the spot quota that a type counts towards.

    >>> quota_of("g5.xlarge")[0], quota_of("p4d.24xlarge")[0], quota_of("trn1.2xlarge")
    ('L-3819A6DF', 'L-7212CCBC', None)
    """
    found = re.match(r"([a-z]+)(\d*)", name)
    if found is None:
        return None
    return SPOT_QUOTAS.get(found[0]) or SPOT_QUOTAS.get(found[1])
