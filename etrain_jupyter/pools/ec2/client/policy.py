"""What the roles of a pool may do, as the JSON of IAM: the least that works.

Three of them: the *launcher* is who runs ``%etrain`` and, with ``head: notebook``, the scheduler;
the *head* is the role of an on-demand head, which launches nodes but makes no roles; a *node* reads
its own cluster's files, says how it is, and writes checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from etrain_jupyter.pools.ec2.bootstrap import KEYS
from etrain_jupyter.pools.ec2.ec2_api import CLUSTER_TAG
from etrain_jupyter.pools.ec2.spec import AwsSpotSpec

Policy = dict[str, Any]

_READS = (
    "ec2:DescribeAvailabilityZones",
    "ec2:DescribeImages",
    "ec2:DescribeInstances",
    "ec2:DescribeInstanceTypes",
    "ec2:DescribeLaunchTemplates",
    "ec2:DescribeSecurityGroups",
    "ec2:DescribeSpotPriceHistory",
    "ec2:DescribeSubnets",
    "ec2:DescribeVolumes",
    "ec2:GetSpotPlacementScores",
    "pricing:GetProducts",
)
"""EC2 lets nobody narrow these down."""
_CLUSTERS = "aws-*"
"""Ids of clusters of this kind."""
_OURS = {"StringLike": {f"aws:ResourceTag/{CLUSTER_TAG}": _CLUSTERS}}
_TAGGED = {"StringLike": {f"aws:RequestTag/{CLUSTER_TAG}": _CLUSTERS}}
_CHECKPOINTS = ("s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload")
_LAUNCH = ("ec2:CreateFleet", "ec2:RunInstances")
_PARTS = ("checkpoints", "manifests")
"""What trainers write of a job; its record, bundle and log are not theirs."""
_LOG = ("log/*", "packs/*", "events.segments/*", "alive.json")
"""What the coordinator of a job writes, where the run store is a bucket."""


def _policy(*statements: Policy) -> Policy:
    return {"Version": "2012-10-17", "Statement": list(statements)}


def _allow(
    sid: str,
    actions: Sequence[str],
    resources: Sequence[str],
    condition: Policy | None = None,
) -> Policy:
    statement: Policy = {
        "Sid": sid,
        "Effect": "Allow",
        "Action": list(actions),
        "Resource": list(resources),
    }
    return statement | ({"Condition": condition} if condition else {})


def launcher_policy(
    spec: AwsSpotSpec, *, node_role: str = "", account: str = "*", head_role: str = ""
) -> Policy:
    """Return what the user or role needs that starts clusters.

    Args:
        spec: The pool's.
        node_role: Name of the role in ``iam.instance_profile``; by default called like it.
        account: Its number; ``*`` is the caller's own.
        head_role: The same of an on-demand head, if there is one.
    """
    roles = [node_role or spec.iam.instance_profile, *([head_role] if head_role else [])]
    types = [spec.head_type] if head_role else []
    bucket = f"arn:aws:s3:::{spec.bucket}"
    return _policy(
        *_machines(spec, account, roles=roles, types=types),
        *_frame(spec, account),
        _allow(
            "UseSpot",
            ["iam:CreateServiceLinkedRole"],
            [f"arn:aws:iam::{account}:role/aws-service-role/spot.amazonaws.com/*"],
            {"StringEquals": {"iam:AWSServiceName": "spot.amazonaws.com"}},
        ),
        *_sessions(spec, account),
        _allow("UsePrefix", _CHECKPOINTS, [f"{bucket}/{spec.prefix}*"]),
        _list_prefix(spec),
        _allow("ListUploads", ["s3:ListBucketMultipartUploads"], [bucket]),
    )


def head_policy(spec: AwsSpotSpec, *, node_role: str = "", account: str = "*") -> Policy:
    """Return what the role of an on-demand head needs.

    It launches and ends nodes, but makes no launch templates, and neither makes nor changes
    security groups: what it launches is what the launcher has laid down. In the bucket it keeps its
    cluster and writes the logs of jobs; records and bundles of jobs, which a notebook runs, are the
    launcher's.
    """
    folder = f"arn:aws:s3:::{spec.bucket}/{spec.prefix}"
    roles = [node_role or spec.iam.instance_profile]
    own = [f"{folder}clusters/*", f"{folder}ledgers/*"]
    logs = [f"{folder}runs/*/{name}" for name in _LOG]
    return _policy(
        *_machines(spec, account, roles=roles),
        _allow("ReadPrefix", ["s3:GetObject"], [f"{folder}*"]),
        _allow("KeepClusterAndLogs", ["s3:PutObject", "s3:DeleteObject"], [*own, *logs]),
        _list_prefix(spec),
    )


def _machines(
    spec: AwsSpotSpec, account: str, *, roles: Sequence[str], types: Sequence[str] = ()
) -> list[Policy]:
    """Return what it takes to look, to launch nodes and to end them.

    A launch is many requests to IAM, one for each thing that it makes or uses, and all of them must
    be allowed: see "Actions, resources, and condition keys for Amazon EC2". A machine must come
    from a launch template of ours, be of a type of the spec, carry our tags and demand tokens of
    whoever asks its metadata service.

    Args:
        spec: The pool's.
        account: Its number.
        roles: Those that machines may have.
        types: Types of machines besides those of nodes.
    """
    arn = f"arn:aws:ec2:{spec.region}"
    own = f"{arn}:{account}"
    by_template = {"ArnLike": {"ec2:LaunchTemplate": f"{own}:launch-template/*"}}
    like, names = _types_of(spec, types)
    image, image_condition = _image_of(spec)
    group = spec.network.security_group
    subnets = spec.network.subnets
    of_ours = [f"{own}:launch-template/*"]
    of_others = [f"{arn}::snapshot/*", f"{own}:spot-instances-request/*"]
    if group == "auto":
        of_ours.append(f"{own}:security-group/*")
    else:
        of_others.append(f"{own}:security-group/{group}")
    return [
        _allow("Look", _READS, ["*"]),
        _allow(
            "LaunchIn",
            _LAUNCH,
            [f"{own}:subnet/{name}" for name in (["*"] if subnets == "auto" else subnets)],
        ),
        _allow("LaunchFrom", _LAUNCH, [f"{arn}::image/{image}"], image_condition),
        _allow("LaunchWith", ["ec2:RunInstances"], of_others),
        _allow("LaunchByOurTemplates", _LAUNCH, of_ours, _OURS),
        _allow(
            "LaunchNodes",
            ["ec2:RunInstances"],
            [f"{own}:instance/*"],
            {
                **by_template,
                "StringLike": {
                    **_TAGGED["StringLike"],
                    **({"ec2:InstanceType": like} if like else {}),
                },
                "StringEquals": {
                    "ec2:MetadataHttpTokens": "required",
                    **({"ec2:InstanceType": names} if names else {}),
                },
                # Without it, ``etrain reap`` would not know when it may remove the machine.
                "Null": {"aws:RequestTag/etrain:expires": "false"},
            },
        ),
        _allow("LaunchVolumes", ["ec2:RunInstances"], [f"{own}:volume/*"], _TAGGED),
        _allow(
            "LaunchInterfaces", ["ec2:RunInstances"], [f"{own}:network-interface/*"], by_template
        ),
        _allow(
            "MakeFleets",
            ["ec2:CreateFleet"],
            [f"{own}:{kind}/*" for kind in ("fleet", "instance", "volume")],
            {
                "StringLike": _TAGGED["StringLike"],
                # A fleet's own resource has no type.
                "StringLikeIfExists": {"ec2:InstanceType": [*like, *names]},
            },
        ),
        _allow(
            "TagWhatIsMade",
            ["ec2:CreateTags"],
            [f"{own}:{kind}/*" for kind in ("instance", "volume", "fleet")],
            {"StringEquals": {"ec2:CreateAction": ["CreateFleet", "RunInstances"]}} | _TAGGED,
        ),
        _allow(
            "PutOffExpiry",
            ["ec2:CreateTags"],
            [f"{own}:{kind}/*" for kind in ("instance", "launch-template", "security-group")],
            _OURS | {"ForAllValues:StringEquals": {"aws:TagKeys": ["etrain:expires"]}},
        ),
        _allow(
            "EndWhatIsOurs",
            [
                "ec2:TerminateInstances",
                "ec2:GetConsoleOutput",
                "ec2:DeleteVolume",
                "ec2:DeleteLaunchTemplate",
            ],
            [f"{own}:{kind}/*" for kind in ("instance", "volume", "launch-template")],
            _OURS,
        ),
        _allow(
            "PassOurRoles",
            ["iam:PassRole"],
            [f"arn:aws:iam::{account}:role/{role}" for role in roles],
            {"StringEquals": {"iam:PassedToService": "ec2.amazonaws.com"}},
        ),
        *_image_names(spec),
    ]


def _frame(spec: AwsSpotSpec, account: str) -> list[Policy]:
    """Return what it takes to make and remove what a cluster has but for its machines."""
    own = f"arn:aws:ec2:{spec.region}:{account}"
    makes = ["launch-template"]
    statements = []
    if spec.network.security_group == "auto":
        makes.append("security-group")
        statements.append(
            _allow("MakeGroupInVpc", ["ec2:CreateSecurityGroup"], [f"{own}:vpc/*"]),
        )
    made = [f"{own}:{kind}/*" for kind in makes]
    return [
        *statements,
        _allow("MakeTagged", [f"ec2:Create{_camel(kind)}" for kind in makes], made, _TAGGED),
        _allow(
            "TagFrame",
            ["ec2:CreateTags"],
            made,
            {"StringEquals": {"ec2:CreateAction": [f"Create{_camel(kind)}" for kind in makes]}}
            | _TAGGED,
        ),
        _allow(
            "ChangeOurGroups",
            [
                "ec2:DeleteSecurityGroup",
                *(["ec2:AuthorizeSecurityGroupIngress"] if statements else []),
            ],
            [f"{own}:security-group/*"],
            _OURS,
        ),
    ]


def node_policy(
    spec: AwsSpotSpec, *, cluster_id: str = "*", checkpoints: Sequence[str] = ()
) -> Policy:
    """Return what the role of nodes needs.

    Nodes run what a notebook sends them, so they may write nothing that a notebook or another
    cluster would run: no record, bundle or log of a job, no key, no configuration. The keys of a
    cluster lie in a folder whose name only its own nodes are told, see ``bootstrap``.

    Args:
        spec: The pool's.
        cluster_id: For a role of one cluster only; ``*`` for all of the prefix.
        checkpoints: Folders of ``checkpoint.to`` as ``bucket/prefix``; by default ``runs/`` below
            the pool's prefix.
    """
    bucket = f"arn:aws:s3:::{spec.bucket}"
    home = f"{bucket}/{spec.prefix}clusters/{cluster_id}"
    places = [place.strip("/") for place in checkpoints] or [f"{spec.bucket}/{spec.prefix}runs"]
    statements = [
        _allow(
            "ReadOwnCluster",
            ["s3:GetObject"],
            [f"{home}/config.json", f"{home}/{KEYS}/*", f"{home}/lease.json"],
        ),
        _allow("SayHowItIs", ["s3:PutObject"], [f"{home}/nodes/*"]),
        _allow(
            "WriteCheckpoints",
            _CHECKPOINTS,
            [f"arn:aws:s3:::{place}/*/{part}/*" for place in places for part in _PARTS],
        ),
    ]
    for number, place in enumerate(places):
        name, _, prefix = place.partition("/")
        below = f"{prefix}/" if prefix else ""
        listed = {"StringLike": {"s3:prefix": [f"{below}*/{part}/*" for part in _PARTS]}}
        here = [f"arn:aws:s3:::{name}"]
        statements.append(_allow(f"ListCheckpoints{number or ''}", ["s3:ListBucket"], here, listed))
    buckets = sorted({f"arn:aws:s3:::{place.partition('/')[0]}" for place in places})
    # AWS has no ``s3:prefix`` for this action: with that condition it would allow nothing.
    statements.append(_allow("ListUploads", ["s3:ListBucketMultipartUploads"], buckets))
    if spec.image.archive:
        archive = spec.image.archive.removeprefix("s3://")
        statements.append(_allow("ReadArchive", ["s3:GetObject"], [f"arn:aws:s3:::{archive}"]))
    return _policy(*statements)


def _types_of(spec: AwsSpotSpec, more: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return patterns and names of the types of machines, one of which is empty."""
    if spec.capacity.gpu is None:
        return [], [*spec.capacity.types, *(one for one in more if one not in spec.capacity.types)]
    # Which types have such GPUs is known when a cluster starts; families with NVIDIA's are these.
    return ["g*", "p*", *more], []


def _image_of(spec: AwsSpotSpec) -> tuple[str, Policy | None]:
    """Return the id of the image, or any and a condition on it."""
    ami = spec.image.ami
    if not ami.startswith("ssm:"):
        return ami, None
    is_of_aws = ami.startswith("ssm:/aws/service/")
    return "*", {"StringEquals": {"ec2:Owner": "amazon"}} if is_of_aws else None


def _image_names(spec: AwsSpotSpec) -> list[Policy]:
    """Return what it takes to read the parameter that names the image, if one does."""
    if not spec.image.ami.startswith("ssm:"):
        return []
    name = spec.image.ami.removeprefix("ssm:")
    parameter = f"arn:aws:ssm:{spec.region}:*:parameter{name}"
    return [_allow("ReadImageName", ["ssm:GetParameter"], [parameter])]


def _camel(kind: str) -> str:
    return "".join(word.capitalize() for word in kind.split("-"))


def _sessions(spec: AwsSpotSpec, account: str) -> list[Policy]:
    """Return what port forwards to an on-demand head need, where they are used."""
    if spec.head_tunnel != "ssm":
        return []
    instances = f"arn:aws:ec2:{spec.region}:{account}:instance/*"
    document = f"arn:aws:ssm:{spec.region}::document/AWS-StartPortForwardingSession"
    own = "arn:aws:ssm:*:*:session/${aws:username}-*"
    tagged = {"StringLike": {"ssm:resourceTag/etrain:role": "head"}}
    return [
        _allow("ForwardToHead", ["ssm:StartSession"], [instances], tagged),
        _allow("ForwardPorts", ["ssm:StartSession"], [document]),
        _allow("EndOwnForwards", ["ssm:TerminateSession"], [own]),
    ]


def trust_policy() -> Policy:
    """Return who may take the role of a node or head: machines of EC2."""
    return {
        "Version": "2012-10-17",
        "Statement": [
            {
                "Effect": "Allow",
                "Principal": {"Service": "ec2.amazonaws.com"},
                "Action": "sts:AssumeRole",
            }
        ],
    }


def _list_prefix(spec: AwsSpotSpec) -> Policy:
    return _allow(
        "ListPrefix",
        ["s3:ListBucket"],
        [f"arn:aws:s3:::{spec.bucket}"],
        {"StringLike": {"s3:prefix": [f"{spec.prefix}*"]}},
    )
