"""Create everything that a pool needs in an account: ``%etrain pools init``.

The resources are one CloudFormation stack; see ``stack``. The entry in ``pools.yaml`` is written
last, and the command can be repeated after an interruption at any point.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import boto3
from botocore.exceptions import BotoCoreError, NoCredentialsError

from etrain_jupyter.errors import ConfigError, PoolError
from etrain_jupyter.plugins.ec2.account.cloudformation import label_of, template_of, text_of
from etrain_jupyter.plugins.ec2.account.machines import check_machines
from etrain_jupyter.plugins.ec2.account.options import (
    Ask,
    InitOptions,
    default_bucket,
    lines_of,
    node_name,
    questions,
    values_of,
)
from etrain_jupyter.plugins.ec2.account.pools_file import (
    add_entry,
    differing_keys,
    entry_text,
    has_entry,
)
from etrain_jupyter.plugins.ec2.account.site import (
    POOL_TAG,
    WITHOUT_IAM,
    Dialog,
    Site,
    check_name,
    reason_of,
)
from etrain_jupyter.plugins.ec2.account.stack import Stack, bucket_exists
from etrain_jupyter.plugins.ec2.aws_messages import AwsErrors
from etrain_jupyter.plugins.ec2.client.live_prices import describe_price
from etrain_jupyter.plugins.ec2.ec2_api import Clients
from etrain_jupyter.plugins.ec2.network import find_subnets
from etrain_jupyter.plugins.ec2.spec import KIND, AwsSpotSpec
from etrain_jupyter.pools.catalog import own_file, read_catalog

NOTHING = "Nothing was created."
SIGN_IN = (
    "Sign in with `aws configure` or `aws sso login`, or name a profile of ~/.aws with --profile"
)
GIB_MONTH_USD = 0.023
"""Price of S3 in US dollars per GB-month, in most regions."""


def init(
    name: str,
    options: InitOptions,
    dialog: Dialog,
    *,
    template: Path | None = None,
) -> str:
    """Create the resources of a pool, and its entry in ``pools.yaml``.

    With ``template``, only a CloudFormation template is written, to this file.

    Raises:
        ConfigError: If a value is invalid.
        PoolError: If AWS refuses a request; the message lists the completed steps.
    """
    check_name(name)
    known = read_catalog().get(name)
    # Ask no questions about a pool that pools.yaml already describes.
    is_asked = known is None and not dialog.is_confirmed and not dialog.is_dry_run
    region = str(known.values.get("region") or "") if known is not None else ""
    options = _complete(options, ask=dialog.ask if is_asked else None, region=region)
    file = options.file or own_file()
    site, is_new = open_site(name, options)
    subnets = _find_subnets(site, options)
    _check_machines(site)
    if template is not None:
        return _write_template(site, options, subnets, template)
    stack = Stack(site)
    adds_entry = is_new and not has_entry(file, name)
    try:
        parts, deployed, notes = _examine(site, stack, options, is_new=is_new)
        made = template_of(site, vpc=subnets[0], parts=parts)
        changes = _changes(deployed, made["Resources"]) if parts else []
    except AwsErrors as exc:
        raise PoolError(
            f"the account cannot be examined: {reason_of(exc, WITHOUT_IAM)}. {NOTHING}"
        ) from exc
    verb = "update" if deployed else "create"
    steps = [f"{verb} stack {stack.name}", *changes] if changes else []
    steps += [f"add pool {name} to {file}"] if adds_entry else []
    dialog.show(site, notes, steps)
    if not steps:
        return f"pool {name} is complete. Next: %etrain pools check {name}"
    for line in _describe_costs(site):
        dialog.say(line)
    if refusal := dialog.refusal("create", NOTHING):
        return refusal
    group = options.security_group or site.spec.network.security_group
    try:
        if changes:
            dialog.say(steps[0])
            stack.deploy(made, dialog.say)
        if "group" in parts:
            group = stack.group()
    except AwsErrors as exc:
        why = f"could not {steps[0]}: {reason_of(exc, WITHOUT_IAM)}"
        raise PoolError(f"{why}. Then run `%etrain pools init {name}` again.") from exc
    if adds_entry:
        dialog.say(steps[-1])
        values = values_of(name, options, bucket=site.spec.bucket, region=site.spec.region)
        values.setdefault("network", {})["security_group"] = group
        add_entry(file, name, entry_text(name, lines_of(values)))
    return _next_steps(site, options, file, group, has_roles="roles" in parts)


def _check_machines(site: Site) -> None:
    try:
        check_machines(site.clients, site.spec)
    except AwsErrors as exc:
        raise PoolError(
            f"the machine types cannot be looked up: {reason_of(exc)}. {NOTHING}"
        ) from exc


def _examine(
    site: Site, stack: Stack, options: InitOptions, *, is_new: bool
) -> tuple[set[str], dict[str, Any], list[str]]:
    """Return the parts of the pool that the stack contains, the deployed resources, and remarks."""
    has_bucket = bucket_exists(site)
    group = site.spec.network.security_group
    wanted = set[str]() if has_bucket else {"bucket"}
    if site.spec.iam.instance_profile == node_name(site.name) and not options.role:
        wanted.add("roles")
    if is_new and not options.security_group:
        wanted.add("group")
    # If there is nothing to create, do not query the stack: the credentials may not permit it.
    deployed = stack.resources() if wanted else {}
    if "Bucket" in deployed:
        wanted.add("bucket")
    if not is_new and "Group" in deployed and group == stack.group():
        wanted.add("group")
    notes = (
        []
        if "bucket" in wanted
        else [f"bucket {site.spec.bucket} exists, and is used without changes"]
    )
    return wanted, deployed, notes


def _changes(deployed: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Return a line for each resource that is created, updated or deleted."""
    return [
        *(f"  create {label_of(one)}" for id, one in wanted.items() if id not in deployed),
        *(
            f"  update {label_of(one)}"
            for id, one in wanted.items()
            if id in deployed and one != deployed[id]
        ),
        *(f"  delete {label_of(one)}" for id, one in deployed.items() if id not in wanted),
    ]


# --- the account ---


def _complete(options: InitOptions, *, ask: Ask | None, region: str) -> InitOptions:
    """Return the options with the answers to questions, and the region."""
    try:
        region = options.region or region or ""
        if not region:
            region = boto3.session.Session(profile_name=options.profile).region_name or ""
    except BotoCoreError as exc:
        raise PoolError(f"{reason_of(exc)}. {NOTHING}") from exc
    if ask is not None:
        answers = questions(options, region=region or "us-east-1", ask=ask)
        options = dataclasses.replace(options, **answers)
        region = options.region or region
    if not region:
        raise ConfigError(f"no region is configured. {NOTHING}", hint="add --region us-east-1")
    return dataclasses.replace(options, region=region)


def open_site(name: str, options: InitOptions) -> tuple[Site, bool]:
    """Return the pool's site, and whether the pool is not in ``pools.yaml`` yet.

    Raises:
        ConfigError: If ``pools.yaml`` defines the pool with other values.
        PoolError: If the credentials are missing or not valid.
    """
    region = options.region or ""
    known = read_catalog().get(name)
    # A new pool's spec needs a bucket, whose default name contains the account.
    values = values_of(name, options, bucket=options.bucket or "not-known", region=region)
    spec = known.read_as(AwsSpotSpec) if known and known.kind == KIND else AwsSpotSpec.parse(values)
    clients = Clients(spec)
    try:
        account, _ = clients.caller()
    except NoCredentialsError as exc:
        raise PoolError(f"this machine has no AWS credentials. {NOTHING} {SIGN_IN}.") from exc
    except AwsErrors as exc:
        raise PoolError(f"{reason_of(exc)}. {NOTHING}") from exc
    if known is not None:
        if known.kind != KIND:
            raise ConfigError(
                f"{known.file} defines pool '{name}' with kind {known.kind}. {NOTHING}",
                hint="choose another name",
            )
        given = _given_keys(name, options)
        if other := differing_keys(dict(known.values), given):
            raise ConfigError(
                f"{known.file} defines pool '{name}' with another {' and '.join(other)}. {NOTHING}",
                hint=f"change the file and run `%etrain pools init {name}` without these flags, "
                "or choose another name",
            )
        return Site(name=name, spec=spec, clients=clients, account=account), False
    bucket = options.bucket or default_bucket(name, account, region)
    spec = AwsSpotSpec.parse({**values, "bucket": bucket})
    return Site(name=name, spec=spec, clients=Clients(spec), account=account), True


def _given_keys(name: str, options: InitOptions) -> dict[str, Any]:
    """Return the keys of the entry that the flags set."""
    all_values = values_of(name, options, bucket=options.bucket or "", region=options.region or "")
    stated: dict[str, Any] = {
        "region": options.region,
        "bucket": options.bucket,
        "profile": options.profile,
        "workers": options.workers,
        "capacity": options.types,
        "budget": options.budget,
        "head": options.head,
        "network": options.subnets or options.security_group,
        "iam": options.role,
        "image": options.ami or options.python,
    }
    return {key: all_values[key] for key, given in stated.items() if given and key in all_values}


def _find_subnets(site: Site, options: InitOptions) -> tuple[str, tuple[str, ...]]:
    """Return the VPC and the subnets.

    Raises:
        PoolError: If the region lacks a default VPC, and no subnet was named.
    """
    try:
        if site.spec.network.subnets == "auto":
            filters = [{"Name": "default-for-az", "Values": ["true"]}]
            if not site.clients.ec2.describe_subnets(Filters=filters)["Subnets"]:
                raise _no_default_vpc(site)
        vpc, subnets = find_subnets(site.clients.ec2, site.spec)
    except AwsErrors as exc:
        raise PoolError(
            f"the subnets of {site.spec.region} cannot be used: {reason_of(exc)}. {NOTHING}"
        ) from exc
    return vpc, tuple(options.subnets) and tuple(sorted(subnets.values()))


def _no_default_vpc(site: Site) -> PoolError:
    region = site.spec.region
    known = site.clients.ec2.describe_subnets()["Subnets"]
    if not known:
        return PoolError(
            f"{region} has no default VPC, and no subnets at all. {NOTHING} Run `aws ec2 "
            f"create-default-vpc --region {region}`, or choose another --region."
        )
    shown = "; ".join(
        f"{one['SubnetId']} in {one['AvailabilityZone']}, {one['VpcId']} ({one['CidrBlock']})"
        for one in known[:10]
    )
    return PoolError(
        f"{region} has no default VPC. {NOTHING} Name subnets of one VPC, which need a route to "
        f"S3: --subnet {known[0]['SubnetId']}. Subnets: {shown}."
    )


# --- texts ---


def _describe_costs(site: Site) -> list[str]:
    """Return what the resources cost, and the maximum that machines can cost later."""
    try:
        machines = describe_price(site.clients, site.spec, site.spec.workers.max)
    except (PoolError, *AwsErrors) as exc:
        machines = f"unknown ({reason_of(exc) if isinstance(exc, AwsErrors) else exc})"
    return [
        "costs:",
        f"  bucket: ${GIB_MONTH_USD} per GB and month; roles, policies and security group: free",
        f"  machines, only while jobs run: {machines}",
    ]


def _next_steps(
    site: Site, options: InitOptions, file: Path, group: str, *, has_roles: bool
) -> str:
    lines = [f"pool {site.name} is in {file}"]
    if has_roles:
        arn = f"arn:aws:iam::{site.account}:policy/{site.launcher_policy}"
        lines.append(
            f"users without administrator rights need {site.launcher_policy} (and -2, if the stack "
            f"has it): aws iam attach-user-policy --user-name USER --policy-arn {arn}"
        )
    if site.spec.head == "notebook":
        lines.append(
            f"the notebook's machine must be an EC2 instance in the security group {group}; for "
            "any other machine, use --head on-demand"
        )
    lines.append(f"next: %etrain pools check {site.name}")
    return "\n".join(lines)


def _write_template(
    site: Site, options: InitOptions, subnets: tuple[str, tuple[str, ...]], file: Path
) -> str:
    text = text_of(template_of(site, vpc=subnets[0], subnets=subnets[1]))
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as exc:
        raise ConfigError(
            f"{file} cannot be written ({exc}). {NOTHING}", hint="--template FILE"
        ) from exc
    stack = site.stack_name
    return (
        f"{file} contains the resources of pool {site.name}. {NOTHING} An administrator deploys "
        f"it with:\n  aws cloudformation deploy --region {site.spec.region} --stack-name {stack} "
        f"--template-file {file} --capabilities CAPABILITY_NAMED_IAM "
        f"--tags {POOL_TAG}={site.mark}\n"
        f"The stack's output Command then writes the entry in {options.file or own_file()}:\n"
        f"  aws cloudformation describe-stacks --region {site.spec.region} --stack-name {stack} "
        "--query 'Stacks[0].Outputs'"
    )
