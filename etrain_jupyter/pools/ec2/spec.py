"""What a pool of kind ``aws-spot`` can be told; every key but two has a default.

::

    region: us-east-1
    bucket: my-bucket
    workers: {max: 8}
    capacity: {types: [g5.xlarge, g6.xlarge, g4dn.xlarge], on_demand: {after: 120s, max: 2}}
    budget: {max_hourly: 6.00, max_total: 40.00}
    lifetime: {max: 12h, idle: 20m}
    image: {ami: ssm:/aws/service/..., python: /opt/venv/bin/python}
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PlainSerializer, field_validator, model_validator

from etrain_jupyter.config.cell import parse_section
from etrain_jupyter.config.fields import Section, check_word, fault, interval_parts
from etrain_jupyter.config.source_map import NOWHERE, SourceMap, in_words
from etrain_jupyter.config.store_url import S3, split_s3_url

KIND = "aws-spot"
DEFAULT_TYPES = ("g5.xlarge", "g6.xlarge", "g4dn.xlarge")
"""One GPU each. With fewer than three types, EC2 scores every zone as bad."""
DEFAULT_AMI = (
    "ssm:/aws/service/deeplearning/ami/x86_64/oss-nvidia-driver-gpu-pytorch-2.7-ubuntu-22.04/"
    "latest/ami-id"
)


def _duration(value: Any) -> float:
    """Return the seconds of what was typed."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise fault(
            f"the number {value} needs a unit", hint=f"write '{value} s', '{value} min' or '2 h'"
        )
    parts = interval_parts(value)
    if parts["unit"] != "s":
        raise fault(f"{{key}} is a time, not '{value}'", hint="write for example '90 s' or '5 min'")
    return float(parts["value"])


Duration = Annotated[
    float, BeforeValidator(_duration), PlainSerializer(lambda seconds: f"{seconds!r} s")
]
"""Seconds; typed as ``120s``, ``5 min`` or ``12h``."""


def _usd(value: Any) -> Any:
    """Take a whole number for an amount, and say what ``$6`` should be."""
    if isinstance(value, str):
        raise fault(
            f"{{key}} must be a number of US dollars, not {in_words(value)}",
            hint="write for example 6.00",
        )
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


Usd = Annotated[float, BeforeValidator(_usd), Field(gt=0, allow_inf_nan=False)]
Names = Annotated[
    tuple[str, ...], BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else v)
]


def _auto_or_list(value: Any, what: str, example: str) -> Any:
    """Return auto, or a tuple of names; refuse anything else, a single name too."""
    if value == "auto":
        return value
    if isinstance(value, list | tuple):
        return tuple(value)
    raise fault(
        f"{{key}} must be auto or a list of {what}, not {in_words(value)}",
        hint=f"write for example {example}",
    )


class WorkersSpec(Section):
    """How many workers there are; one a GPU."""

    min: Annotated[int, Field(ge=0)] = 0
    """So many are kept while the cluster is up, whether or not a job needs them."""
    want: Annotated[int | None, Field(ge=0)] = None
    """So many are started with the cluster; None for ``min``."""
    max: Annotated[int, Field(ge=1)] = 4
    """There are never more."""
    per_node: Annotated[int, Field(ge=0)] = 0
    """Workers of one machine; 0 is one a GPU, or one where there is none."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        for key in ("min", "want"):
            if (value := getattr(self, key)) is not None and value > self.max:
                raise fault(
                    f"workers.{key}={value} is more than workers.max={self.max}",
                    hint=f"write workers.max: {value}, or lower workers.{key}",
                    path=("workers", key),
                )
        return self


class GpuSpec(Section):
    """Which types of machines will do, instead of their names."""

    memory_gib: float = 0.0
    """Least memory of a GPU, ``16`` or ``">=16"``."""
    count: Annotated[int, Field(ge=1)] = 1
    """GPUs of one machine."""

    @field_validator("memory_gib", mode="before")
    @classmethod
    def _at_least(cls, value: Any) -> Any:
        if isinstance(value, str) and (found := re.fullmatch(r"\s*>=\s*([0-9.]+)\s*", value)):
            return float(found[1])
        return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


class OnDemandSpec(Section):
    """Machines at the full price, which EC2 does not take away."""

    base: Annotated[int, Field(ge=0)] = 0
    """The first so many workers."""
    after: Annotated[Duration, Field(gt=0)] = 120.0
    """Of so long a shortage of spot machines, workers that are missing may come on demand."""
    max: Annotated[int, Field(ge=0)] = 0
    """Most workers on demand, ``base`` included; 0 with no ``base`` never pays the full price."""

    @property
    def most(self) -> int:
        """The larger of ``base`` and ``max``."""
        return max(self.base, self.max)


class CapacitySpec(Section):
    """Which machines, and where."""

    types: Annotated[Names, Field(min_length=1)] = DEFAULT_TYPES
    """Any of these will do."""
    gpu: GpuSpec | None = None
    """Instead of ``types``: all types that have such GPUs."""
    zones: Literal["auto"] | Names = "auto"
    """Availability zones; auto is every one that has a subnet."""
    placement: Literal["single-az", "spread"] = "single-az"
    """single-az keeps workers together: traffic between zones costs more than GPUs."""
    on_shortage: Literal["shrink", "migrate", "spread"] = "migrate"
    """Of single-az, when the zone has no more: have fewer, move all of them, or use other zones."""
    allocation: Literal[
        "price-capacity-optimized", "capacity-optimized", "lowest-price", "diversified"
    ] = "price-capacity-optimized"
    """EC2's own choice among types of a zone."""
    on_demand: OnDemandSpec = OnDemandSpec()

    @model_validator(mode="before")
    @classmethod
    def _one_of_two(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("types") and data.get("gpu"):
            raise fault(
                "capacity.types and capacity.gpu cannot both hold",
                hint="keep types for machines by name, or gpu for what they must have",
                path=("capacity", "gpu"),
                at_key=True,
            )
        return data

    @field_validator("types", mode="after")
    @classmethod
    def _like_types(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if not re.fullmatch(r"[a-z][a-z0-9-]*\.[a-z0-9-]+", name):
                raise fault(f"'{name}' is no type of machine", hint="write for example g5.xlarge")
        return tuple(dict.fromkeys(value))

    @field_validator("zones", mode="before")
    @classmethod
    def _list_or_auto(cls, value: Any) -> Any:
        return _auto_or_list(value, "zones", "[us-east-1a, us-east-1b]")

    @field_validator("placement", mode="before")
    @classmethod
    def _known_placement(cls, value: Any) -> Any:
        return check_word(value, ("single-az", "spread"), usual="placement: single-az")

    @field_validator("on_shortage", mode="before")
    @classmethod
    def _known_shortage(cls, value: Any) -> Any:
        return check_word(value, ("shrink", "migrate", "spread"), usual="on_shortage: shrink")


class BudgetSpec(Section):
    """What it may cost. Both bounds are kept by not launching and by stopping in time."""

    max_hourly: Usd | None = None
    """US dollars an hour over all machines of the cluster."""
    max_total: Usd | None = None
    """US dollars over the cluster's life."""
    on_exceed: Literal["checkpoint-and-stop"] = "checkpoint-and-stop"
    """What is done shortly before ``max_total`` is spent. There is no other choice yet."""


class LifetimeSpec(Section):
    """When machines and the cluster end, whoever forgets them."""

    max: Annotated[Duration, Field(ge=60)] = 12 * 3600.0
    """A machine ends itself after that time, and is replaced if it is still wanted."""
    idle: Duration = 20 * 60.0
    """Without a job for that long, the cluster ends."""
    linger: Duration = 120.0
    """Workers that nobody wants any more are kept that long, warm for the next job."""
    lease_ttl: Duration = 300.0
    """Nodes end themselves when the head has not renewed its lease for so long."""
    boot: Annotated[Duration, Field(ge=60)] = 15 * 60.0
    """From launch to the first sign of a worker; a node that takes longer ends itself."""
    max_boot_failures: Annotated[int, Field(ge=1)] = 3
    """After so many nodes in a row that never said hello, no more are launched."""


class ImageSpec(Section):
    """What a node starts with."""

    ami: str = DEFAULT_AMI
    """``ami-...``, or ``ssm:`` and the name of the parameter that holds one."""
    python: str = "/opt/pytorch/bin/python"
    """The interpreter that has etrain-jupyter, at the kernel's versions."""
    setup: Names = ()
    """Lines of a shell that run first, as root."""
    archive: str | None = None
    """``s3://bucket/key`` of a .tar.gz that is unpacked at ``/``, for example an environment."""
    archive_sha256: str | None = None
    """Its SHA-256, which `sha256sum environment.tar.gz` prints; nodes unpack nothing else."""

    @field_validator("ami", mode="after")
    @classmethod
    def _like_an_image(cls, value: str) -> str:
        if not re.fullmatch(r"ami-[0-9a-f]{8,17}|ssm:/[\w./-]+", value):
            raise fault(
                f"{{key}} '{value}' names no image",
                hint="write ami-0123456789abcdef0, or ssm:/aws/service/... for a parameter",
            )
        return value

    @field_validator("archive", mode="after")
    @classmethod
    def _like_an_object(cls, value: str | None) -> str | None:
        if value is None:
            return None
        try:
            if not value.startswith(S3):
                raise ValueError("is no s3://bucket/key")
            _, key = split_s3_url(value)
            if not key:
                raise ValueError("names a bucket, but no object in it")
        except ValueError as exc:
            raise fault(f"{{key}} {exc}", hint="write s3://my-bucket/environment.tar.gz") from None
        return value

    @field_validator("archive_sha256", mode="before")
    @classmethod
    def _like_a_digest(cls, value: Any) -> Any:
        if value is None or (isinstance(value, str) and re.fullmatch(r"[0-9a-fA-F]{64}", value)):
            return value.lower() if value else value
        raise fault(
            f"{{key}} must be a SHA-256, 64 hexadecimal digits, not {in_words(value)}",
            hint="write what `sha256sum environment.tar.gz` prints, in quotes",
        )

    @model_validator(mode="after")
    def _digest_of_something(self) -> Self:
        if self.archive_sha256 and not self.archive:
            raise fault(
                "image.archive_sha256 is the digest of nothing: there is no image.archive",
                hint="name the archive, or remove the digest",
                path=("archive_sha256",),
                at_key=True,
            )
        return self

    @field_validator("python", mode="after")
    @classmethod
    def _absolute(cls, value: str) -> str:
        if not re.fullmatch(r"[\w./+-]+", value):
            raise fault(f"{{key}} '{value}' is no path of an interpreter")
        return value


class NetworkSpec(Section):
    """Where nodes stand, and who reaches them."""

    subnets: Literal["auto"] | Names = "auto"
    """auto is the default VPC's; nodes need a way to S3 and EC2's address of the head."""
    security_group: str = "auto"
    """auto makes one for the cluster that lets in its own members only, and removes it."""
    public_ip: bool = False
    """Whether nodes get an address on the internet; without one, subnets need an endpoint or NAT
    for S3."""
    require_nitro_encryption: bool = False
    """Only types that encrypt the traffic between nodes: torch's own is in the clear."""

    @field_validator("subnets", mode="before")
    @classmethod
    def _list_or_auto(cls, value: Any) -> Any:
        return _auto_or_list(value, "subnets", "[subnet-0a1b2c3d]")


class IamSpec(Section):
    """Who the nodes are."""

    instance_profile: str = "etrain-node"
    """Name of an instance profile; ``%etrain pools policy`` prints what its role may do."""
    head_profile: str = "etrain-head"
    """The same of the machine of ``head: on-demand``, which launches the others."""


class InterruptionSpec(Section):
    """What happens when EC2 wants a machine back."""

    imds_poll: Duration = 2.0
    """How often nodes look for a notice; EC2 gives it two minutes ahead."""
    on_rebalance: Literal["replace", "ignore"] = "replace"
    """replace launches another node at once and saves a checkpoint; the old one trains on."""
    drain: Duration = 90.0
    """Most time for a step boundary and for moving out."""
    first_hour: Literal["wait-for-ec2", "power-off"] = "wait-for-ec2"
    """A spot machine that EC2 takes in its first hour is free; one that leaves itself is not."""


class VolumeSpec(Section):
    """The disk of a node."""

    gib: Annotated[int, Field(ge=1)] = 80
    """Its size; an image says how much it needs at least."""
    type: Literal["gp3", "gp2"] = "gp3"
    """As EC2 calls it. It is encrypted, and goes with its machine."""


class AwsSpotSpec(Section):
    """Spot machines of EC2."""

    region: str
    """Of EC2 and of the bucket, for example us-east-1."""
    bucket: str
    """Where nodes find their configuration and the head keeps its lease and ledger."""
    prefix: str = "etrain/"
    """Below which everything of ours in the bucket lies."""
    bucket_owner: str | None = None
    """Account (12 digits) that the bucket must belong to; None for the account of the credentials,
    `any` for no check."""
    endpoint_url: str | None = None
    """Another place than AWS, for tests."""
    profile: str | None = None
    """Of ~/.aws; None for what the environment says."""
    head: Literal["notebook", "on-demand"] = "notebook"
    """Where the scheduler runs: on this machine, which nodes must reach, or on one of its own."""
    head_host: str | None = None
    """Address of this machine at which nodes reach its scheduler; None to find it out."""
    head_tunnel: Literal["none", "ssm"] = "none"
    """How the machine of ``head: on-demand`` is reached: directly, or by Session Manager."""
    head_type: str = "t3.medium"
    """Type of the machine for ``head: on-demand``."""
    workers: WorkersSpec = WorkersSpec()
    capacity: CapacitySpec = CapacitySpec()
    budget: BudgetSpec = BudgetSpec()
    lifetime: LifetimeSpec = LifetimeSpec()
    image: ImageSpec = ImageSpec()
    network: NetworkSpec = NetworkSpec()
    iam: IamSpec = IamSpec()
    interruption: InterruptionSpec = InterruptionSpec()
    volume: VolumeSpec = VolumeSpec()
    environment: dict[str, str] = Field(default_factory=dict)
    """Variables for workers and trainers. No secrets: it lies in the bucket."""
    tick: Duration = 5.0
    """How often EC2 is looked at."""
    owner: str | None = None
    """Who pays; a tag on everything. None for the user's name on this machine."""

    @classmethod
    def parse(cls, data: Mapping[str, Any], source: SourceMap = NOWHERE) -> AwsSpotSpec:
        """Read a pool's keys.

        Args:
            data: The group of ``pools.yaml``; ``pool`` or ``kind`` may stand in it.
            source: Where each key stands in the file, with paths from that group on.

        Raises:
            ConfigError: With the path, and the line where there is a file.

        >>> AwsSpotSpec.parse({"region": "us-east-1", "bucket": "my-bucket"}).workers.max
        4
        """
        own = {k: v for k, v in data.items() if k not in ("pool", "kind") or v != KIND}
        return parse_section(own, cls, source)

    def to_json(self) -> str:
        """Return what ``from_json`` reads; only what differs from the defaults."""
        return json.dumps(self.model_dump(mode="json", exclude_unset=True))

    @classmethod
    def from_json(cls, text: str) -> AwsSpotSpec:
        """Rebuild what ``to_json`` wrote."""
        return cls.parse(json.loads(text))

    @field_validator("region", mode="after")
    @classmethod
    def _like_a_region(cls, value: str) -> str:
        if not re.fullmatch(r"[a-z]{2}(-[a-z]+)+-\d", value):
            hint = f"write {value[:-1]}" if re.fullmatch(r"[a-z-]+-\d[a-z]", value) else ""
            raise fault(
                f"{{key}} '{value}' is no region", hint=hint or "write for example us-east-1"
            )
        return value

    @field_validator("bucket", mode="after")
    @classmethod
    def _like_a_bucket(cls, value: str) -> str:
        try:
            _, prefix = split_s3_url(value if value.startswith(S3) else S3 + value)
        except ValueError as exc:
            raise fault(f"{{key}} {exc}") from None
        if value.startswith(S3) or prefix:
            raise fault(
                f"{{key}} '{value}' is more than a name", hint="write bucket: name, prefix: folder/"
            )
        return value

    @field_validator("prefix", mode="after")
    @classmethod
    def _ends_with_slash(cls, value: str) -> str:
        try:
            _, prefix = split_s3_url(f"{S3}bucket/{value}")
        except ValueError as exc:
            raise fault(f"{{key}} '{value}' {exc}") from None
        return f"{prefix}/" if prefix else ""

    @field_validator("bucket_owner", mode="before")
    @classmethod
    def _like_an_account(cls, value: Any) -> Any:
        # Twelve digits without quotes are a number in YAML; a leading 0 would be lost.
        text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
        if value is None or (isinstance(text, str) and re.fullmatch(r"any|\d{12}", text)):
            return text
        raise fault(
            f"{{key}} must be the 12 digits of an account, or any, not {in_words(value)}",
            hint="write bucket_owner: '111122223333'",
        )

    @field_validator("head", mode="before")
    @classmethod
    def _known_head(cls, value: Any) -> Any:
        return check_word(value, ("notebook", "on-demand"), usual="head: notebook")

    @field_validator("environment", mode="before")
    @classmethod
    def _texts(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        for name, word in value.items():
            if isinstance(word, bool) or not isinstance(word, str | int | float):
                raise fault(f"{{key}}.{name} must be a text or a number, not {in_words(word)}")
        return {name: str(word) for name, word in value.items()}

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if self.lifetime.lease_ttl < 4 * self.tick:
            raise fault(
                f"lifetime.lease_ttl of {self.lifetime.lease_ttl:g} s is too short to be renewed "
                f"four times with tick {self.tick:g} s",
                hint=f"write lifetime: {{lease_ttl: {4 * self.tick:g} s}} or more",
                path=("lifetime", "lease_ttl"),
            )
        return self

    def home(self, cluster_id: str) -> str:
        """Return where nodes find their cluster, as a URL."""
        return f"{S3}{self.bucket}/{self.prefix}clusters/{cluster_id}"
