"""The sub-commands ``reap``, and ``pools init``, ``check``, ``remove`` and ``policy``.

Also finds the clusters in the user's account by their tags, from any machine.

boto3 is imported only when one of them runs.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from etrain_jupyter.errors import ConfigError, EtrainError, PoolError
from etrain_jupyter.notebook.commands.arguments import Spelling, StoreCount, one_of
from etrain_jupyter.notebook.commands.subcommands import Surface
from etrain_jupyter.plugins.ec2.spec import KIND, AwsSpotSpec
from etrain_jupyter.pools.base import Leftovers
from etrain_jupyter.pools.catalog import files, read_catalog
from etrain_jupyter.pools.clusters import report_ended
from etrain_jupyter.process.cluster_dir import cluster_dirs

if TYPE_CHECKING:
    from etrain_jupyter.plugins.ec2.account.site import Dialog
    from etrain_jupyter.plugins.ec2.reaping import Tagged

WORDS = {
    "action": ("check", "init", "policy", "remove"),
    "head": ("notebook", "on-demand"),
}
"""Accepted words by the name of the argument, for completion."""

Word = Annotated[str | None, Spelling(metavar="NAME")]
Words = Annotated[str | None, Spelling(metavar="A,B")]
Region = Annotated[str | None, Spelling(metavar="REGION")]
File = Annotated[str | None, Spelling(metavar="FILE")]


def init(
    surface: Surface,
    pool: str,
    *,
    region: Region = None,
    types: Words = None,
    workers: Annotated[int | None, Spelling(metavar="N", action=StoreCount)] = None,
    budget: Annotated[float | None, Spelling(metavar="USD")] = None,
    bucket: Word = None,
    subnet: Words = None,
    security_group: Annotated[str | None, Spelling(metavar="GROUP")] = None,
    role: Annotated[str | None, Spelling(metavar="PROFILE")] = None,
    head: Annotated[str | None, Spelling(metavar="WHERE")] = None,
    ami: Word = None,
    python: Annotated[str | None, Spelling(metavar="PATH")] = None,
    profile: Word = None,
    file: File = None,
    yes: bool = False,
    dry_run: bool = False,
    template: File = None,
) -> str:
    """Create what a pool needs in your AWS account, and its entry in pools.yaml.

    Asks for what the flags do not say, and shows every step and the costs first. The resources are
    one CloudFormation stack. Repeat the command after an interruption: it continues.

    Args:
        pool: Name of the new pool.
        region: AWS region (that of your profile).
        types: Machine types with commas (g5.xlarge,g6.xlarge,g4dn.xlarge).
        workers: Most workers at a time (4).
        budget: Most US dollars per cluster (20).
        bucket: Bucket to create, or one of yours (a name made of pool, account and region).
        subnet: Subnets with commas (those of the default VPC).
        security_group: Use this security group instead of creating one.
        role: Use this instance profile for the nodes, and create no roles and policies.
        head: Where the scheduler runs: notebook (default) or on-demand, for its own machine.
        ami: Image of the nodes, ami-... or ssm:/... (AWS's Deep Learning AMI).
        python: Interpreter in that image, with etrain-jupyter (the nodes install the kernel's
            environment).
        profile: Profile in ~/.aws.
        file: Write the entry to this file (~/.config/etrain/pools.yaml).
        yes: Ask nothing.
        dry_run: Show the steps and the costs only.
        template: Create nothing, and write a CloudFormation template for an administrator.

    Example:
        pools init spot --region us-east-1 --types g5.xlarge,g6.xlarge --budget 20
    """
    _need_boto3()
    from etrain_jupyter.plugins.ec2.account.init import init as run_init
    from etrain_jupyter.plugins.ec2.account.options import InitOptions, split_words

    options = InitOptions(
        region=region,
        types=split_words(types),
        workers=workers,
        budget=_positive(budget),
        bucket=bucket,
        subnets=split_words(subnet),
        security_group=security_group,
        role=role,
        head=None if head is None else one_of("--head", head, ("notebook", "on-demand")),
        ami=ami,
        python=python,
        profile=profile,
        file=None if file is None else Path(file).expanduser().absolute(),
    )
    return run_init(
        pool,
        options,
        _dialog(surface, yes=yes or template is not None, dry_run=dry_run),
        template=None if template is None else Path(template).expanduser(),
    )


def remove(
    surface: Surface,
    pool: str,
    *,
    region: Region = None,
    bucket: Word = None,
    profile: Word = None,
    delete_objects: bool = False,
    yes: bool = False,
    dry_run: bool = False,
) -> str:
    """Remove from your AWS account what pools init has created, and the entry in pools.yaml.

    Args:
        pool: Name of the pool.
        region: Its region, if no pools.yaml defines the pool any more.
        bucket: Its bucket, if no pools.yaml defines the pool any more and the bucket has a name of
            yours.
        profile: Profile in ~/.aws, if no pools.yaml defines the pool any more.
        delete_objects: Also delete a bucket that contains objects, with all checkpoints in it.
        yes: Ask nothing.
        dry_run: Show the steps only.

    Example:
        pools remove spot --dry-run
    """
    _need_boto3()
    from etrain_jupyter.plugins.ec2.account.options import InitOptions
    from etrain_jupyter.plugins.ec2.account.removal import remove_pool

    return remove_pool(
        pool,
        InitOptions(region=region, bucket=bucket, profile=profile),
        _dialog(surface, yes=yes, dry_run=dry_run),
        deletes_objects=delete_objects,
    )


def check(surface: Surface, pool: str, *, no_boot: bool = False) -> str:
    """Prove that a pool works: train one step on one node.

    Args:
        pool: Name of the pool.
        no_boot: Launch nothing, and look up only credentials, types, image, network and quotas.

    Example:
        pools check spot --no-boot
    """
    _need_boto3()
    from etrain_jupyter.plugins.ec2.account.check import check_pool

    return check_pool(surface, pool, _spec_of(pool), boots=not no_boot)


def reap(
    surface: Surface, cluster: str | None = None, *, all: bool = False, region: str | None = None
) -> str:
    """Remove leftover resources of dead clusters on EC2, found by their tags.

    Args:
        cluster: Id of a cluster; by default all clusters that have expired.
        all: Also clusters that have not expired; their users lose the machines.

    Example:
        reap --all
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
            if should_remove(own, cluster_id=cluster or "", all_clusters=all):
                leftovers[cluster_id] = remove_found(spec, own)
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


def policy(surface: Surface, pool: str | None = None) -> str:
    """Print the IAM policies that a pool needs.

    Args:
        pool: Name of the pool; by default the only one of kind aws-spot.

    Example:
        pools policy spot
    """
    from etrain_jupyter.plugins.ec2.client import policy as policies

    entries = {e.name: e for e in read_catalog().values() if e.kind == KIND}
    if pool is None and len(entries) == 1:
        [pool] = entries
    if pool not in entries:
        known = ", ".join(entries) or f"none in {' or '.join(map(str, files()))}"
        raise ConfigError(
            "no pool name was given" if pool is None else f"no pool '{pool}' has the kind {KIND}",
            hint=f"write pools policy NAME, with one of these names: {known}",
        )
    spec = entries[pool].read_as(AwsSpotSpec)
    parts = {
        "For your user, or the role of the machine that starts clusters": policies.launcher_policy(
            spec, head_role=spec.iam.head_profile if spec.head == "on-demand" else ""
        ),
        f"For the role of instance profile {spec.iam.instance_profile}": policies.node_policy(spec),
        "Trust policy of that role": policies.trust_policy(),
    }
    if spec.head == "on-demand":
        title = f"For the role of instance profile {spec.iam.head_profile}, of an on-demand head"
        parts[title] = policies.head_policy(spec)
    return "\n\n".join(f"# {title}\n{json.dumps(part, indent=2)}" for title, part in parts.items())


# --- clusters in the user's account ---


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


# --- small helpers ---


def _spec_of(name: str) -> AwsSpotSpec:
    catalog = read_catalog()
    entry = catalog.get(name)
    if entry is None or entry.kind != KIND:
        known = [one.name for one in catalog.values() if one.kind == KIND]
        raise ConfigError(
            f"no pool '{name}' of kind {KIND} is defined. Nothing was checked",
            hint=f"pools init {name} creates it"
            + (f"; defined pools: {', '.join(known)}" if known else ""),
        )
    return entry.read_as(AwsSpotSpec)


def _dialog(surface: Surface, *, yes: bool, dry_run: bool) -> Dialog:
    from etrain_jupyter.plugins.ec2.account.site import Dialog

    return Dialog(ask=_ask, say=surface.say, is_confirmed=yes, is_dry_run=dry_run)


def _ask(question: str) -> str:
    """Ask a question in the terminal or below the cell.

    Raises:
        ConfigError: If no user can answer, such as in a script.
    """
    try:
        return input(question)
    except (EOFError, RuntimeError) as exc:
        # A terminal without input raises EOFError. A kernel without input raises
        # StdinNotImplementedError, which is a RuntimeError.
        raise ConfigError(
            f"'{question.strip()}' cannot be answered here. Nothing was changed",
            hint="add --yes, and flags for the values: %etrain pools init --help",
        ) from exc


def _positive(budget: float | None) -> float | None:
    if budget is not None and not 0 < budget < 1e9:
        raise ConfigError(
            f"--budget {budget:g}: this must be a number of US dollars above 0",
            hint="write for example --budget 20",
        )
    return budget


def _need_boto3() -> None:
    try:
        import etrain_jupyter.plugins.ec2.ec2_api  # noqa: F401
    except ModuleNotFoundError as exc:
        raise EtrainError(
            f"pools on AWS need boto3 ({exc}). Nothing was done. Run %pip install "
            "'etrain-jupyter[aws]', and restart the kernel."
        ) from exc
