"""The pool's bucket, which outlives the stack: look it up, count its objects, delete it."""

from __future__ import annotations

from collections.abc import Callable

from botocore.exceptions import ClientError

from etrain_jupyter.errors import PoolError
from etrain_jupyter.plugins.ec2.account.site import DENIED, MISSING, Site, is_missing, tags_from
from etrain_jupyter.storage.objects.s3_messages import code_of

MAX_COUNTED = 100_000
"""Maximum number of objects to count before a bucket is removed."""


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
    count, size = _contents(site)
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
        # Without this permission, the bucket is one that an administrator has created.
        if code_of(exc) == "NoSuchTagSet" or code_of(exc) in DENIED:
            return {}
        raise


def _contents(site: Site) -> tuple[int, int]:
    """Return the number of objects, up to ``MAX_COUNTED``, and their bytes."""
    count = size = 0
    for page in site.clients.s3.get_paginator("list_objects_v2").paginate(Bucket=site.spec.bucket):
        count += len(page.get("Contents", ()))
        size += sum(one["Size"] for one in page.get("Contents", ()))
        if count > MAX_COUNTED:
            break
    return count, size


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
