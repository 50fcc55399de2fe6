"""The pool's bucket: private, encrypted, and without leftovers of aborted uploads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from botocore.exceptions import ClientError

from etrain_jupyter.errors import PoolError
from etrain_jupyter.plugins.ec2.account.site import (
    DENIED,
    MISSING,
    Site,
    Step,
    View,
    is_missing,
    tag_pairs,
    tags_from,
)
from etrain_jupyter.process.state_root import open_state_root, state_root
from etrain_jupyter.storage.objects.s3_messages import code_of

PRIVATE = {
    "BlockPublicAcls": True,
    "IgnorePublicAcls": True,
    "BlockPublicPolicy": True,
    "RestrictPublicBuckets": True,
}
ENCRYPTED = {"Rules": [{"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "AES256"}}]}
ABORT_DAYS = 1
"""Age at which S3 removes an upload that was never completed, such as that of a lost node."""
CLUSTER_DAYS = 90
"""Age at which S3 removes the keys and configuration of a cluster that was not shut down."""
MAX_COUNTED = 100_000
"""Maximum number of objects to count before a bucket is removed."""


class BucketPiece:
    """The bucket.

    Args:
        site: The pool's place in the account.
        deletes_objects: Remove the bucket even if it contains objects.
    """

    def __init__(self, site: Site, *, deletes_objects: bool = False) -> None:
        self._site = site
        self._name = site.spec.bucket
        self._label = f"bucket {site.spec.bucket}"
        self._deletes_objects = deletes_objects

    def to_make(self) -> View:
        """Return the missing settings of the bucket, or all steps if it does not exist."""
        if not self._exists():
            return View(
                steps=[
                    Step(text=f"create {self._label}", run=self._create),
                    *self._settings({name: True for name in self._checks()}),
                ]
            )
        if not self._is_ours():
            return View(notes=[f"{self._label} exists, and is used without changes"])
        return View(steps=self._settings(self._checks()))

    def to_remove(self) -> View:
        """Return the step that deletes the bucket, unless it contains objects."""
        notes: list[str] = []
        if not self._exists():
            self._forget()
            return View()
        tags = self._tags()
        if not tags and self._is_ours():
            tags = self._site.tags()
        if not self._site.is_removable(tags, self._label, notes):
            return View(notes=notes)
        count, size = self._contents()
        if count and not self._deletes_objects:
            most = "more than " if count > MAX_COUNTED else ""
            notes.append(
                f"{self._label} stays: it contains {most}{min(count, MAX_COUNTED)} objects "
                f"({size / 1e9:.2f} GB), which may be checkpoints. To delete them as well, add "
                "--delete-objects"
            )
            return View(notes=notes)
        what = f" and its {count} objects ({size / 1e9:.2f} GB)" if count else ""
        return View(steps=[Step(text=f"delete {self._label}{what}", run=self._delete)])

    # --- reads ---

    def _exists(self) -> bool:
        try:
            found = self._site.clients.s3.head_bucket(
                Bucket=self._name, ExpectedBucketOwner=self._site.account
            )
        except ClientError as exc:
            code = code_of(exc)
            if code in MISSING:
                return False
            if code in ("403", *DENIED):
                raise PoolError(
                    f"{self._label} exists, but belongs to another AWS account or does not admit "
                    f"these credentials. Nothing was changed. Choose another name with "
                    "--bucket NAME: names are unique over all accounts."
                ) from exc
            if code not in ("301", "400", "PermanentRedirect"):
                raise
            found = exc.response
        headers = found.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        region = headers.get("x-amz-bucket-region") or self._site.spec.region
        if region != self._site.spec.region:
            raise PoolError(
                f"{self._label} is in {region}, but the pool is in {self._site.spec.region}: "
                "traffic between regions costs money, and delays checkpoints. Nothing was "
                f"changed. Choose another name with --bucket NAME, or --region {region}."
            )
        return True

    def _tags(self) -> dict[str, str]:
        try:
            return tags_from(self._site.clients.s3.get_bucket_tagging(Bucket=self._name)["TagSet"])
        except ClientError as exc:
            # Without this permission, the bucket is one that an administrator has created.
            if code_of(exc) == "NoSuchTagSet" or code_of(exc) in DENIED:
                return {}
            raise

    def _is_ours(self) -> bool:
        tags = self._tags()
        # S3 cannot create a bucket with its tags in one request. The record says that `init` was
        # interrupted between the two.
        return self._site.is_ours(tags) or (not tags and self._record().exists())

    def _checks(self) -> dict[str, bool]:
        """Return which settings are missing, by name."""
        s3, name = self._site.clients.s3, self._name
        reads: dict[str, Callable[[], Any]] = {
            "access": lambda: (
                s3.get_public_access_block(Bucket=name)["PublicAccessBlockConfiguration"] == PRIVATE
            ),
            "encryption": lambda: bool(
                s3.get_bucket_encryption(Bucket=name)["ServerSideEncryptionConfiguration"]["Rules"]
            ),
            "lifecycle": lambda: bool(s3.get_bucket_lifecycle_configuration(Bucket=name)["Rules"]),
            "tags": lambda: self._site.is_ours(self._tags()),
        }
        return {setting: not _reads_true(read) for setting, read in reads.items()}

    def _contents(self) -> tuple[int, int]:
        """Return the number of objects, up to ``MAX_COUNTED``, and their bytes."""
        count = size = 0
        pages = self._site.clients.s3.get_paginator("list_objects_v2").paginate(Bucket=self._name)
        for page in pages:
            count += len(page.get("Contents", ()))
            size += sum(one["Size"] for one in page.get("Contents", ()))
            if count > MAX_COUNTED:
                break
        return count, size

    # --- changes ---

    def _settings(self, missing: Mapping[str, bool]) -> list[Step]:
        s3, name = self._site.clients.s3, self._name
        # The tags come first: they say whose bucket it is.
        steps = {
            "tags": Step(
                text=f"tag {self._label}",
                run=lambda: s3.put_bucket_tagging(
                    Bucket=name, Tagging={"TagSet": tag_pairs(self._site.tags())}
                ),
            ),
            "access": Step(
                text=f"block public access to {self._label}",
                run=lambda: s3.put_public_access_block(
                    Bucket=name, PublicAccessBlockConfiguration=PRIVATE
                ),
            ),
            "encryption": Step(
                text=f"encrypt {self._label}",
                run=lambda: s3.put_bucket_encryption(
                    Bucket=name, ServerSideEncryptionConfiguration=ENCRYPTED
                ),
            ),
            "lifecycle": Step(
                text=f"let {self._label} expire leftovers of clusters and aborted uploads",
                run=lambda: s3.put_bucket_lifecycle_configuration(
                    Bucket=name,
                    LifecycleConfiguration={"Rules": lifecycle_rules(self._site.spec.prefix)},
                ),
            ),
        }
        return [step for setting, step in steps.items() if missing[setting]]

    def _create(self) -> None:
        region = self._site.spec.region
        place = {} if region == "us-east-1" else {"LocationConstraint": region}
        open_state_root()
        self._record().parent.mkdir(mode=0o700, exist_ok=True)
        self._record().touch(mode=0o600)
        try:
            self._site.clients.s3.create_bucket(
                Bucket=self._name, **({"CreateBucketConfiguration": place} if place else {})
            )
        except ClientError as exc:
            # A previous attempt succeeded, but its response was lost.
            if code_of(exc) != "BucketAlreadyOwnedByYou":
                self._forget()
                raise

    def _delete(self) -> None:
        s3 = self._site.clients.s3
        # Versions exist if versioning was enabled; otherwise this lists the objects.
        pages = s3.get_paginator("list_object_versions").paginate(Bucket=self._name)
        for page in pages:
            found = [*page.get("Versions", ()), *page.get("DeleteMarkers", ())]
            keys = [{"Key": one["Key"], "VersionId": one["VersionId"]} for one in found]
            if not keys:
                continue
            answer = s3.delete_objects(Bucket=self._name, Delete={"Objects": keys, "Quiet": True})
            for error in answer.get("Errors", ()):
                raise ClientError({"Error": error}, "DeleteObjects")
        try:
            s3.delete_bucket(Bucket=self._name)
        except ClientError as exc:
            if not is_missing(exc):
                raise
        self._forget()

    def _record(self) -> Path:
        """Return the file that exists while the bucket is created and not yet tagged."""
        return state_root() / "buckets" / f"{self._site.mark}-{self._name}"

    def _forget(self) -> None:
        self._record().unlink(missing_ok=True)


def _reads_true(read: Callable[[], Any]) -> bool:
    """Return a setting of the bucket; False if it was never set."""
    try:
        return bool(read())
    except ClientError as exc:
        # NoSuchPublicAccessBlockConfiguration, NoSuchLifecycleConfiguration, ...
        if code_of(exc).startswith("NoSuch") or "NotFound" in code_of(exc):
            return False
        raise


def lifecycle_rules(prefix: str) -> list[dict[str, Any]]:
    """Return the rules that remove leftovers; checkpoints and cost records never expire."""
    return [
        {
            "ID": "etrain-aborted-uploads",
            "Status": "Enabled",
            "Filter": {"Prefix": prefix},
            "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": ABORT_DAYS},
        },
        {
            "ID": "etrain-dead-clusters",
            "Status": "Enabled",
            "Filter": {"Prefix": f"{prefix}clusters/"},
            "Expiration": {"Days": CLUSTER_DAYS},
        },
    ]
