"""Accounts that buckets must belong to: S3's ``ExpectedBucketOwner``.

Names of buckets are free again once a bucket is deleted, for any account. A request that names the
owner is refused by a bucket of somebody else, instead of reading what that account put there, or
leaving our data with it.

``ETRAIN_BUCKET_OWNERS=my-bucket=111122223333,other=any`` names the owner of each bucket. A pool
learns the owner of its own bucket (``bucket_owner`` in ``pools.yaml``, or the account of its
credentials) and adds it here. For all other buckets nothing is expected: they may belong to another
account on purpose.
"""

from __future__ import annotations

import os
import re

from etrain_jupyter.errors import CheckpointError

VARIABLE = "ETRAIN_BUCKET_OWNERS"
ANY = "any"
"""Of a bucket that may belong to whomever."""
ACCOUNT = re.compile(r"\d{12}")

_learnt: dict[str, str] = {}


def expected_owner(bucket: str) -> str:
    """Return the account that a bucket must belong to; empty if nothing is expected.

    Raises:
        CheckpointError: If ``ETRAIN_BUCKET_OWNERS`` cannot be read.
    """
    named = parse_owners(os.environ.get(VARIABLE, ""))
    owner = named.get(bucket) or _learnt.get(bucket, "")
    return "" if owner == ANY else owner


def named_owner(bucket: str) -> str:
    """Return what ``ETRAIN_BUCKET_OWNERS`` says of a bucket, ``any`` included."""
    return parse_owners(os.environ.get(VARIABLE, "")).get(bucket, "")


def expect_owner(bucket: str, owner: str) -> None:
    """Expect this owner in this process from now on, unless the environment names another one."""
    _learnt[bucket] = owner


def parse_owners(text: str) -> dict[str, str]:
    """Read the variable's text.

    >>> parse_owners("my-bucket=111122223333, other=any")
    {'my-bucket': '111122223333', 'other': 'any'}

    Raises:
        CheckpointError: If it is wrong, with what to write instead.
    """
    owners = {}
    for part in filter(None, (one.strip() for one in text.split(","))):
        bucket, _, owner = (word.strip() for word in part.partition("="))
        if not bucket or not (owner == ANY or ACCOUNT.fullmatch(owner)):
            raise CheckpointError(
                f"{VARIABLE} has {part!r}, which names no bucket and account. Nothing was asked of "
                f"S3. Write {bucket or 'my-bucket'}=111122223333 (the 12 digits of the account "
                f"that owns the bucket), or {bucket or 'my-bucket'}=any for no check"
            )
        owners[bucket] = owner
    return owners


def with_owner(text: str, bucket: str, owner: str) -> str:
    """Return the variable's text with one more bucket, unless it names that already."""
    owners = {bucket: owner, **parse_owners(text)} if owner else parse_owners(text)
    return ",".join(f"{name}={account}" for name, account in owners.items())
