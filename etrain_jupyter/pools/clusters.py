"""All clusters at a glance, and their end: ``%etrain pools``, ``down``, ``reap``."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from etrain_jupyter.errors import ConfigError, PoolError
from etrain_jupyter.pools.base import Leftovers, Pool
from etrain_jupyter.pools.catalog import PoolEntry, files, read_catalog
from etrain_jupyter.pools.local.pool import LocalPool, find_remains, load_in_words
from etrain_jupyter.pools.registry import get_pool, pool_names
from etrain_jupyter.pools.rpc import ask
from etrain_jupyter.process.cluster_dir import ClusterDir, ClusterRecord, cluster_dirs
from etrain_jupyter.wire.requests import DescribeCluster, ListCosts, ListNodes

if TYPE_CHECKING:
    from etrain_jupyter.pools.ec2.reaping import Tagged
    from etrain_jupyter.pools.ec2.spec import AwsSpotSpec

AWS = "aws-spot"
AWS_DOWN_S = 240.0
"""Machines take a minute or two to end, and only then lets EC2 their security group go."""


def describe_pools() -> str:
    """Return the pools and their living clusters, for `%etrain pools`."""
    pools = {"local": "processes on this machine"}
    for entry in read_catalog().values():
        pools[entry.name] = f"{entry.kind}{_place_of(entry)} ({entry.file})"
    clusters: dict[str, list[str]] = {}
    for cluster in cluster_dirs():
        record = cluster.record()
        if record is None:
            continue  # it starts or ends
        if record.is_alive:
            words = f"at {record.address}: {_state_of(cluster, record)}"
        elif record.is_here and cluster.cluster_id.startswith("aws-"):
            words = "its head has died: the pool's next job takes it over, %etrain down ends it"
        else:
            continue
        clusters.setdefault(cluster.settings().pool, []).append(f"  {cluster.cluster_id} {words}")
    lines = []
    for name in [*pools, *(name for name in clusters if name not in pools)]:
        lines.append(f"{name}: {pools.get(name, 'its pools.yaml is in another folder')}")
        lines += clusters.get(name, ["  no cluster is up"])
    if len(pools) == 1:
        lines.append(f"other pools have names in {' or '.join(map(str, files()))}")
    return "\n".join(lines)


def _state_of(cluster: ClusterDir, record: ClusterRecord) -> str:
    """Return how many workers and jobs a cluster has, and its money where it costs any."""
    address = cluster.address(record)
    try:
        state = load_in_words(ask(address, DescribeCluster(), timeout_s=3.0))
        costs = ask(address, ListCosts(), timeout_s=3.0).costs
        nodes = ask(address, ListNodes(), timeout_s=3.0).nodes
    except PoolError as exc:
        return str(exc)
    if not costs:
        return state
    rate = sum(node.get("price_usd_per_h", 0.0) for node in nodes)
    spent = sum(cost["spent_usd"] for cost in costs)
    return f"{state}; {len(nodes)} on EC2 for ${rate:.3g} an hour, ${spent:.3g} spent"


def _place_of(entry: PoolEntry) -> str:
    """Return where a pool is, as far as its entry says so without being checked."""
    place = entry.values.get("address") or entry.values.get("region")
    return f", {place}" if isinstance(place, str) else ""


def down(cluster: str | None = None, *, timeout_s: float = 10.0) -> str:
    """End one cluster whose head is here, or all of this user's; say what was done.

    Args:
        cluster: Its id, or the name of a pool for all of that one's; on an existing Dask scheduler
            only what is ours ends. None for all clusters, with what dead ones left.
        timeout_s: For the processes of each; machines of EC2 get two minutes.

    Raises:
        PoolError: If there is no cluster of that id, or something is left.
    """
    if cluster is not None and ("://" in cluster or cluster in pool_names()):
        return _told({cluster: get_pool(cluster).down(timeout_s=max(AWS_DOWN_S, timeout_s))}, "")
    ids = find_remains()
    if cluster is not None and cluster not in ids:
        raise PoolError(
            f"no cluster {cluster!r} is up. Nothing was ended. Up are: {', '.join(ids) or 'none'}. "
            "`%etrain reap` ends what is left on EC2 of clusters of other machines."
        )
    here = {found.cluster_id: found for found in cluster_dirs()}
    ends: dict[str, Leftovers] = {}
    for one in ids if cluster is None else [cluster]:
        pool = _pool_of(here[one])
        is_local = isinstance(pool, LocalPool)
        ends[one] = pool.down(timeout_s=timeout_s if is_local else max(AWS_DOWN_S, timeout_s))
    return _told(ends, "No cluster is up.")


def _pool_of(cluster: ClusterDir) -> Pool:
    if cluster.cluster_id.startswith("local-"):
        return LocalPool(cluster_id=cluster.cluster_id)
    from etrain_jupyter.pools.ec2.client.pool import AwsSpotPool

    return AwsSpotPool.of_cluster(cluster)


def _told(ends: dict[str, Leftovers], nothing: str) -> str:
    """Return what has ended.

    Raises:
        PoolError: If something is left.
    """
    left = {one: end for one, end in ends.items() if end}
    if left:
        raise PoolError(
            "there is still something left of "
            + "; ".join(f"{one}: {end}" for one, end in left.items())
            + ". Everything else was ended. Try again; then end the processes by hand, or what is "
            "on EC2 in its console."
        )
    return "\n".join(f"{one} has ended" for one in ends) or nothing


# --- EC2, by its tags: from any machine ---


def describe_aws(*, region: str | None = None) -> str:
    """Return what there is on EC2 of our clusters: each thing with its age and price.

    Args:
        region: Look there too, besides the regions of ``pools.yaml``.
    """
    specs = aws_specs(region)
    if not specs:
        return "No pool of kind aws-spot is configured; --region NAME looks in a region."
    lines = []
    for spec in specs:
        try:
            found = _find(spec)
        except PoolError as exc:
            lines.append(f"{spec.region}: {exc}")
            continue
        lines += [_line_of(one) for one in found]
        if not found:
            lines.append(f"{spec.region}: nothing")
    return "\n".join(lines)


def _find(spec: AwsSpotSpec) -> list[Tagged]:
    from etrain_jupyter.pools.ec2.ec2_api import Clients
    from etrain_jupyter.pools.ec2.reaping import find_tagged

    return find_tagged(Clients(spec), spec.region)


def _line_of(one: Tagged) -> str:
    age_h = (time.time() - one.since) / 3600 if one.since else 0.0
    price = "" if one.usd_per_h is None else f", ${one.usd_per_h:.4g}/h"
    facts = " ".join(word for word in (one.type, one.lifecycle, one.state) if word)
    late = ", has expired" if one.is_expired else ""
    age = f", {age_h:.1f} h old" if one.since else ""
    words = f" {facts}" if facts else ""
    return f"{one.region}  {one.cluster_id}  {one.kind} {one.id}{words}{age}{price}{late}"


def reap(
    cluster: str | None = None,
    *,
    all_clusters: bool = False,
    region: str | None = None,
    timeout_s: float = 120.0,
) -> str:
    """Remove what is left on EC2 of clusters: one, those that have expired, or all; say what.

    Args:
        cluster: Its id.
        all_clusters: Those too that have not expired: whoever uses them loses their machines.
        region: Look there too, besides the regions of ``pools.yaml``.
        timeout_s: For each cluster.

    Raises:
        ConfigError: If nobody has said where to look.
        PoolError: If something is left, or AWS cannot be asked.
    """
    from etrain_jupyter.pools.ec2.reaping import by_cluster, is_meant, remove_found

    specs = aws_specs(region)
    if not specs:
        raise ConfigError(
            "no pool of kind aws-spot is configured, so nobody knows where to look",
            hint="reap --region us-east-1, in the folder of a pools.yaml or anywhere",
        )
    ends: dict[str, Leftovers] = {}
    spared: set[str] = set()
    for spec in specs:
        for one, own in by_cluster(_find(spec)).items():
            if is_meant(own, cluster_id=cluster or "", all_clusters=all_clusters):
                ends[one] = remove_found(spec, own, timeout_s=timeout_s)
            else:
                spared.add(one)
    if cluster is not None and not ends:
        known = ", ".join(sorted(spared)) or "none"
        raise PoolError(f"nothing on EC2 belongs to a cluster {cluster!r}; there are: {known}")
    told = _told(ends, "Nothing on EC2 has expired.")
    if spared and cluster is None:
        told += f"\nleft alone, as not expired: {', '.join(sorted(spared))} (--all takes them too)"
    return told


def aws_specs(region: str | None = None) -> list[AwsSpotSpec]:
    """Return what to look with, one for each region and profile of ``pools.yaml``.

    Args:
        region: One more, with the credentials of the environment.
    """
    from etrain_jupyter.pools.ec2.spec import AwsSpotSpec

    found: dict[tuple[str, str | None, str | None], AwsSpotSpec] = {}
    for entry in read_catalog().values():
        if entry.kind == AWS:
            spec = entry.read_as(AwsSpotSpec)
            found.setdefault((spec.region, spec.profile, spec.endpoint_url), spec)
    for cluster in cluster_dirs():
        if cluster.cluster_id.startswith("aws-"):
            spec = AwsSpotSpec.model_validate(cluster.settings().spec)
            found.setdefault((spec.region, spec.profile, spec.endpoint_url), spec)
    if region and all(known[0] != region for known in found):
        found[region, None, None] = AwsSpotSpec(region=region, bucket="not-known")
    return list(found.values())


def policies(name: str | None = None) -> str:
    """Return the IAM policies that a pool needs, as JSON with a heading each.

    Raises:
        ConfigError: If there is no such pool of kind aws-spot.
    """
    from etrain_jupyter.pools.ec2.client import policy
    from etrain_jupyter.pools.ec2.spec import AwsSpotSpec

    entries = {e.name: e for e in read_catalog().values() if e.kind == AWS}
    if name is None and len(entries) == 1:
        [name] = entries
    if name not in entries:
        known = ", ".join(entries) or f"none in {' or '.join(map(str, files()))}"
        raise ConfigError(
            "policies of which pool?" if name is None else f"no pool '{name}' is of kind {AWS}",
            hint=f"pools policy NAME; there are: {known}",
        )
    spec = entries[name].read_as(AwsSpotSpec)
    parts = {
        "For you, or the role of the machine that starts clusters": policy.launcher_policy(
            spec, head_role=spec.iam.head_profile if spec.head == "on-demand" else ""
        ),
        f"For the role of instance profile {spec.iam.instance_profile}": policy.node_policy(spec),
        "Who may take that role (its trust policy)": policy.trust_policy(),
    }
    if spec.head == "on-demand":
        title = f"For the role of instance profile {spec.iam.head_profile}, an on-demand head's"
        parts[title] = policy.head_policy(spec)
    return "\n\n".join(f"# {title}\n{json.dumps(part, indent=2)}" for title, part in parts.items())


def bring_up(name: str, *, num_workers: int | None = None) -> str:
    """Bring a pool up before a job needs it; say where it is."""
    pool = get_pool(name)
    address = pool.up()
    if num_workers is not None:
        pool.want(num_workers, reason="asked for by hand")
    held = "" if num_workers is None else f", {num_workers} workers asked for"
    return f"{address.cluster_id} is up at {address.address}{held}"
