"""What the roles of a pool may do, as the JSON of IAM: the least that works.

Three of them: the *launcher* is who runs ``%etrain`` and, with ``head: notebook``, the scheduler;
the *head* is the role of an on-demand head, which launches nodes but makes no roles; a *node* reads
its own cluster's files, says how it is, and writes checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from etrain_jupyter.pools.aws_spot.ec2 import CLUSTER_TAG
from etrain_jupyter.pools.aws_spot.spec import AwsSpotSpec

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
_OURS = {"StringLike": {f"aws:ResourceTag/{CLUSTER_TAG}": "*"}}
_TAGGED = {"StringLike": {f"aws:RequestTag/{CLUSTER_TAG}": "*"}}
_CHECKPOINTS = ("s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload")


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
    arn = f"arn:aws:ec2:{spec.region}"
    roles = [node_role or spec.iam.instance_profile, *([head_role] if head_role else [])]
    bucket = f"arn:aws:s3:::{spec.bucket}"
    ours = [
        f"{arn}:{account}:{kind}/*"
        for kind in ("instance", "launch-template", "security-group", "volume", "fleet")
    ]
    return _policy(
        _allow("Look", _READS, ["*"]),
        # A fleet and its machines are made of many resources, most of which are not ours.
        _allow("Launch", ["ec2:CreateFleet", "ec2:RunInstances"], ["*"]),
        _allow(
            "MakeTagged",
            ["ec2:CreateLaunchTemplate", "ec2:CreateSecurityGroup"],
            [f"{arn}:{account}:{kind}/*" for kind in ("launch-template", "security-group")],
            _TAGGED,
        ),
        _allow("MakeGroupInVpc", ["ec2:CreateSecurityGroup"], [f"{arn}:{account}:vpc/*"]),
        _allow(
            "TagWhatIsMade",
            ["ec2:CreateTags"],
            ours,
            {
                "StringEquals": {
                    "ec2:CreateAction": [
                        "CreateFleet",
                        "RunInstances",
                        "CreateLaunchTemplate",
                        "CreateSecurityGroup",
                    ]
                }
            },
        ),
        _allow(
            "PutOffExpiry",
            ["ec2:CreateTags"],
            ours,
            _OURS | {"ForAllValues:StringEquals": {"aws:TagKeys": ["etrain:expires"]}},
        ),
        _allow(
            "EndWhatIsOurs",
            [
                "ec2:TerminateInstances",
                "ec2:GetConsoleOutput",
                "ec2:DeleteLaunchTemplate",
                "ec2:AuthorizeSecurityGroupIngress",
                "ec2:DeleteSecurityGroup",
                "ec2:DeleteVolume",
            ],
            ours,
            _OURS,
        ),
        _allow(
            "PassOneRole",
            ["iam:PassRole"],
            [f"arn:aws:iam::{account}:role/{role}" for role in roles],
            {"StringEquals": {"iam:PassedToService": "ec2.amazonaws.com"}},
        ),
        _allow(
            "UseSpot",
            ["iam:CreateServiceLinkedRole"],
            ["*"],
            {
                "StringEquals": {
                    "iam:AWSServiceName": ["spot.amazonaws.com", "ec2fleet.amazonaws.com"]
                }
            },
        ),
        *_sessions(spec, arn, account),
        _allow("ReadImageName", ["ssm:GetParameter"], [_images_of(spec)]),
        _allow(
            "UsePrefix",
            [*_CHECKPOINTS],
            [f"{bucket}/{spec.prefix}*"],
        ),
        _list_prefix(spec, [f"{spec.prefix}*"]),
    )


def head_policy(spec: AwsSpotSpec, *, node_role: str = "", account: str = "*") -> Policy:
    """Return what the role of an on-demand head needs: the launcher's, but for the clusters' frame.

    It neither makes nor removes launch templates and security groups.
    """
    whole = launcher_policy(spec, node_role=node_role, account=account)
    frame = ("LaunchTemplate", "SecurityGroup")
    statements = []
    for statement in whole["Statement"]:
        actions = [
            action
            for action in statement["Action"]
            if action.startswith("ec2:Describe") or not any(word in action for word in frame)
        ]
        if actions and statement["Sid"] != "UseSpot":
            statements.append(statement | {"Action": actions})
    return _policy(*statements)


def node_policy(
    spec: AwsSpotSpec, *, cluster_id: str = "*", checkpoints: Sequence[str] = ()
) -> Policy:
    """Return what the role of nodes needs.

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
            [f"{home}/config.json", f"{home}/tls/*", f"{home}/lease.json"],
        ),
        _allow("SayHowItIs", ["s3:PutObject"], [f"{home}/nodes/*"]),
        _allow("WriteCheckpoints", _CHECKPOINTS, [f"arn:aws:s3:::{place}/*" for place in places]),
    ]
    for number, place in enumerate(places):
        name, _, prefix = place.partition("/")
        statement = _allow(
            f"ListCheckpoints{number or ''}",
            ["s3:ListBucket", "s3:ListBucketMultipartUploads"],
            [f"arn:aws:s3:::{name}"],
            {"StringLike": {"s3:prefix": [f"{prefix}/*"]}} if prefix else None,
        )
        statements.append(statement)
    if spec.image.archive:
        archive = spec.image.archive.removeprefix("s3://")
        statements.append(_allow("ReadArchive", ["s3:GetObject"], [f"arn:aws:s3:::{archive}"]))
    return _policy(*statements)


def _sessions(spec: AwsSpotSpec, arn: str, account: str) -> list[Policy]:
    """Return what port forwards to an on-demand head need, where they are used."""
    if spec.head_tunnel != "ssm":
        return []
    document = f"arn:aws:ssm:{spec.region}::document/AWS-StartPortForwardingSession"
    own = "arn:aws:ssm:*:*:session/${aws:username}-*"
    tagged = {"StringLike": {"ssm:resourceTag/etrain:role": "head"}}
    return [
        _allow("ForwardToHead", ["ssm:StartSession"], [f"{arn}:{account}:instance/*"], tagged),
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


def _list_prefix(spec: AwsSpotSpec, prefixes: Sequence[str]) -> Policy:
    return _allow(
        "ListPrefix",
        ["s3:ListBucket", "s3:ListBucketMultipartUploads"],
        [f"arn:aws:s3:::{spec.bucket}"],
        {"StringLike": {"s3:prefix": list(prefixes)}},
    )


def _images_of(spec: AwsSpotSpec) -> str:
    ami = spec.image.ami
    name = ami.removeprefix("ssm:") if ami.startswith("ssm:") else "/aws/service/*"
    return f"arn:aws:ssm:{spec.region}:*:parameter{name}"
