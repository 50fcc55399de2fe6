"""Configuration of a pool of kind ``aws-spot``; all keys but two have defaults.

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

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from etrain_jupyter.config.fields import Section, check_word, fault
from etrain_jupyter.config.source_map import NOWHERE, SourceMap, in_words
from etrain_jupyter.config.store_url import S3, split_s3_url
from etrain_jupyter.plugins.ec2.capacity_spec import CapacitySpec, WorkersSpec
from etrain_jupyter.pools.spec_fields import Duration, Names, Usd, Variables, auto_or_list
from etrain_jupyter.pools.spec_pool import PoolSpec

KIND = "aws-spot"
DEFAULT_AMI = (
    "ssm:/aws/service/deeplearning/ami/x86_64/oss-nvidia-driver-gpu-pytorch-2.7-ubuntu-22.04/"
    "latest/ami-id"
)


DEFAULT_PYTHON = "/opt/pytorch/bin/python"


class BudgetSpec(Section):
    """Cost limits, enforced by not launching more machines and by stopping in time."""

    max_hourly: Usd | None = None
    """US dollars an hour for all machines of the cluster."""
    max_total: Usd | None = None
    """US dollars over the cluster's lifetime."""
    on_exceed: Literal["checkpoint-and-stop"] = "checkpoint-and-stop"
    """Action shortly before ``max_total`` is spent; the only choice so far."""


class LifetimeSpec(Section):
    """Timeouts after which machines and the cluster shut down by themselves."""

    max: Annotated[Duration, Field(ge=60)] = 12 * 3600.0
    """Maximum lifetime of a machine; it is replaced if it is still needed."""
    idle: Duration = 20 * 60.0
    """The cluster ends after this time without a job."""
    linger: Duration = 120.0
    """Time to keep idle workers, warm for the next job."""
    lease_ttl: Duration = 300.0
    """Nodes turn themselves off when the head has not renewed its lease for this time."""
    boot: Annotated[Duration, Field(ge=60)] = 15 * 60.0
    """Timeout from launch until a worker connects; after it, the node turns itself off."""
    max_boot_failures: Annotated[int, Field(ge=1)] = 3
    """Launches stop after this number of consecutive nodes whose workers never connected."""


def _digest(value: Any, *, hint: str) -> Any:
    if value is None or (isinstance(value, str) and re.fullmatch(r"[0-9a-fA-F]{64}", value)):
        return value.lower() if value else value
    raise fault(
        f"{{key}} must be a SHA-256, 64 hexadecimal digits, not {in_words(value)}", hint=hint
    )


class EnvironmentSpec(Section):
    """The kernel's environment, which nodes install from the pool's bucket."""

    exclude: Names = ()
    """Packages that the nodes do not need, such as [jupyterlab, 'jupyter*']."""
    wheels: str | None = None
    """Folder here with wheels of packages that no package index has."""
    manifest: str | None = None
    """SHA-256 of an environment in the bucket; None to store the kernel's when a cluster starts."""

    @field_validator("manifest", mode="before")
    @classmethod
    def _like_a_manifest(cls, value: Any) -> Any:
        return _digest(value, hint="remove the key, to use the kernel's environment")


class ImageSpec(Section):
    """Image and set-up of a node."""

    ami: str = DEFAULT_AMI
    """``ami-...``, or ``ssm:`` and the name of a parameter with the image's id."""
    environment: EnvironmentSpec | None = None
    """``kernel``, or a mapping: nodes install the kernel's environment. The default, if none of
    ``python``, ``setup`` and ``archive`` is set."""
    python: str | None = None
    """Interpreter in the image with etrain-jupyter, at the kernel's versions. If ``setup`` or
    ``archive`` is set without it, /opt/pytorch/bin/python."""
    setup: Names = ()
    """Shell commands that run first, as root."""
    archive: str | None = None
    """``s3://bucket/key`` of a .tar.gz to unpack at ``/``, for example an environment."""
    archive_sha256: str | None = None
    """SHA-256 of the archive, from `sha256sum environment.tar.gz`; required with ``archive``."""

    @property
    def is_kernel(self) -> bool:
        """True if nodes install the kernel's environment."""
        others = (self.python, self.archive, self.setup)
        return self.environment is not None or not any(others)

    @property
    def interpreter(self) -> str:
        """The interpreter in the image, for nodes that do not install the kernel's environment."""
        return self.python or DEFAULT_PYTHON

    @property
    def manifest(self) -> str:
        """SHA-256 of the environment to install; empty if none was stored."""
        return self.environment.manifest or "" if self.environment is not None else ""

    @field_validator("environment", mode="before")
    @classmethod
    def _kernel_or_mapping(cls, value: Any) -> Any:
        if value == "kernel":
            return {}
        if value is None or isinstance(value, Mapping | EnvironmentSpec):
            return value
        raise fault(
            f"{{key}} must be kernel, or a mapping, not {in_words(value)}",
            hint="write environment: kernel, or environment: {exclude: [jupyterlab]}",
        )

    @model_validator(mode="after")
    def _one_interpreter(self) -> Self:
        if self.environment is not None and self.python is not None:
            raise fault(
                f"image.environment and image.python ({self.python}) are both set",
                hint="remove python, to install the kernel's environment, or environment, to use "
                "the image's",
                path=("python",),
                at_key=True,
            )
        return self

    @field_validator("ami", mode="after")
    @classmethod
    def _like_an_image(cls, value: str) -> str:
        if not re.fullmatch(r"ami-[0-9a-f]{8,17}|ssm:/[\w./-]+", value):
            raise fault(
                f"{{key}} '{value}' is not an image",
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
                raise ValueError("is not s3://bucket/key")
            _, key = split_s3_url(value)
            if not key:
                raise ValueError("names a bucket, but no object in it")
        except ValueError as exc:
            raise fault(f"{{key}} {exc}", hint="write s3://my-bucket/environment.tar.gz") from None
        return value

    @field_validator("archive_sha256", mode="before")
    @classmethod
    def _like_a_digest(cls, value: Any) -> Any:
        return _digest(value, hint="write what `sha256sum environment.tar.gz` prints, in quotes")

    @model_validator(mode="after")
    def _digest_of_something(self) -> Self:
        if self.archive_sha256 and not self.archive:
            raise fault(
                "image.archive_sha256 is set, but image.archive is not",
                hint="set image.archive, or remove the digest",
                path=("archive_sha256",),
                at_key=True,
            )
        return self

    @field_validator("python", mode="after")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        # The path is written into user-data unquoted: allow no characters that a shell interprets.
        if value is not None and not re.fullmatch(r"[\w./+-]+", value):
            raise fault(f"{{key}} '{value}' is not the path of an interpreter")
        return value


class NetworkSpec(Section):
    """Subnets and security group of the nodes."""

    subnets: Literal["auto"] | Names = "auto"
    """auto means the default VPC's subnets; nodes need a route to S3 and to the head."""
    security_group: str = "auto"
    """auto creates and removes one for the cluster, which admits only its own members."""
    public_ip: bool = False
    """Give nodes a public address; without one, subnets need an endpoint or NAT for S3."""
    require_nitro_encryption: bool = False
    """Use only types that encrypt traffic between nodes: torch's own traffic is not encrypted."""

    @field_validator("subnets", mode="before")
    @classmethod
    def _list_or_auto(cls, value: Any) -> Any:
        return auto_or_list(value, "subnets", "[subnet-0a1b2c3d]")


class IamSpec(Section):
    """Instance profiles of the machines."""

    instance_profile: str = "etrain-node"
    """Instance profile of nodes; ``%etrain pools policy`` prints its role's policy."""
    head_profile: str = "etrain-head"
    """Instance profile of the machine for ``head: on-demand``, which launches the nodes."""


class InterruptionSpec(Section):
    """Behaviour when EC2 reclaims a machine."""

    imds_poll: Duration = 2.0
    """Interval at which nodes poll for a notice; EC2 sends it two minutes in advance."""
    on_rebalance: Literal["replace", "ignore"] = "replace"
    """replace launches a new node and saves a checkpoint; the old one continues to train."""
    drain: Duration = 90.0
    """Maximum time to reach a step boundary and to leave."""
    first_hour: Literal["wait-for-ec2", "power-off"] = "wait-for-ec2"
    """A spot machine that EC2 reclaims in its first hour is free; one that powers off is not."""


class VolumeSpec(Section):
    """The disk of a node."""

    gib: Annotated[int, Field(ge=1)] = 80
    """Size; the image sets a minimum."""
    type: Literal["gp3", "gp2"] = "gp3"
    """EC2's volume type. The disk is encrypted, and deleted with its machine."""


class AwsSpotSpec(PoolSpec):
    """EC2 spot machines."""

    region: str
    """Region of EC2 and of the bucket, for example us-east-1."""
    bucket: str
    """Bucket for the nodes' configuration and the head's lease and ledger."""
    prefix: str = "etrain/"
    """Prefix of all keys in the bucket."""
    bucket_owner: str | None = None
    """Account (12 digits) that the bucket must belong to; None for the account of the credentials,
    `any` for no check."""
    endpoint_url: str | None = None
    """Endpoint to use instead of AWS, for tests."""
    profile: str | None = None
    """Profile in ~/.aws; None to use the environment."""
    head: Literal["notebook", "on-demand"] = "notebook"
    """Where the scheduler runs: on this machine, if nodes can reach it, or on its own machine."""
    head_host: str | None = None
    """Address of this machine at which nodes reach its scheduler; None to detect it."""
    head_tunnel: Literal["none", "ssm"] = "none"
    """Route to the machine of ``head: on-demand``: direct, or through Session Manager."""
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
    environment: Variables = Field(default_factory=dict)
    """Variables for workers and trainers. No secrets: they are stored in the bucket."""
    tick: Duration = 5.0
    """Interval at which EC2 is polled."""
    owner: str | None = None
    """Value of the owner tag on all resources; None for the user's name on this machine."""

    @classmethod
    def parse(cls, data: Mapping[str, Any], source: SourceMap = NOWHERE) -> Self:
        """Parse a pool's keys, which may include ``pool`` or ``kind``.

        >>> AwsSpotSpec.parse({"region": "us-east-1", "bucket": "my-bucket"}).workers.max
        4
        """
        # A wrong kind is kept, so that it is reported as an unknown key.
        own = {k: v for k, v in data.items() if k not in ("pool", "kind") or v != KIND}
        return super().parse(own, source)

    @field_validator("region", mode="after")
    @classmethod
    def _like_a_region(cls, value: str) -> str:
        if not re.fullmatch(r"[a-z]{2}(-[a-z]+)+-\d", value):
            # us-east-1a is a zone of us-east-1.
            hint = f"write {value[:-1]}" if re.fullmatch(r"[a-z-]+-\d[a-z]", value) else ""
            raise fault(
                f"{{key}} '{value}' is not a region", hint=hint or "write for example us-east-1"
            )
        return value

    @field_validator("bucket", mode="after")
    @classmethod
    def _like_a_bucket(cls, value: str) -> str:
        try:
            _, prefix = split_s3_url(value if value.startswith(S3) else S3 + value)
        except ValueError as exc:
            raise fault(f"{{key}} {exc}") from None
        # s3://bucket/folder would set two keys at once; the hint shows both.
        if value.startswith(S3) or prefix:
            raise fault(
                f"{{key}} '{value}' must be a bucket's name only",
                hint="write bucket: name, prefix: folder/",
            )
        return value

    @field_validator("prefix", mode="after")
    @classmethod
    def _ends_with_slash(cls, value: str) -> str:
        try:
            _, prefix = split_s3_url(f"{S3}bucket/{value}")
        except ValueError as exc:
            raise fault(f"{{key}} '{value}' {exc}") from None
        # split_s3_url has normalized the slashes; keys are appended directly.
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

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        # The head renews the lease every quarter of lease_ttl, and can do so only once per tick.
        if self.lifetime.lease_ttl < 4 * self.tick:
            raise fault(
                f"lifetime.lease_ttl of {self.lifetime.lease_ttl:g} s is too short to be renewed "
                f"four times with tick {self.tick:g} s",
                hint=f"write lifetime: {{lease_ttl: {4 * self.tick:g} s}} or more",
                path=("lifetime", "lease_ttl"),
            )
        return self

    def with_manifest(self, digest: str) -> AwsSpotSpec:
        """Return the spec of a cluster whose nodes install a stored environment."""
        known = self.image.environment or EnvironmentSpec()
        environment = EnvironmentSpec(
            **{**known.model_dump(exclude_unset=True), "manifest": digest}
        )
        # A copy, so that `to_dict` contains no defaults.
        image = self.image.model_copy(update={"environment": environment})
        return self.model_copy(update={"image": image})

    def home(self, cluster_id: str) -> str:
        """Return the URL of a cluster's objects."""
        return f"{S3}{self.bucket}/{self.prefix}clusters/{cluster_id}"
