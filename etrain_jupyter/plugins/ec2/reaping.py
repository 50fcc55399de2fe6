"""Find and remove the resources of clusters by their tags; requires nothing but credentials.

Works from any machine, and can be repeated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import ClientError

from etrain_jupyter.config.store_url import S3, split_s3_url
from etrain_jupyter.errors import StoreError
from etrain_jupyter.plugins.ec2.aws_messages import AwsErrors, message_of_error, pool_error
from etrain_jupyter.plugins.ec2.ec2_api import (
    CLUSTER_TAG,
    LIVING,
    Clients,
    list_instances,
    terminate,
)
from etrain_jupyter.plugins.ec2.prices import spot_history
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec
from etrain_jupyter.plugins.ec2.type_table import ON_DEMAND_USD
from etrain_jupyter.pools.base import Leftovers
from etrain_jupyter.storage.objects.s3_messages import code_of

KINDS = {
    "launch-template": ("LaunchTemplates", "LaunchTemplateId"),
    "volume": ("Volumes", "VolumeId"),
    "security-group": ("SecurityGroups", "GroupId"),
}
"""Keys in EC2's responses for resources other than machines: of the list, and of the id."""
POLL_S = 0.5
MAX_POLL_S = 5.0
NUM_EMPTY_LISTINGS = 2
"""Required number of consecutive empty listings: EC2's listings lag behind."""


@dataclass(frozen=True, kw_only=True)
class Tagged:
    """One resource in AWS that belongs to a cluster."""

    kind: str
    """``instance``, ``launch-template``, ``security-group`` or ``volume``."""
    id: str
    cluster_id: str
    region: str
    since: float = 0.0
    """When it was created, in seconds since the epoch; 0.0 if unknown."""
    expires_at: float = 0.0
    type: str = ""
    state: str = ""
    lifecycle: str = ""
    owner: str = ""
    home: str = ""
    """URL of the cluster's objects."""
    role: str = ""
    """``node`` or ``head``."""
    usd_per_h: float | None = None
    """None if unknown; 0.0 for resources without cost."""

    @property
    def is_of_head(self) -> bool:
        """True if the head cannot remove it while the head's own machine runs."""
        return self.role == "head" or self.kind == "security-group"

    @property
    def is_expired(self) -> bool:
        """True if its cluster should have shut down."""
        return bool(self.expires_at) and time.time() > self.expires_at


def find_tagged(clients: Clients, region: str, *, cluster_id: str = "") -> list[Tagged]:
    """Return all resources in a region with our tag, or with that of one cluster."""
    ec2 = clients.ec2
    try:
        found = [*_instances(ec2, region, cluster_id), *_others(ec2, region, cluster_id)]
    except AwsErrors as exc:
        raise pool_error(
            f"the resources in {region} cannot be listed", exc, "Nothing was removed."
        ) from exc
    return sorted(found, key=lambda one: (one.cluster_id, one.kind, one.since, one.id))


def _instances(ec2: Any, region: str, cluster_id: str) -> Iterator[Tagged]:
    living = list_instances(ec2, cluster_id=cluster_id, states=LIVING)
    prices: dict[tuple[str, str], list[tuple[float, float]]] = {}
    if any(one.lifecycle == "spot" for one in living):
        # An hour is enough: EC2 always returns the price in force at the start, so there is at
        # least one point.
        prices = spot_history(ec2, {one.type for one in living}, time.time() - 3600)
    for one in living:
        # The newest point is the price in force.
        points = prices.get((one.type, one.zone))
        spot_usd = points[-1][1] if points else None
        yield _tagged(
            region=region,
            kind="instance",
            id=one.id,
            tags=dict(one.tags),
            since=one.launched_at,
            type=one.type,
            state=one.state,
            lifecycle=one.lifecycle,
            usd_per_h=spot_usd if one.lifecycle == "spot" else ON_DEMAND_USD.get(one.type),
        )


def _others(ec2: Any, region: str, cluster_id: str) -> Iterator[Tagged]:
    by_tag = {"Name": f"tag:{CLUSTER_TAG}", "Values": [cluster_id]}
    filters = [by_tag if cluster_id else {"Name": "tag-key", "Values": [CLUSTER_TAG]}]
    for kind, (key, id_key) in KINDS.items():
        operation = f"describe_{kind.replace('-', '_')}s"
        pages = ec2.get_paginator(operation).paginate(Filters=filters)
        for one in (one for page in pages for one in page[key]):
            if kind == "volume" and one.get("Attachments"):
                continue  # deleted with its machine
            yield _tagged(
                region=region,
                kind=kind,
                id=one[id_key],
                tags={tag["Key"]: tag["Value"] for tag in one.get("Tags", ())},
                # Security groups have no creation time.
                since=one["CreateTime"].timestamp() if "CreateTime" in one else 0.0,
                usd_per_h=None if kind == "volume" else 0.0,
            )


def _tagged(*, tags: dict[str, str], **facts: Any) -> Tagged:
    expires = tags.get("etrain:expires", "")
    return Tagged(
        cluster_id=tags.get(CLUSTER_TAG, ""),
        expires_at=float(expires) if expires.isdigit() else 0.0,
        owner=tags.get("etrain:owner", ""),
        home=tags.get("etrain:home", ""),
        role=tags.get("etrain:role", ""),
        **facts,
    )


def remove(
    clients: Clients,
    region: str,
    cluster_id: str,
    *,
    timeout_s: float = 120.0,
    home: str = "",
    spares_head: bool = False,
    pause: Callable[[float], Any] = time.sleep,
) -> Leftovers:
    """Remove all resources of a cluster except its ledger; return those that remain.

    ``home`` is the URL of the cluster's objects, used if no tagged resource is left. With
    ``spares_head``, the head's machine (this one) is kept, with its template and group.
    """
    deadline = time.monotonic() + timeout_s
    #   machines            terminated, until NUM_EMPTY_LISTINGS listings are empty
    #   templates, disks,   deleted with retries: the group is in use until its machines have ended
    #   security group
    #   objects             last: nodes that still run read their lease and keys there
    #   ledger              kept: the costs must remain known
    first = find_tagged(clients, region, cluster_id=cluster_id)
    home = home or next((one.home for one in first if one.home), "")
    left = _end_machines(clients.ec2, cluster_id, deadline, pause, spares_head=spares_head)
    wait_s = POLL_S
    while True:
        others = [
            one
            for one in find_tagged(clients, region, cluster_id=cluster_id)
            if one.kind != "instance" and not (spares_head and one.is_of_head)
        ]
        stuck = [problem for one in others if (problem := _delete(clients.ec2, one))]
        if not stuck or time.monotonic() > deadline:
            break
        pause(wait_s)  # a group is in use until its machines have ended, which takes minutes
        wait_s = min(2 * wait_s, MAX_POLL_S)
    return Leftovers(
        processes=tuple(left), files=(*stuck, *_remove_objects(clients, home, cluster_id))
    )


def _end_machines(
    ec2: Any,
    cluster_id: str,
    deadline: float,
    pause: Callable[[float], Any],
    *,
    spares_head: bool,
) -> list[str]:
    num_empty, last = 0, ""
    while True:
        living = list_instances(ec2, cluster_id=cluster_id, states=LIVING)
        if spares_head:
            # A head that shuts down its cluster runs this code on its own machine.
            living = [one for one in living if one.tags.get("etrain:role") != "head"]
        # An empty listing may not include a machine that was launched just before.
        num_empty = 0 if living else num_empty + 1
        if num_empty >= NUM_EMPTY_LISTINGS:
            return []
        try:
            terminate(ec2, [one.id for one in living])
        except AwsErrors as exc:
            last = f" ({message_of_error(exc)})"
        if time.monotonic() > deadline:
            return [f"{one.id} {one.type} {one.state}{last}" for one in living]
        pause(POLL_S)


def _delete(ec2: Any, one: Tagged) -> str:
    try:
        getattr(ec2, f"delete_{one.kind.replace('-', '_')}")(**{KINDS[one.kind][1]: one.id})
    except ClientError as exc:
        # Another process is removing the same cluster, or a previous attempt succeeded without a
        # response.
        if "NotFound" in code_of(exc) or "NotExist" in code_of(exc):
            return ""
        return f"{one.id} {one.kind} ({message_of_error(exc)})"
    return ""


def _remove_objects(clients: Clients, home: str, cluster_id: str) -> list[str]:
    # The URL comes from a tag, so anyone who is allowed to tag resources can change it. Delete only
    # the folder of this cluster, and only in the bucket for which the clients were created.
    if not home.startswith(S3) or not home.endswith(f"/clusters/{cluster_id}"):
        return []
    name, key = split_s3_url(home)
    bucket = clients.bucket
    below = key.removeprefix(f"{bucket.prefix}/") if bucket.prefix else key
    if name != bucket.name or (bucket.prefix and not key.startswith(f"{bucket.prefix}/")):
        return [f"{home} (another bucket than the pool's)"]
    what = f"the files of {cluster_id} cannot be deleted"
    try:
        for one in bucket.keys(below, what):
            bucket.delete(one, what)
        return [f"s3://{name}/{bucket.prefix}/{one}" for one in bucket.keys(below, what)]
    except StoreError as exc:
        return [f"{home} ({exc})"]


def by_cluster(found: Sequence[Tagged]) -> dict[str, list[Tagged]]:
    """Group resources by cluster id."""
    ids = sorted({one.cluster_id for one in found})
    return {name: [one for one in found if one.cluster_id == name] for name in ids}


def should_remove(own: Sequence[Tagged], *, cluster_id: str, all_clusters: bool) -> bool:
    """Return True if a cluster is to be removed: by its id, as expired, or with all clusters."""
    if cluster_id:
        return own[0].cluster_id == cluster_id
    # Check all resources: a running head postpones the expiry of its machines, template and group,
    # but not that of its disks.
    return all_clusters or all(one.is_expired for one in own)


def remove_found(
    spec: AwsSpotSpec, found: Sequence[Tagged], *, timeout_s: float = 120.0
) -> Leftovers:
    """Remove one cluster whose resources are known; their tags contain its bucket."""
    [cluster_id] = {one.cluster_id for one in found}
    home = next((one.home for one in found if one.home), "")
    if home:
        bucket, key = split_s3_url(home)
        prefix = key.removesuffix(f"clusters/{cluster_id}")
        # The cluster may belong to another pool in the same region.
        spec = spec.model_copy(update={"bucket": bucket, "prefix": prefix})
    return remove(Clients(spec), spec.region, cluster_id, timeout_s=timeout_s, home=home)
