"""Enforce IAM: signatures, and the permissions that an API call needs, with their conditions.

A call makes several requests to IAM, each with an action, a resource and condition keys. A launch
makes about ten: for the fleet, each machine with its type, disk, interface, image, subnet, group
and template, for the tags, and for the role that is passed. All of them must be allowed.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, unquote

from moto import settings
from moto.core.authorization import ActionAuthenticatorMixin
from moto.core.exceptions import ServiceException
from moto.core.request import EnvironHeaders
from moto.iam.access_control import (
    CreateAccessKeyFailure,
    IAMRequest,
    IAMRequestBase,
    create_access_key,
)
from werkzeug.exceptions import HTTPException

from etrain_jupyter.plugins.ec2.simulator.iam import Request, is_allowed, is_supported, kind_of
from etrain_jupyter.plugins.ec2.simulator.wire import (
    ACCOUNT,
    ApiError,
    Call,
    listed,
    nested,
    tags_by_kind,
)
from etrain_jupyter.testing.s3_faults import AROUND

IDS = {
    "TerminateInstances": ("instance", "InstanceId"),
    "StopInstances": ("instance", "InstanceId"),
    "GetConsoleOutput": ("instance", "InstanceId"),
    "DeleteLaunchTemplate": ("launch-template", "LaunchTemplateId"),
    "DeleteVolume": ("volume", "VolumeId"),
    "DeleteSecurityGroup": ("security-group", "GroupId"),
    "AuthorizeSecurityGroupIngress": ("security-group", "GroupId"),
}
"""Actions on existing resources: resource type, and the parameter with its id."""
KINDS = {"i": "instance", "lt": "launch-template", "sg": "security-group", "vol": "volume"}


@dataclass(frozen=True, kw_only=True)
class World:
    """The parts of an account that permissions depend on."""

    tags_of: Callable[[str], Mapping[str, str]]
    """Returns a resource's tags, by id."""
    template: Callable[[Mapping[str, Any]], tuple[str, Mapping[str, Any]]]
    """Returns the id and data of the launch template in a request."""
    role_of: Callable[[str], str]
    """Returns the role of an instance profile."""
    owner_of: Callable[[str], str]
    """Returns an image's owner: ``amazon`` or an account."""


def requests_of(call: Call, world: World) -> list[Request]:
    """Return the permissions that a call needs."""
    if call.service == "s3":
        found = [_of_s3(call)]
    elif call.service == "ec2":
        found = list(_Ec2Call(call, world).requests())
    elif (call.service, call.action) == ("ssm", "GetParameter"):
        found = [Request("ssm:GetParameter", _parameter(call, world))]
    elif call.service == "sts":
        found = []  # GetCallerIdentity needs no permission
    else:
        found = [Request(f"{call.service}:{call.action}", "*")]
    return [_with_supported_keys(one) for one in found]


def _with_supported_keys(request: Request) -> Request:
    # Drop condition keys that AWS does not support for that action and resource: a policy that
    # relies on one would work here and fail there.
    kind = kind_of(request.resource)
    known = {k: v for k, v in request.context.items() if is_supported(request.action, kind, k)}
    return Request(request.action, request.resource, known)


def _parameter(call: Call, world: World) -> str:
    # AWS's public parameters, such as the ids of its images, belong to no account.
    name = str(json.loads(call.body or b"{}").get("Name", "")).lstrip("/")
    account = "" if name.startswith("aws/") else ACCOUNT
    return f"arn:aws:ssm:{call.region}:{account}:parameter/{name}"


# ------------------------------------------------------------------------------------------- S3


def _of_s3(call: Call) -> Request:
    path = unquote(str(call.environ.get("PATH_INFO", ""))).lstrip("/")
    bucket, _, key = path.partition("/")
    query = dict(parse_qsl(str(call.environ.get("QUERY_STRING", "")), keep_blank_values=True))
    arn = f"arn:aws:s3:::{bucket}"
    method = str(call.environ["REQUEST_METHOD"])
    if not bucket:
        return Request("s3:ListAllMyBuckets", "*")
    if not key:
        return _of_bucket(method, arn, query)
    match method:
        case "GET" if "uploadId" in query:
            action = "s3:ListMultipartUploadParts"
        case "GET" | "HEAD":
            action = "s3:GetObject"
        case "DELETE":
            action = "s3:AbortMultipartUpload" if "uploadId" in query else "s3:DeleteObject"
        case _:
            action = "s3:PutObject"
    return Request(action, f"{arn}/{key}")


def _of_bucket(method: str, arn: str, query: Mapping[str, str]) -> Request:
    if "tagging" in query:
        return Request(f"s3:{'Put' if method == 'PUT' else 'Get'}BucketTagging", arn)
    if method == "PUT":
        return Request("s3:CreateBucket", arn)
    if method == "DELETE":
        return Request("s3:DeleteBucket", arn)
    if method == "POST" and "delete" in query:
        # The keys are in the body; each of them needs the permission.
        return Request("s3:DeleteObject", f"{arn}/*")
    if "versions" in query:
        return Request("s3:ListBucketVersions", arn)
    if "uploads" in query:
        return Request("s3:ListBucketMultipartUploads", arn, {"s3:prefix": query.get("prefix", "")})
    if method not in ("GET", "HEAD"):
        return Request(f"s3:{method}Bucket", arn)
    names = ("prefix", "delimiter", "max-keys")
    return Request("s3:ListBucket", arn, {f"s3:{k}": query[k] for k in names if k in query})


# ------------------------------------------------------------------------------------------ EC2


class _Ec2Call:
    def __init__(self, call: Call, world: World) -> None:
        self._call, self._world = call, world
        self._query = nested(call.body)
        self._tags = tags_by_kind(self._query)

    def requests(self) -> Iterator[Request]:
        action = self._call.action
        if action == "CreateFleet":
            yield from self._fleet()
        elif action == "RunInstances":
            yield from self._run(self._query, self._query.get("LaunchTemplate"), self._tags)
        elif action in ("CreateLaunchTemplate", "CreateSecurityGroup"):
            yield from self._create()
        elif action == "CreateTags":
            yield from self._create_tags()
        elif action in IDS:
            kind, parameter = IDS[action]
            for id in listed(self._query, parameter) or ["unknown"]:
                yield self._request(action, kind, id, self._resource_tags(id))
        else:
            yield Request(f"ec2:{action}", "*")

    def _request(self, action: str, kind: str, id: str, context: Mapping[str, Any]) -> Request:
        # ARNs of images and snapshots have no account. A resource that the call creates has no id
        # yet: "new" is used instead, so a policy must match it with a wildcard.
        account = "" if kind in ("image", "snapshot") else ACCOUNT
        arn = f"arn:aws:ec2:{self._call.region}:{account}:{kind}/{id}"
        return Request(f"ec2:{action}", arn, {k: v for k, v in context.items() if v})

    def _resource_tags(self, id: str) -> dict[str, Any]:
        return {f"aws:ResourceTag/{k}": v for k, v in self._world.tags_of(id).items()}

    def _create(self) -> Iterator[Request]:
        action = self._call.action
        kind = "launch-template" if action == "CreateLaunchTemplate" else "security-group"
        tags = self._tags.get(kind, {})
        yield self._request(action, kind, "new", _request_tags(tags))
        if kind == "security-group":
            vpc = str(self._query.get("VpcId", "vpc-default"))
            yield self._request(action, "vpc", vpc, self._resource_tags(vpc))
        yield from self._tag_on_create(action, kind, tags)

    def _tag_on_create(self, action: str, kind: str, tags: Mapping[str, str]) -> Iterator[Request]:
        # Setting tags while a resource is created needs a separate permission.
        if tags:
            yield self._request(
                "CreateTags", kind, "new", {**_request_tags(tags), "ec2:CreateAction": action}
            )

    def _create_tags(self) -> Iterator[Request]:
        tags = {one["Key"]: one.get("Value", "") for one in listed(self._query, "Tag")}
        for id in listed(self._query, "ResourceId"):
            kind = KINDS.get(id.partition("-")[0], "unknown")
            yield self._request(
                "CreateTags", kind, id, {**_request_tags(tags), **self._resource_tags(id)}
            )

    def _fleet(self) -> Iterator[Request]:
        yield self._request(
            "CreateFleet", "fleet", "new", _request_tags(self._tags.get("fleet", {}))
        )
        yield from self._tag_on_create("CreateFleet", "fleet", self._tags.get("fleet", {}))
        for config in listed(self._query, "LaunchTemplateConfigs"):
            named = config["LaunchTemplateSpecification"]
            id, data = self._world.template(named)
            yield self._request("CreateFleet", "launch-template", id, self._resource_tags(id))
            for override in config.get("Overrides") or [{}]:
                type = override.get("InstanceType") or data.get("InstanceType", "")
                for kind in ("instance", "volume"):
                    context = {**_request_tags(self._tags.get(kind, {})), "ec2:InstanceType": type}
                    yield self._request("CreateFleet", kind, "new", context)
                subnet = str(override.get("SubnetId", "subnet-default"))
                yield self._request("CreateFleet", "subnet", subnet, {"ec2:SubnetID": subnet})
                # EC2 launches with the caller's permissions.
                yield from self._run(override, named, self._tags)
        capacity = self._query.get("TargetCapacitySpecification") or {}
        if capacity.get("DefaultTargetCapacityType") == "spot":
            yield self._request("RunInstances", "spot-instances-request", "new", {})

    def _run(
        self,
        parameters: Mapping[str, Any],
        named: Mapping[str, Any] | None,
        tags: Mapping[str, Mapping[str, str]],
    ) -> Iterator[Request]:
        # The requests for one kind of machine, in a fleet or ``RunInstances``. Values of the
        # request take precedence over those of the launch template.
        id, data = self._world.template(named) if named else ("", {})
        region, account = self._call.region, ACCOUNT
        # Set on every resource of the launch, so that a policy can require a certain template.
        frame = {
            "ec2:LaunchTemplate": id and f"arn:aws:ec2:{region}:{account}:launch-template/{id}"
        }
        of_template = tags_by_kind(data)
        tags = {kind: {**of_template.get(kind, {}), **tags.get(kind, {})} for kind in _LAUNCHED}
        profile = str(
            (parameters.get("IamInstanceProfile") or data.get("IamInstanceProfile") or {}).get(
                "Name", ""
            )
        )
        metadata = {
            **(data.get("MetadataOptions") or {}),
            **(parameters.get("MetadataOptions") or {}),
        }
        machine = {
            **frame,
            **_request_tags(tags["instance"]),
            "ec2:InstanceType": parameters.get("InstanceType") or data.get("InstanceType", ""),
            "ec2:MetadataHttpTokens": metadata.get("HttpTokens", "optional"),
            "ec2:InstanceProfile": profile and f"arn:aws:iam::{account}:instance-profile/{profile}",
        }
        yield self._request("RunInstances", "instance", "new", machine)
        yield self._request(
            "RunInstances", "volume", "new", {**frame, **_request_tags(tags["volume"])}
        )
        yield self._request("RunInstances", "network-interface", "new", frame)
        image = str(parameters.get("ImageId") or data.get("ImageId", ""))
        facts = {"ec2:Owner": self._world.owner_of(image), "ec2:ImageID": image}
        yield self._request("RunInstances", "image", image, {**frame, **facts})
        yield self._request("RunInstances", "snapshot", "snap-of-image", frame)
        subnet = str(parameters.get("SubnetId", "subnet-default"))
        yield self._request("RunInstances", "subnet", subnet, {**frame, "ec2:SubnetID": subnet})
        for group in _groups(parameters) or _groups(data):
            yield self._request(
                "RunInstances", "security-group", group, {**frame, **self._resource_tags(group)}
            )
        if id:
            yield self._request(
                "RunInstances", "launch-template", id, {**frame, **self._resource_tags(id)}
            )
        for kind in _LAUNCHED:
            yield from self._tag_on_create("RunInstances", kind, tags[kind])
        if profile:
            role = f"arn:aws:iam::{account}:role/{self._world.role_of(profile)}"
            yield Request("iam:PassRole", role, {"iam:PassedToService": "ec2.amazonaws.com"})


_LAUNCHED = ("instance", "volume")


def _request_tags(tags: Mapping[str, str]) -> dict[str, Any]:
    return {f"aws:RequestTag/{k}": v for k, v in tags.items()} | {"aws:TagKeys": list(tags)}


def _groups(data: Mapping[str, Any]) -> list[str]:
    interfaces = data.get("NetworkInterfaces") or data.get("NetworkInterface") or []
    of_interfaces = [group for one in interfaces for group in one.get("Groups") or []]
    own = data.get("SecurityGroupIds") or data.get("SecurityGroupId") or []
    return [str(group) for group in [*own, *of_interfaces]]


# -------------------------------------------------------------------------------- enforcement


class Enforcement:
    """Checks of signatures and policies, off by default; ``lock`` guards moto's state."""

    def __init__(self, lock: threading.RLock, world_of: Callable[[str], World]) -> None:
        self._lock = lock
        self._world_of = world_of
        self.requests: dict[str, tuple[Request, bool]] = {}
        """Requests to IAM since enforcement started, and whether they were allowed."""
        _replace_motos_checks()

    def is_enforcing(self) -> bool:
        """Return whether signatures and policies are checked."""
        # moto's own switch: it checks requests after the first INITIAL_NO_AUTH_ACTION_COUNT.
        return bool(ActionAuthenticatorMixin.request_count >= settings.INITIAL_NO_AUTH_ACTION_COUNT)

    def enforce(self, is_on: bool) -> None:
        """Start or stop checking signatures and policies."""
        self.requests.clear()
        settings.INITIAL_NO_AUTH_ACTION_COUNT = 0.0 if is_on else float("inf")
        ActionAuthenticatorMixin.request_count = 0

    def check_signed(self, call: Call) -> None:
        """Refuse a call with an invalid signature, if moto does not check it.

        Raises:
            ApiError: If it is refused.
        """
        if not self.is_enforcing():
            return
        request = IAMRequest(
            account_id=ACCOUNT,
            method=call.environ["REQUEST_METHOD"],
            path=call.environ["PATH_INFO"],
            data=dict(parse_qsl(call.body.decode("latin-1"))),
            body=call.body,
            headers=dict(EnvironHeaders(call.environ)),
            action=call.action,
        )
        try:
            request.check_signature()
        except (ServiceException, HTTPException):
            raise ApiError("AuthFailure", "AWS was not able to validate the credentials.") from None

    def find_refusal(self, call: Call) -> ApiError | None:
        """Return the error of a call that the caller's policies do not allow, else None."""
        if not self.is_enforcing() or "HTTP_X_ETRAIN_AROUND" in call.environ:
            return None
        with self._lock:
            policies = self._policies_of(call)
            if policies is None:
                return None  # the signature check refuses an unknown caller
            for request in requests_of(call, self._world_of(call.region)):
                is_permitted = is_allowed(policies, request)
                # The text is the key, so that repeated requests, such as polls, count once.
                self.requests[str(request)] = (request, is_permitted)
                if not is_permitted:
                    code = "UnauthorizedOperation" if call.service == "ec2" else "AccessDenied"
                    return ApiError(code, f"not authorized to perform {request}", 403)
        return None

    def _policies_of(self, call: Call) -> list[dict[str, Any]] | None:
        headers = dict(EnvironHeaders(call.environ))
        try:
            key = create_access_key(ACCOUNT, "aws", call.access_key, headers)
        except CreateAccessKeyFailure:
            return None
        return [_document_of(policy) for policy in key.collect_policies()]


def _document_of(policy: Any) -> dict[str, Any]:
    """Return a policy, which moto keeps as text, as a mapping, or as a managed policy."""
    if hasattr(policy, "versions"):
        [policy] = [one.document for one in policy.versions if one.is_default]
    parsed: dict[str, Any] = json.loads(
        policy if isinstance(policy, str) else policy["policy_document"]
    )
    return parsed


def _replace_motos_checks() -> None:
    # The test's own S3 requests are not signed, and must work with any policy.
    check = ActionAuthenticatorMixin._authenticate_and_authorize_action

    def check_others(self: Any, *args: Any, **kwargs: Any) -> None:
        if not self.headers.get(AROUND):
            check(self, *args, **kwargs)

    setattr(ActionAuthenticatorMixin, check.__name__, check_others)
    # Moto ignores conditions and most resources; ``find_refusal`` has already checked them.
    IAMRequestBase.check_action_permitted = _permit  # type: ignore[method-assign]


def _permit(self: IAMRequestBase, resource: str) -> None:
    """Accept any request, because its signature and policies have been checked elsewhere."""
