"""Requests to EC2: clients, descriptions of machines and types, termination.

boto3 retries reads in adaptive mode. It must not retry launches; see ``fleet_launch``.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError
from botocore.parsers import ResponseParserError

from etrain_jupyter.errors import StoreError
from etrain_jupyter.plugins.ec2.aws_messages import (
    AwsErrors,
    message_of_error,
)
from etrain_jupyter.plugins.ec2.capacity_spec import GpuSpec
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec
from etrain_jupyter.storage.objects.bucket_owners import expect_owner, expected_owner, named_owner
from etrain_jupyter.storage.objects.s3_bucket import Bucket
from etrain_jupyter.storage.objects.s3_deadlines import guard
from etrain_jupyter.storage.objects.s3_messages import code_of, is_credentials_error
from etrain_jupyter.storage.objects.s3_requests import S3Limits

CLUSTER_TAG = "etrain:cluster"
LIVING = ("pending", "running", "stopping", "stopped")
"""States in which a machine is, or may be, charged for."""
S3_LIMITS = S3Limits(
    connect_timeout_s=3.0,
    read_timeout_s=10.0,
    num_requests=3,
    num_attempts=2,
    patience_s=20.0,
    deadline_s=20.0,
)
"""Limits for requests for the head's objects, such as its lease, which must not block it long."""


@dataclass(frozen=True, kw_only=True)
class Instance:
    """A machine as EC2 describes it."""

    id: str
    type: str
    zone: str
    lifecycle: str
    state: str
    launched_at: float
    private_ip: str = ""
    reason: str = ""
    """EC2's reason code for its termination, past or upcoming."""
    ended_at: float | None = None
    """None if EC2 does not report it."""
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_living(self) -> bool:
        """True if it may still be charged for."""
        return self.state in LIVING


@dataclass(frozen=True, kw_only=True)
class TypeFacts:
    """Properties of a machine type."""

    gpus: int = 0
    gpu_memory_gib: float = 0.0
    encrypts_traffic: bool = False
    architectures: tuple[str, ...] = ()
    vcpus: int = 0


class _Service:
    """A client for one service, with retries."""

    def __init__(
        self, service: str, *, attempts: int, mode: str = "standard", region: str | None = None
    ) -> None:
        self._service, self._region = service, region
        self._retries = {"mode": mode, "total_max_attempts": attempts}

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, clients: Clients | None, owner: type) -> Any:
        if clients is None:
            return self
        return clients._client(self._service, self._name, self._retries, self._region)


class Clients:
    """boto3 clients for one spec, created on first use; safe to use from several threads."""

    def __init__(self, spec: AwsSpotSpec) -> None:
        self._spec = spec
        # Reentrant: `_account` creates a client while holding the lock. boto3 clients are
        # thread-safe, but the sessions that create them are not.
        self._lock = threading.RLock()
        self._made: dict[str, Any] = {}
        self._session: Any = None
        self._own_account = ""

    # Adaptive mode also slows down the client when EC2 throttles requests.
    ec2 = _Service("ec2", attempts=6, mode="adaptive")
    """For reads and idempotent requests."""
    launcher = _Service("ec2", attempts=1)
    """For launches, without retries."""
    ssm = _Service("ssm", attempts=4)
    pricing = _Service("pricing", attempts=2, region="us-east-1")
    """For on-demand rates, which are served by only a few regions."""
    iam = _Service("iam", attempts=4)
    quotas = _Service("service-quotas", attempts=3)
    cloudformation = _Service("cloudformation", attempts=4)
    s3 = _Service("s3", attempts=4)
    """For looking up and deleting buckets; objects are accessed with ``bucket``."""
    sts = _Service("sts", attempts=3)

    def caller(self) -> tuple[str, str]:
        """Return the account and the ARN of the credentials.

        Raises:
            ClientError: If the credentials are not valid.
            BotoCoreError: If there are none, or AWS cannot be reached.
        """
        who = self.sts.get_caller_identity()
        return str(who["Account"]), str(who["Arn"])

    @property
    def bucket(self) -> Bucket:
        """The spec's bucket, below its prefix."""
        with self._lock:
            if "bucket" not in self._made:
                self._made["bucket"] = Bucket(
                    self._spec.bucket,
                    self._spec.prefix.rstrip("/"),
                    S3_LIMITS,
                    setting="bucket",
                    make_client=self._s3,
                    owner=self.bucket_owner,
                )
            made: Bucket = self._made["bucket"]
            return made

    def bucket_at(self, name: str) -> Bucket:
        """Return a bucket without a prefix, not necessarily the spec's."""
        owner = self.bucket_owner if name == self._spec.bucket else None
        return Bucket(
            name, "", S3_LIMITS, setting="image.archive", make_client=self._s3, owner=owner
        )

    def bucket_owner(self) -> str:
        """Return the account that the bucket must belong to; empty for any.

        By default it is the account of our credentials, which is looked up once.

        Raises:
            StoreError: If the account cannot be determined; the message says what to configure
                instead.
            ClientError: If the credentials are not valid.
        """
        bucket = self._spec.bucket
        owner = named_owner(bucket) or self._spec.bucket_owner or self._account()
        expect_owner(bucket, owner)  # also applies to a run store and checkpoints in that bucket
        return expected_owner(bucket)

    def _account(self) -> str:
        with self._lock:
            if not self._own_account:
                try:
                    self._own_account = self.caller()[0]
                except AwsErrors as exc:
                    # Let the caller explain expired credentials, instead of blaming STS
                    # permissions.
                    if is_credentials_error(exc):
                        raise
                    raise StoreError(
                        f"the account of these credentials cannot be determined (STS: "
                        f"{message_of_error(exc)}), so the expected owner of bucket "
                        f"{self._spec.bucket} is unknown. No request was sent to it. Write "
                        "bucket_owner: '111122223333', the bucket's account, for this pool in "
                        "pools.yaml"
                    ) from exc
            return self._own_account

    def forget(self) -> None:
        """Drop all clients, so that new clients reload the expired credentials."""
        with self._lock:
            # Threads that still hold an old client fail once more, and then get a new one.
            self._made.clear()
            self._session = None

    def _s3(self, config: Config) -> Any:
        with self._lock:
            # `Bucket` requests a new client when the credentials have expired, so reload them.
            self._session = None
        return self._open().client("s3", endpoint_url=self._spec.endpoint_url, config=config)

    def _open(self) -> Any:
        with self._lock:
            if self._session is None:
                self._session = boto3.session.Session(
                    profile_name=self._spec.profile, region_name=self._spec.region
                )
            return self._session

    def _client(self, service: str, name: str, retries: dict[str, Any], region: str | None) -> Any:
        with self._lock:
            if name not in self._made:
                made = self._open().client(
                    service,
                    region_name=region or self._spec.region,
                    endpoint_url=self._spec.endpoint_url,
                    config=Config(
                        retries=retries,
                        connect_timeout=5,
                        read_timeout=20,
                        user_agent_extra="etrain-jupyter",
                    ),
                )
                # boto3's timeouts do not limit a whole request: see `s3_deadlines`.
                self._made[name] = guard(made)
            return self._made[name]


# ------------------------------------------------------------------------------------------- reads


def list_instances(
    ec2: Any, *, cluster_id: str = "", states: Sequence[str] = (), ids: Sequence[str] = ()
) -> list[Instance]:
    """Return the machines with our tag, oldest first.

    ``cluster_id``, ``states`` and ``ids`` are optional filters. Ids unknown to EC2 are ignored.
    """
    by_tag = {"Name": f"tag:{CLUSTER_TAG}", "Values": [cluster_id]}
    filters = [by_tag if cluster_id else {"Name": "tag-key", "Values": [CLUSTER_TAG]}]
    if states:
        filters.append({"Name": "instance-state-name", "Values": list(states)})
    if ids:
        # Use a filter: with InstanceIds=, the whole request fails if one id is unknown.
        filters.append({"Name": "instance-id", "Values": list(ids)})
    pages = ec2.get_paginator("describe_instances").paginate(Filters=filters)
    found = [
        _instance(data)
        for page in pages
        for reservation in page["Reservations"]
        for data in reservation["Instances"]
    ]
    return sorted(found, key=lambda one: (one.launched_at, one.id))


_AT = re.compile(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?:GMT|UTC)\)")


def _instance(data: Mapping[str, Any]) -> Instance:
    # Only this field contains the end time: "User initiated (2026-11-22 08:00:00 GMT)".
    transition = str(data.get("StateTransitionReason") or "")
    at = _AT.search(transition)
    ended = datetime.strptime(at[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC) if at else None
    state = data["State"]["Name"]
    return Instance(
        id=data["InstanceId"],
        type=data["InstanceType"],
        zone=data["Placement"]["AvailabilityZone"],
        lifecycle=data.get("InstanceLifecycle") or "on-demand",
        state=state,
        launched_at=data["LaunchTime"].timestamp(),
        private_ip=data.get("PrivateIpAddress") or "",
        reason=(data.get("StateReason") or {}).get("Code") or transition,
        # This field is also set for a stopped machine, which may still cost money.
        ended_at=ended.timestamp() if ended and state not in LIVING else None,
        tags={tag["Key"]: tag["Value"] for tag in data.get("Tags", ())},
    )


def describe_types(ec2: Any, types: Iterable[str]) -> dict[str, TypeFacts]:
    """Return the properties of types; types unknown to EC2 are left out."""
    filters = [{"Name": "instance-type", "Values": sorted(set(types))}]
    pages = ec2.get_paginator("describe_instance_types").paginate(Filters=filters)
    return {one["InstanceType"]: _facts(one) for page in pages for one in page["InstanceTypes"]}


def find_gpu_types(ec2: Any, gpu: GpuSpec) -> dict[str, TypeFacts]:
    """Return all x86 types with NVIDIA GPUs that are sold as spot and match ``gpu``."""
    filters = [
        {"Name": "supported-usage-class", "Values": ["spot"]},
        {"Name": "processor-info.supported-architecture", "Values": ["x86_64"]},
    ]
    pages = ec2.get_paginator("describe_instance_types").paginate(Filters=filters)
    known = {one["InstanceType"]: _facts(one) for page in pages for one in page["InstanceTypes"]}
    return {
        name: facts
        for name, facts in sorted(known.items())
        # A 24 GiB GPU is listed with slightly less.
        if facts.gpus == gpu.count and facts.gpu_memory_gib >= 0.9 * gpu.memory_gib
    }


def _facts(data: Mapping[str, Any]) -> TypeFacts:
    gpus = [
        one for one in data.get("GpuInfo", {}).get("Gpus", ()) if one["Manufacturer"] == "NVIDIA"
    ]
    memory = [one.get("MemoryInfo", {}).get("SizeInMiB", 0) / 1024 for one in gpus]
    return TypeFacts(
        gpus=sum(one["Count"] for one in gpus),
        gpu_memory_gib=min(memory, default=0.0),
        encrypts_traffic=bool(data.get("NetworkInfo", {}).get("EncryptionInTransitSupported")),
        architectures=tuple(data.get("ProcessorInfo", {}).get("SupportedArchitectures", ())),
        vcpus=data.get("VCpuInfo", {}).get("DefaultVCpus", 0),
    )


def placement_scores(ec2: Any, types: Sequence[str], count: int, region: str) -> dict[str, int]:
    """Return EC2's placement score for each zone, 1 to 10; empty if not available."""
    try:
        zones = ec2.describe_availability_zones()["AvailabilityZones"]
        answer = ec2.get_spot_placement_scores(
            InstanceTypes=list(types),
            TargetCapacity=max(1, count),
            SingleAvailabilityZone=True,
            RegionNames=[region],
        )
    except (*AwsErrors, ResponseParserError):
        return {}  # The role may lack permission, and scores only rank zones.
    # Scores use zone ids (use1-az1), but all other requests use the account's own names
    # (us-east-1a).
    names = {zone["ZoneId"]: zone["ZoneName"] for zone in zones}
    scores = answer.get("SpotPlacementScores", ())
    return {names.get(s.get("AvailabilityZoneId", ""), ""): int(s["Score"]) for s in scores}


def console_tail(ec2: Any, instance_id: str, num_lines: int = 20) -> str:
    """Return the end of a machine's console output; empty if EC2 has none."""
    try:
        answer = ec2.get_console_output(InstanceId=instance_id)
    except AwsErrors:
        return ""
    # boto3 has decoded the base64.
    lines = str(answer.get("Output") or "").replace("\r", "").rstrip().splitlines()
    return "\n".join(lines[-num_lines:])


# ------------------------------------------------------------------------------------------- writes


def terminate(ec2: Any, ids: Sequence[str]) -> None:
    """Terminate machines, even if EC2 does not know some of the ids (yet).

    Neither a response nor an error proves whether the machines will terminate; list them again.
    """
    if not ids:
        return
    try:
        ec2.terminate_instances(InstanceIds=list(ids))
    except ClientError as exc:
        if not code_of(exc).startswith("InvalidInstanceID"):
            raise
        # EC2 rejects the whole request if one id is unknown, as it may be just after a launch.
        # Terminate one by one instead; the caller lists the machines and retries the rest.
        for id in ids if len(ids) > 1 else ():
            terminate(ec2, [id])


def tag_list(tags: Mapping[str, str]) -> list[dict[str, str]]:
    """Return tags in the format of EC2 requests."""
    return [{"Key": key, "Value": value} for key, value in tags.items()]
