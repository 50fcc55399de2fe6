"""The CloudFormation stack with a pool's resources, and the bucket, which outlives the stack.

::

    there is none, or creating it has failed     create
    an operation is in progress                  wait until it ends, then do one of the others
    complete                                     update, if the template differs

CloudFormation removes the resources of a stack that it cannot create, and rolls back an update
that fails, so the command can be repeated after an interruption at any point.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import yaml
from botocore.exceptions import ClientError

from etrain_jupyter.errors import PoolError
from etrain_jupyter.plugins.ec2.account.cloudformation import LABELS, text_of
from etrain_jupyter.plugins.ec2.account.site import (
    DENIED,
    MISSING,
    POOL_TAG,
    WITHOUT_IAM,
    Site,
    is_missing,
    tags_from,
)
from etrain_jupyter.plugins.ec2.ec2_api import tag_list
from etrain_jupyter.storage.objects.s3_messages import code_of

POLL_S = 2.0
OPERATION_S = 1800.0
"""Time for an operation on the stack, in seconds; usually one to three minutes."""
UNUSABLE = ("CREATE_FAILED", "ROLLBACK_COMPLETE", "ROLLBACK_FAILED", "DELETE_FAILED")
"""States of a stack that can only be deleted."""

Say = Callable[[str], object]
MAX_COUNTED = 100_000
"""Maximum number of objects to count before a bucket is removed."""


class Stack:
    """A pool's stack; ``pause`` waits between two requests."""

    def __init__(self, site: Site, *, pause: Callable[[float], object] = time.sleep) -> None:
        self._site = site
        self._client = site.clients.cloudformation
        self._pause = pause
        self.name = site.stack_name

    def describe(self) -> dict[str, Any]:
        """Wait for an operation in progress, and describe the stack; empty if there is none.

        Raises:
            PoolError: If the stack was not made for this pool.
        """
        found = self._describe(self.name)
        if found and tags_from(found.get("Tags", ())).get(POOL_TAG) != self._site.mark:
            raise PoolError(
                f"the stack {self.name} exists, but was not made for pool {self._site.mark}. "
                "Nothing was changed. Choose another name for the pool."
            )
        if found and found["StackStatus"].endswith("_IN_PROGRESS"):
            self._await_end(found["StackId"], set(), say=lambda line: None)
            found = self._describe(self.name)
        return found

    def resources(self, *, is_usable: bool = True) -> dict[str, Any]:
        """Return the resources of the deployed template by logical id.

        Empty without a stack. With ``is_usable``, also empty for a stack that can only be deleted.
        """
        found = self.describe()
        if not found or (is_usable and found["StackStatus"] in UNUSABLE):
            return {}
        body = self._client.get_template(StackName=self.name)["TemplateBody"]
        template = yaml.safe_load(body) if isinstance(body, str) else body
        resources: dict[str, Any] = template["Resources"]
        return resources

    def group(self) -> str:
        """Return the id of the stack's security group; empty if it has none."""
        outputs = self._describe(self.name).get("Outputs", ())
        return next((str(o["OutputValue"]) for o in outputs if o["OutputKey"] == "Group"), "")

    def deploy(self, template: Mapping[str, Any], say: Say) -> None:
        """Create or update the stack, and wait for the end.

        Raises:
            PoolError: If CloudFormation cannot create or change a resource.
        """
        found = self.describe()
        if found and found["StackStatus"] in UNUSABLE:
            self.delete(say)
            found = {}
        words = {
            "StackName": self.name,
            "TemplateBody": text_of(dict(template)),
            "Capabilities": ["CAPABILITY_NAMED_IAM"],
        }
        seen = self._event_ids(self.name) if found else set[str]()
        if found:
            id = self._client.update_stack(**words)["StackId"]
        else:
            tags = tag_list(self._site.tags())
            id = self._client.create_stack(**words, Tags=tags, OnFailure="DELETE")["StackId"]
        self._finish(id, seen, "updated" if found else "created", say)

    def delete(self, say: Say) -> None:
        """Delete the stack, and wait for the end.

        Raises:
            PoolError: If CloudFormation cannot delete a resource.
        """
        if found := self.describe():
            seen = self._event_ids(self.name)
            self._client.delete_stack(StackName=self.name)
            self._finish(found["StackId"], seen, "deleted", say)

    def _finish(self, id: str, seen: set[str], done: str, say: Say) -> None:
        status, failures = self._await_end(id, seen, say)
        if status == ("DELETE_COMPLETE" if done == "deleted" else f"{done.upper()[:-1]}_COMPLETE"):
            return
        first = failures[0] if failures else {}
        reason = first.get("ResourceStatusReason", f"it is {status}")
        undone = "" if done == "deleted" else ". CloudFormation has undone the change"
        raise PoolError(
            f"the stack {self.name} could not be {done}: {_label_of(first)}{reason.rstrip('.')}"
            f"{undone}. {_advice_for(reason)}. Then run the command again."
        )

    def _await_end(self, id: str, seen: set[str], say: Say) -> tuple[str, list[dict[str, Any]]]:
        """Show the events of an operation until it ends; return the status and the failures."""
        failures = []
        deadline = time.monotonic() + OPERATION_S
        while True:
            status = self._describe(id).get("StackStatus", "DELETE_COMPLETE")
            for event in reversed(self._events(id)):
                if event["EventId"] in seen or event["PhysicalResourceId"] == id:
                    continue
                seen.add(event["EventId"])
                action, _, state = event["ResourceStatus"].rpartition("_")
                if state == "COMPLETE":
                    say(f"  {action.lower()}d {_label_of(event).removesuffix(': ')}")
                elif state == "FAILED" and "cancelled" not in event.get("ResourceStatusReason", ""):
                    failures.append(event)
            if not status.endswith("_IN_PROGRESS") or status == "REVIEW_IN_PROGRESS":
                return status, failures
            if time.monotonic() > deadline:
                raise PoolError(
                    f"the stack {self.name} is still {status} after {OPERATION_S / 60:.0f} min. "
                    "CloudFormation continues. Run the command again: it waits for the end."
                )
            self._pause(POLL_S)

    def _describe(self, name: str) -> dict[str, Any]:
        try:
            found: dict[str, Any] = self._client.describe_stacks(StackName=name)["Stacks"][0]
            return found
        except ClientError as exc:
            if code_of(exc) == "ValidationError" and "does not exist" in str(exc):
                return {}
            raise

    def _events(self, name: str) -> list[dict[str, Any]]:
        pages = self._client.get_paginator("describe_stack_events").paginate(StackName=name)
        return [event for page in pages for event in page["StackEvents"]]

    def _event_ids(self, name: str) -> set[str]:
        return {event["EventId"] for event in self._events(name)}


def _label_of(event: Mapping[str, Any]) -> str:
    if not event:
        return ""
    kind, _ = LABELS.get(event["ResourceType"], (event["ResourceType"], ""))
    return f"{kind} {event.get('PhysicalResourceId') or event['LogicalResourceId']}: "


def _advice_for(reason: str) -> str:
    """Return what to do about the reason of a failure."""
    # The reasons are texts of the services, such as "API: iam:CreateRole User: ... is not
    # authorized to perform: iam:CreateRole on resource: ...".
    lower = reason.lower()
    if "not authorized" in lower or "denied" in lower or "unauthorized" in lower:
        return WITHOUT_IAM
    if "already exist" in lower or "not available" in lower:
        return (
            "Choose another name for the pool or the bucket (--bucket NAME), or use what exists: "
            "--bucket NAME, --role PROFILE, --security-group GROUP"
        )
    if "limit" in lower or "quota" in lower:
        return "Remove unused ones, or request more at Service Quotas"
    if "depend" in lower or "in use" in lower or "conflict" in lower or "must d" in lower:
        return "Detach it from whatever uses it"
    return "Correct this"


def bucket_exists(site: Site) -> bool:
    """Return whether the pool's bucket exists.

    Raises:
        PoolError: If it belongs to another account, or is in another region.
    """
    name, region = site.spec.bucket, site.spec.region
    try:
        found = site.clients.s3.head_bucket(Bucket=name, ExpectedBucketOwner=site.account)
    except ClientError as exc:
        code = code_of(exc)
        if code in MISSING:
            return False
        if code in ("403", *DENIED):
            raise PoolError(
                f"bucket {name} exists, but belongs to another AWS account or does not admit "
                f"these credentials. Nothing was changed. Choose another name with --bucket NAME: "
                "names are unique over all accounts."
            ) from exc
        if code not in ("301", "400", "PermanentRedirect"):
            raise
        found = exc.response
    headers = found.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    place = headers.get("x-amz-bucket-region") or region
    if place != region:
        raise PoolError(
            f"bucket {name} is in {place}, but the pool is in {region}: traffic between regions "
            "costs money, and delays checkpoints. Nothing was changed. Choose another name with "
            f"--bucket NAME, or --region {place}."
        )
    return True


def to_remove(
    site: Site, *, deletes_objects: bool
) -> tuple[list[tuple[str, Callable[[], None]]], list[str]]:
    """Return the step that deletes the bucket, if ``init`` has created it, and remarks."""
    label = f"bucket {site.spec.bucket}"
    if not bucket_exists(site):
        return [], []
    if not site.is_ours(_tags(site)):
        return [], [f"{label} stays: it was not made by `etrain pools init {site.name}`"]
    count = size = 0
    for page in site.clients.s3.get_paginator("list_objects_v2").paginate(Bucket=site.spec.bucket):
        count += len(page.get("Contents", ()))
        size += sum(one["Size"] for one in page.get("Contents", ()))
        if count > MAX_COUNTED:
            break
    if count and not deletes_objects:
        most = "more than " if count > MAX_COUNTED else ""
        return [], [
            f"{label} stays: it contains {most}{min(count, MAX_COUNTED)} objects "
            f"({size / 1e9:.2f} GB), which may be checkpoints. To delete them as well, add "
            "--delete-objects"
        ]
    what = f" and its {count} objects ({size / 1e9:.2f} GB)" if count else ""
    return [(f"delete {label}{what}", lambda: _delete(site))], []


def _tags(site: Site) -> dict[str, str]:
    try:
        return tags_from(site.clients.s3.get_bucket_tagging(Bucket=site.spec.bucket)["TagSet"])
    except ClientError as exc:
        # If this permission is missing, an administrator has created the bucket.
        if code_of(exc) == "NoSuchTagSet" or code_of(exc) in DENIED:
            return {}
        raise


def _delete(site: Site) -> None:
    s3, name = site.clients.s3, site.spec.bucket
    # Versions exist if versioning was enabled; otherwise this lists the objects.
    for page in s3.get_paginator("list_object_versions").paginate(Bucket=name):
        found = [*page.get("Versions", ()), *page.get("DeleteMarkers", ())]
        keys = [{"Key": one["Key"], "VersionId": one["VersionId"]} for one in found]
        if not keys:
            continue
        answer = s3.delete_objects(Bucket=name, Delete={"Objects": keys, "Quiet": True})
        for error in answer.get("Errors", ()):
            raise ClientError({"Error": error}, "DeleteObjects")
    try:
        s3.delete_bucket(Bucket=name)
    except ClientError as exc:
        if not is_missing(exc):
            raise
