"""The names, tags and settings of one pool's resources in an account."""

from __future__ import annotations

import getpass
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from botocore.exceptions import ClientError

from etrain_jupyter.errors import ConfigError, PoolError
from etrain_jupyter.plugins.ec2.aws_messages import AwsErrors, message_of_error
from etrain_jupyter.plugins.ec2.ec2_api import Clients
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec
from etrain_jupyter.storage.objects.s3_messages import code_of

POOL_TAG = "etrain:made-for"
"""Tag of everything that ``init`` creates: the pool's name and region, such as
``spot@us-east-1``."""
OWNER_TAG = "etrain:owner"
STACK_TAG = "aws:cloudformation:stack-name"
"""Tag that CloudFormation adds to the resources of a stack."""
DENIED = ("AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "AllAccessDisabled")
MISSING = ("NoSuchEntity", "404", "NoSuchBucket", "NotFound", "InvalidGroup.NotFound")

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,22}[a-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class Step:
    """One request that changes the account, or the pools file."""

    text: str
    """The change, such as ``create security group etrain-spot``."""
    run: Callable[[], object] = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class View:
    """The steps that a resource needs, and remarks about it."""

    steps: Sequence[Step] = ()
    notes: Sequence[str] = ()


class Piece(Protocol):
    """One resource of a pool, such as its bucket. Both methods only read."""

    def to_make(self) -> View:
        """Return the steps that create the resource, or finish creating it."""

    def to_remove(self) -> View:
        """Return the steps that remove the resource, if ``init`` has created it."""


@dataclass
class Site:
    """A pool's place in an account.

    ``spec`` names the security group once that exists.
    """

    name: str
    spec: AwsSpotSpec
    clients: Clients
    account: str

    @property
    def group_name(self) -> str:
        """Name of the security group."""
        return f"etrain-{self.name}"

    @property
    def launcher_policy(self) -> str:
        """Name of the policy for those who start clusters."""
        return f"etrain-{self.name}-launcher"

    def tags(self) -> dict[str, str]:
        """Return the tags of everything that is created for this pool."""
        return {POOL_TAG: self.mark, OWNER_TAG: self.spec.owner or getpass.getuser()}

    @property
    def mark(self) -> str:
        """Value of the tag that identifies the pool."""
        return f"{self.name}@{self.spec.region}"

    def is_ours(self, tags: Mapping[str, str]) -> bool:
        """Return whether a resource with these tags was created for this pool."""
        return tags.get(POOL_TAG) == self.mark

    def is_removable(self, tags: Mapping[str, str], what: str, notes: list[str]) -> bool:
        """Return whether ``remove`` may remove a resource; if not, note the reason."""
        if not self.is_ours(tags):
            notes.append(f"{what} stays: it was not made by `etrain pools init {self.name}`")
            return False
        if stack := tags.get(STACK_TAG):
            notes.append(
                f"{what} stays: it belongs to the CloudFormation stack {stack}. Remove it with "
                f"`aws cloudformation delete-stack --stack-name {stack}`"
            )
            return False
        return True


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


def tag_pairs(tags: Mapping[str, str]) -> list[dict[str, str]]:
    """Return tags in the form of IAM's and S3's requests."""
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def is_missing(exc: ClientError) -> bool:
    """Return whether an error says that a resource does not exist."""
    return code_of(exc) in MISSING


def as_document(value: Any) -> Any:
    """Return a policy document, which boto3 returns parsed, and some services as text."""
    return json.loads(value) if isinstance(value, str) else value


def run_steps(
    steps: Sequence[Step], *, say: Callable[[str], object], again: str, advice: str = ""
) -> None:
    """Run all steps in order; each is shown before it runs.

    Args:
        steps: The steps.
        say: Shows a line.
        again: The command that continues after an error.
        advice: Added to the message if AWS does not allow a step.

    Raises:
        PoolError: If a step fails. The message names the steps that were completed.
    """
    for number, step in enumerate(steps):
        say(f"[{number + 1}/{len(steps)}] {step.text}")
        try:
            step.run()
        except AwsErrors as exc:
            done = ", ".join(one.text for one in steps[:number]) or "nothing"
            raise PoolError(
                f"could not {step.text}: {reason_of(exc, advice)}. Completed before: {done}. "
                f"Then run `{again}` again: it continues with this step."
            ) from exc


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
