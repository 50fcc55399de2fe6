"""The names, tags and settings of one pool's resources in an account."""

from __future__ import annotations

import getpass
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from botocore.exceptions import ClientError

from etrain_jupyter.errors import ConfigError
from etrain_jupyter.plugins.ec2.aws_messages import message_of_error
from etrain_jupyter.plugins.ec2.ec2_api import Clients
from etrain_jupyter.plugins.ec2.reaping import find_tagged
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec
from etrain_jupyter.storage.objects.s3_messages import code_of

POOL_TAG = "etrain:made-for"
"""Tag of everything that ``init`` creates: the pool's name and region, such as
``spot@us-east-1``."""
OWNER_TAG = "etrain:owner"
DENIED = ("AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "AllAccessDisabled")
MISSING = ("404", "NoSuchBucket", "NotFound")
WITHOUT_IAM = (
    "If your organization forbids this, write a CloudFormation template for an administrator with "
    "--template FILE, or name an instance profile that exists with --role PROFILE"
)

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,22}[a-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class Site:
    """Names and settings of a pool's resources in an account."""

    name: str
    spec: AwsSpotSpec
    clients: Clients
    account: str

    @property
    def stack_name(self) -> str:
        """Name of the stack, and of its security group."""
        return f"etrain-{self.name}"

    @property
    def launcher_policy(self) -> str:
        """Name of the policy for users and roles that start clusters."""
        return f"etrain-{self.name}-launcher"

    def tags(self) -> dict[str, str]:
        """Return the tags of the stack, which CloudFormation copies to its resources."""
        return {POOL_TAG: self.mark, OWNER_TAG: self.spec.owner or getpass.getuser()}

    @property
    def mark(self) -> str:
        """Value of the tag that identifies the pool."""
        return f"{self.name}@{self.spec.region}"

    def is_ours(self, tags: Mapping[str, str]) -> bool:
        """Return whether a resource with these tags was created for this pool."""
        return tags.get(POOL_TAG) == self.mark


@dataclass(frozen=True, kw_only=True)
class Dialog:
    """Show what a command will change in an account, and ask for permission."""

    ask: Callable[[str], str]
    """Asks a question, and returns the answer."""
    say: Callable[[str], object]
    """Shows a line."""
    is_confirmed: bool = False
    """Ask no questions."""
    is_dry_run: bool = False
    """Only show the steps."""

    def show(self, site: Site, notes: Sequence[str], steps: Sequence[str]) -> None:
        """Show the steps, and remarks."""
        self.say(f"pool {site.name} in {site.spec.region}, AWS account {site.account}")
        for note in notes:
            self.say(f"  {note}")
        if steps:
            self.say("to do:")
        for step in steps:
            self.say(f"  {step}")

    def refusal(self, verb: str, nothing: str) -> str:
        """Return why the steps are not carried out; empty if the user agrees."""
        if self.is_dry_run:
            return f"{nothing} Run the command without --dry-run to {verb} them."
        question = f"{verb.capitalize()} them? [y/N] "
        if self.is_confirmed or self.ask(question).strip().lower() in ("y", "yes"):
            return ""
        return nothing


def running_clusters(clients: Clients, spec: AwsSpotSpec) -> list[str]:
    """Return the ids of the pool's clusters that have resources on EC2."""
    home = f"s3://{spec.bucket}/{spec.prefix}"
    found = find_tagged(clients, spec.region)
    return sorted({one.cluster_id for one in found if one.home.startswith(home)})


def check_name(name: str) -> None:
    """Check the name of a pool whose resources are named after it.

    Raises:
        ConfigError: If it cannot be part of a bucket's name.
    """
    if not _NAME.fullmatch(name) or name == "local":
        raise ConfigError(
            f"a pool cannot be called '{name}'. Nothing was created",
            hint="use 1 to 24 lower-case letters, digits and dashes, other than 'local'",
        )


def tags_from(pairs: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return tags as a mapping."""
    return {one["Key"]: one["Value"] for one in pairs}


def is_missing(exc: ClientError) -> bool:
    """Return whether an error says that a resource does not exist."""
    return code_of(exc) in MISSING


def reason_of(exc: BaseException, advice: str = "") -> str:
    """Return the meaning of an error from AWS, and what to do about it."""
    code = code_of(exc) if isinstance(exc, ClientError) else ""
    if code in DENIED and advice:
        return f"AWS does not allow it to these credentials ({code}). {advice}"
    if code == "BucketAlreadyExists":
        return (
            "another AWS account has a bucket of this name; names are unique over all accounts "
            "(BucketAlreadyExists). Choose another one with --bucket NAME"
        )
    if code in ("LimitExceeded", "TooManyBuckets", "SecurityGroupLimitExceeded"):
        return (
            f"the account's limit for such resources is reached ({code}). Remove unused ones, or "
            "request more at Service Quotas"
        )
    return message_of_error(exc).rstrip(".")
