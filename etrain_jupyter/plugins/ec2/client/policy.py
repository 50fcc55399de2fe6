"""IAM policies of a pool's roles, with the minimum permissions.

There are three roles. The *launcher* runs ``%etrain`` and, with ``head: notebook``, the scheduler.
The *head* is the role of an on-demand head: it launches nodes but creates no launch templates,
security groups or roles. A *node* reads its own cluster's files, reports its state, and writes
checkpoints.

``policies.json`` contains the statements. In it, ``<name>`` stands for a value or a list:

- a string in a list is repeated for each element of a list value;
- an entry, statement or condition whose value is empty is left out.

For a launch, IAM checks the permission for each resource that the launch creates or uses, and all
of them must be allowed: see "Actions, resources, and condition keys for Amazon EC2". A machine must
use one of our launch templates and a type in the spec. It must have our tags, including the time
from which ``etrain reap`` may remove it, and require session tokens for its metadata service.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from etrain_jupyter.plugins.ec2.bootstrap import KEYS
from etrain_jupyter.plugins.ec2.environment.wheels import FOLDER as ENVIRONMENTS
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec

Policy = dict[str, Any]
Values = Mapping[str, str | Sequence[str]]

_PARTS = ("checkpoints", "manifests")
"""Folders of a job that trainers write to. The launcher and the head write the job's record, bundle
and log."""
_NAME = re.compile(r"<(\w+)>")


def launcher_policy(
    spec: AwsSpotSpec,
    *,
    node_role: str = "",
    account: str = "*",
    head_role: str = "",
) -> Policy:
    """Return the policy of the user or role that starts clusters.

    ``node_role`` is the role in ``iam.instance_profile``, by default the one with the profile's
    name; ``account`` is a number, or ``*`` for the caller's own.
    """
    # The launcher passes these roles to machines, which requires iam:PassRole for exactly these
    # roles.
    roles = [node_role or spec.iam.instance_profile, *([head_role] if head_role else [])]
    values = _values(spec, account, roles, types=[spec.head_type] if head_role else [])
    groups = ["machines", "frame", "spot"]
    groups += ["sessions"] if spec.head_tunnel == "ssm" else []
    return _policy([*groups, "prefix", "list_prefix", "list_uploads"], values)


def head_policy(spec: AwsSpotSpec, *, node_role: str = "", account: str = "*") -> Policy:
    """Return the policy of an on-demand head's role.

    It launches nodes, from the launcher's template and security group, and terminates them. In the
    bucket, it writes its cluster's files and the logs of jobs. It may not write their records and
    bundles, because notebooks execute those.
    """
    values = _values(spec, account, [node_role or spec.iam.instance_profile])
    return _policy(["machines", "head_files", "list_prefix"], values)


def node_policy(
    spec: AwsSpotSpec, *, cluster_id: str = "*", checkpoints: Sequence[str] = ()
) -> Policy:
    """Return the policy of the nodes' role.

    Nodes run code from a notebook, so they must not be able to write anything that a notebook or
    another cluster would run. They cannot write keys, configurations, or the record, bundle or log
    of a job. Only the cluster's own nodes know the name of the folder with its keys; see
    ``bootstrap``.

    Args:
        spec: The pool.
        cluster_id: Limits the role to one cluster; ``*`` for all clusters below the prefix.
        checkpoints: Folders of ``checkpoint.to`` as ``bucket/prefix``; by default ``runs/`` below
            the pool's prefix.
    """
    places = [place.strip("/") for place in checkpoints] or [f"{spec.bucket}/{spec.prefix}runs"]
    archive = (spec.image.archive or "").removeprefix("s3://")
    values: Values = {
        "home": f"arn:aws:s3:::{spec.bucket}/{spec.prefix}clusters/{cluster_id}",
        "keys": KEYS,
        "places": places,
        "parts": _PARTS,
        "upload_buckets": sorted({_bucket_arn(place) for place in places}),
        "archive": [archive] if archive else [],
        "environments": [f"arn:aws:s3:::{spec.bucket}/{spec.prefix}{ENVIRONMENTS}"]
        if spec.image.is_kernel
        else [],
    }
    statements = list(_statements("node", values))
    for number, place in enumerate(places):
        # One statement for each place: s3:prefix is a condition on a bucket, not on objects.
        prefix = place.partition("/")[2]
        own = {"number": str(number or ""), "below": f"{prefix}/" if prefix else ""}
        bucket = {"bucket": _bucket_arn(place)}
        statements += _statements("list_checkpoints", {**values, **own, **bucket})
    # These have no s3:prefix condition, because AWS does not support it for this action.
    statements += _statements("list_uploads", values)
    statements += _statements("archive", values)
    return _document(statements)


def trust_policy() -> Policy:
    """Return the trust policy of nodes and heads: EC2 machines may assume the role."""
    return _policy(["trust"], {})


def _values(
    spec: AwsSpotSpec, account: str, roles: Sequence[str], *, types: Sequence[str] = ()
) -> dict[str, str | Sequence[str]]:
    """Return the values for the statements about machines and the bucket."""
    ami = spec.image.ami
    parameter = ami.removeprefix("ssm:") if ami.startswith("ssm:") else ""
    is_auto = spec.network.security_group == "auto"
    kinds = ["launch-template", *(["security-group"] if is_auto else [])]
    capacity, subnets = spec.capacity, spec.network.subnets
    # The head's machine may have a type that nodes do not have.
    names = [*capacity.types, *(one for one in types if one not in capacity.types)]
    return {
        "region": spec.region,
        "account": account,
        "any": f"arn:aws:ec2:{spec.region}",
        "own": f"arn:aws:ec2:{spec.region}:{account}",
        "subnets": ["*"] if subnets == "auto" else subnets,
        "image": "*" if parameter else ami,
        "image_owner": "amazon" if parameter.startswith("/aws/service/") else "",
        "image_parameter": [parameter] if parameter else [],
        "group": [] if is_auto else [spec.network.security_group],
        "auto_group": ["security-group"] if is_auto else [],
        "auto_vpc": ["vpc"] if is_auto else [],
        "group_actions": ["AuthorizeSecurityGroupIngress"] if is_auto else [],
        "frame_kinds": kinds,
        "frame_actions": [f"Create{_camel(kind)}" for kind in kinds],
        # Types with a GPU are known only when a cluster starts. Those with an NVIDIA GPU are in
        # these families.
        "type_patterns": [] if capacity.gpu is None else ["g*", "p*", *types],
        "type_names": names if capacity.gpu is None else [],
        "roles": roles,
        "bucket": f"arn:aws:s3:::{spec.bucket}",
        "prefix": spec.prefix,
        "upload_buckets": [f"arn:aws:s3:::{spec.bucket}"],
    }


def _policy(groups: Sequence[str], values: Values) -> Policy:
    return _document([one for group in groups for one in _statements(group, values)])


def _document(statements: Sequence[Policy]) -> Policy:
    return {"Version": "2012-10-17", "Statement": list(statements)}


@cache
def _templates() -> dict[str, list[Policy]]:
    text = files(__package__).joinpath("policies.json").read_text(encoding="utf-8")
    found: dict[str, list[Policy]] = json.loads(text)
    return found


def _statements(group: str, values: Values) -> Iterator[Policy]:
    """Yield the statements of a group that apply to some resource."""
    for template in _templates()[group]:
        statement = _fill(template, values)
        # A trust policy has no Resource at all.
        if statement.get("Resource", "none needed"):
            yield statement


def _fill(template: Any, values: Values) -> Any:
    """Fill in the values in a part of a template; see the module's docstring."""
    if isinstance(template, dict):
        filled = {key: _fill(value, values) for key, value in template.items()}
        # Keep an empty Resource, because it marks a statement without resources, which is left out.
        return {key: value for key, value in filled.items() if value or key == "Resource"}
    if isinstance(template, list):
        return [text for item in template for text in _expand(item, values)]
    name = _NAME.fullmatch(template)
    if name and not isinstance(values[name[1]], str):
        return list(values[name[1]])
    # Outside of a list, there must be exactly one value.
    [text] = _expand(template, values)
    return text


def _expand(text: str, values: Values) -> Iterator[str]:
    """Yield one string for each combination of values of the names in ``text``."""
    name = _NAME.search(text)
    if name is None:
        yield text
        return
    value = values[name[1]]
    for one in [value] if isinstance(value, str) else value:
        yield from _expand(text[: name.start()] + one + text[name.end() :], values)


def _bucket_arn(place: str) -> str:
    return f"arn:aws:s3:::{place.partition('/')[0]}"


def _camel(kind: str) -> str:
    return "".join(word.capitalize() for word in kind.split("-"))
