"""The clusters in the user's account, found by their tags from any machine, and their policies.

The module is imported for the help of its sub-commands, so it imports boto3 only in functions.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from etrain_jupyter.errors import ConfigError, PoolError
from etrain_jupyter.plugins.ec2.spec import KIND, AwsSpotSpec
from etrain_jupyter.pools.base import Leftovers
from etrain_jupyter.pools.catalog import files, read_catalog
from etrain_jupyter.pools.clusters import report_ended
from etrain_jupyter.process.cluster_dir import cluster_dirs

if TYPE_CHECKING:
    from etrain_jupyter.plugins.ec2.reaping import Tagged


def find_machines(region: str | None = None) -> str:
    """Return all EC2 resources of etrain clusters, one per line with age and price."""
    specs = aws_specs(region)
    if not specs:
        return "No pool of kind aws-spot is configured. Use --region NAME to search a region."
    lines = []
    for spec in specs:
        try:
            found = _find(spec)
        except PoolError as exc:
            lines.append(f"{spec.region}: {exc}")
            continue
        lines += [_line_of(resource) for resource in found]
        if not found:
            lines.append(f"{spec.region}: nothing")
    return "\n".join(lines)


def _find(spec: AwsSpotSpec) -> list[Tagged]:
    from etrain_jupyter.plugins.ec2.ec2_api import Clients
    from etrain_jupyter.plugins.ec2.reaping import find_tagged

    return find_tagged(Clients(spec), spec.region)


def _line_of(tagged: Tagged) -> str:
    # Security groups have no creation time.
    age_h = (time.time() - tagged.since) / 3600 if tagged.since else 0.0
    price = "" if tagged.usd_per_h is None else f", ${tagged.usd_per_h:.4g}/h"
    facts = "".join(f" {fact}" for fact in (tagged.type, tagged.lifecycle, tagged.state) if fact)
    expired = ", has expired" if tagged.is_expired else ""
    age = f", {age_h:.1f} h old" if tagged.since else ""
    name = f"{tagged.region}  {tagged.cluster_id}  {tagged.kind} {tagged.id}"
    return f"{name}{facts}{age}{price}{expired}"


def aws_specs(region: str | None = None) -> list[AwsSpotSpec]:
    """Return one spec per region and profile, from ``pools.yaml`` and running clusters."""
    found: dict[tuple[str, str | None, str | None], AwsSpotSpec] = {}
    for entry in read_catalog().values():
        if entry.kind == KIND:
            spec = entry.read_as(AwsSpotSpec)
            found.setdefault((spec.region, spec.profile, spec.endpoint_url), spec)
    # The pools.yaml of a running cluster may have been changed or removed since the cluster was
    # started.
    for cluster in cluster_dirs():
        if cluster.cluster_id.startswith("aws-"):
            spec = AwsSpotSpec.model_validate(cluster.settings().spec)
            found.setdefault((spec.region, spec.profile, spec.endpoint_url), spec)
    if region and all(known[0] != region for known in found):
        # The spec requires a bucket name, so use a placeholder: the actual bucket is in each
        # cluster's tags.
        found[region, None, None] = AwsSpotSpec(region=region, bucket="not-known")
    return list(found.values())


def reap(
    cluster: str | None = None,
    *,
    all_clusters: bool = False,
    region: str | None = None,
    timeout_s: float = 120.0,
) -> str:
    """Remove EC2 resources of one cluster, of expired clusters, or of all clusters.

    Args:
        cluster: Cluster id; None for all expired clusters.
        all_clusters: Include clusters that have not expired. Their users lose their machines.
        region: Region to search in addition to those of ``pools.yaml``.
        timeout_s: Timeout per cluster.

    Returns:
        One line per removed cluster, and the ids of the clusters that were kept.

    Raises:
        ConfigError: If no region is configured.
        PoolError: If resources remain, or if AWS does not respond.
    """
    from etrain_jupyter.plugins.ec2.reaping import by_cluster, remove_found, should_remove

    specs = aws_specs(region)
    if not specs:
        raise ConfigError(
            "no pool of kind aws-spot is configured, so no region is known. Nothing was removed",
            hint="run reap in the folder of a pools.yaml, or name a region: --region us-east-1",
        )
    leftovers: dict[str, Leftovers] = {}
    kept: set[str] = set()
    for spec in specs:
        # Two specs may use the same region with different credentials; each sees its own account.
        for cluster_id, own in by_cluster(_find(spec)).items():
            if should_remove(own, cluster_id=cluster or "", all_clusters=all_clusters):
                leftovers[cluster_id] = remove_found(spec, own, timeout_s=timeout_s)
            else:
                kept.add(cluster_id)
    # A cluster id that does not exist is an error: a typo must not look like success.
    if cluster is not None and not leftovers:
        known = ", ".join(sorted(kept)) or "none"
        raise PoolError(
            f"cluster {cluster!r} has no resources on EC2. Nothing was removed. "
            f"Clusters on EC2: {known}."
        )
    report = report_ended(leftovers, "Nothing on EC2 has expired.")
    if kept and cluster is None:
        report += f"\nkept, not expired: {', '.join(sorted(kept))} (--all removes them too)"
    return report


def policies(name: str | None = None) -> str:
    """Return the IAM policies that a pool needs, as JSON documents with headings.

    Args:
        name: Pool name; may be omitted if there is only one pool of kind aws-spot.

    Raises:
        ConfigError: If there is no pool of kind aws-spot with this name.
    """
    from etrain_jupyter.plugins.ec2.client import policy

    entries = {e.name: e for e in read_catalog().values() if e.kind == KIND}
    if name is None and len(entries) == 1:
        [name] = entries
    if name not in entries:
        known = ", ".join(entries) or f"none in {' or '.join(map(str, files()))}"
        raise ConfigError(
            "no pool name was given" if name is None else f"no pool '{name}' has the kind {KIND}",
            hint=f"write pools policy NAME, with one of these names: {known}",
        )
    spec = entries[name].read_as(AwsSpotSpec)
    parts = {
        "For your user, or the role of the machine that starts clusters": policy.launcher_policy(
            spec, head_role=spec.iam.head_profile if spec.head == "on-demand" else ""
        ),
        f"For the role of instance profile {spec.iam.instance_profile}": policy.node_policy(spec),
        "Trust policy of that role": policy.trust_policy(),
    }
    if spec.head == "on-demand":
        title = f"For the role of instance profile {spec.iam.head_profile}, of an on-demand head"
        parts[title] = policy.head_policy(spec)
    return "\n\n".join(f"# {title}\n{json.dumps(part, indent=2)}" for title, part in parts.items())
