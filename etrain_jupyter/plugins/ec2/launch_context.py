"""AWS resources that a cluster needs before its first node; each head creates or finds them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etrain_jupyter.errors import PoolError
from etrain_jupyter.plugins.ec2.aws_messages import AwsErrors, pool_error
from etrain_jupyter.plugins.ec2.bootstrap import (
    BootFacts,
    make_template,
    put_node_files,
    tags_of,
)
from etrain_jupyter.plugins.ec2.ec2_api import (
    Clients,
    TypeFacts,
    describe_types,
    find_gpu_types,
)
from etrain_jupyter.plugins.ec2.ledger import PriceBook
from etrain_jupyter.plugins.ec2.network import NOTHING, Network, find_subnets, open_network
from etrain_jupyter.plugins.ec2.node_config import NodeConfig
from etrain_jupyter.plugins.ec2.placement import Offer
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec

AFTER_LIFE_S = 3600.0
"""Time after a node's maximum lifetime from which ``etrain reap`` may remove it, in seconds."""


@dataclass(frozen=True, kw_only=True)
class LaunchContext:
    """AWS resources referenced by launch requests."""

    types: Mapping[str, TypeFacts]
    subnets: Mapping[str, str]
    """Subnet of each zone."""
    network: Network
    template_id: str
    tags: Mapping[str, str]
    boot: BootFacts


def make_offers(
    spec: AwsSpotSpec,
    types: Mapping[str, TypeFacts],
    zones: Mapping[str, Any],
    book: PriceBook,
    scores: Mapping[str, int],
    now: float,
) -> tuple[Offer, ...]:
    """Return an offer for each type and zone."""
    return tuple(
        Offer(
            type=name,
            zone=zone,
            workers=workers_of(spec, facts),
            spot_usd=book.spot_at(name, zone, now),
            on_demand_usd=book.on_demand.get(name),
            score=scores.get(zone, 0),
        )
        for name, facts in types.items()
        for zone in zones
    )


def workers_of(spec: AwsSpotSpec, facts: TypeFacts | None) -> int:
    """Return the number of workers on a machine type."""
    # The machine itself counts its GPUs at boot (`machine.children`); the two counts must agree.
    return spec.workers.per_node or max(1, facts.gpus if facts else 1)


def find_types(clients: Clients, spec: AwsSpotSpec) -> dict[str, TypeFacts]:
    """Return the types that the spec allows.

    Raises:
        PoolError: If the region has none of them.
    """
    capacity = spec.capacity
    try:
        if capacity.gpu is not None:
            found = find_gpu_types(clients.ec2, capacity.gpu)
            what = f"capacity.gpu ({capacity.gpu.count} of {capacity.gpu.memory_gib:g} GiB)"
        else:
            known = describe_types(clients.ec2, capacity.types)
            # Keep the user's order. Leave out types that the region lacks; it is an error only if
            # none remain.
            found = {name: known[name] for name in capacity.types if name in known}
            what = f"capacity.types ({', '.join(capacity.types)})"
    except AwsErrors as exc:
        raise pool_error(f"the types of {spec.region} cannot be listed", exc, NOTHING) from exc
    # Filter before the check for an empty result, so that the error names this key.
    if spec.network.require_nitro_encryption:
        found = {name: facts for name, facts in found.items() if facts.encrypts_traffic}
        what += " with network.require_nitro_encryption"
    if not found:
        raise PoolError(
            f"{spec.region} offers none of {what}. {NOTHING} Set capacity.types to types that "
            "`aws ec2 describe-instance-type-offerings` lists."
        )
    return found


def survey(clients: Clients, spec: AwsSpotSpec) -> tuple[dict[str, TypeFacts], dict[str, str]]:
    """Return types and subnets without creating anything.

    Raises:
        PoolError: If the region has no such types, or the network cannot be used.
    """
    types = find_types(clients, spec)
    try:
        return types, find_subnets(clients.ec2, spec)[1]
    except AwsErrors as exc:
        raise pool_error(f"the network of {spec.region} cannot be read", exc, NOTHING) from exc


def set_up(
    clients: Clients,
    spec: AwsSpotSpec,
    cluster_id: str,
    tls_dir: Path,
    config: NodeConfig,
) -> LaunchContext:
    """Create the resources that do not exist yet; blocks.

    Raises:
        PoolError: If one cannot be created. Those already created carry the cluster's tag.
    """
    types = find_types(clients, spec)
    # The head postpones the expiry while it runs, so the cluster of a dead head expires.
    tags = tags_of(spec, cluster_id, expires_at=time.time() + spec.lifetime.max + AFTER_LIFE_S)
    try:
        with_head = spec.head == "on-demand"
        # The files come first: the template's user-data contains the name of the key folder.
        boot = put_node_files(clients, cluster_id, config, tls_dir, with_head=with_head)
        network = open_network(clients.ec2, spec, cluster_id, tags)
        template = make_template(clients, spec, cluster_id, network, tags, boot)
    except AwsErrors as exc:
        raise pool_error(f"cluster {cluster_id} cannot be set up", exc, NOTHING) from exc
    return LaunchContext(
        types=types,
        subnets=network.subnets,
        network=network,
        template_id=template,
        tags=tags,
        boot=boot,
    )
