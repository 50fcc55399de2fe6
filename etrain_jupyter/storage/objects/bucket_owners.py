"""Expected owners of buckets: S3's ``ExpectedBucketOwner``.

Once a bucket is deleted, any account may claim its name. If a request contains the expected owner,
S3 refuses access to a bucket in another account. We then neither read that account's data nor store
ours there.

``ETRAIN_BUCKET_OWNERS=my-bucket=111122223333,other=any`` names the owner of each bucket. A pool
determines the owner of its own bucket (``bucket_owner`` in ``pools.yaml``, or the account of its
credentials) and adds it here. All other buckets may belong to any account.
"""

from __future__ import annotations

import os
import re

from etrain_jupyter.errors import StoreError

VARIABLE = "ETRAIN_BUCKET_OWNERS"
ANY = "any"
"""Owner of a bucket that may belong to any account."""
ACCOUNT = re.compile(r"\d{12}")

_registered: dict[str, str] = {}


def expected_owner(bucket: str) -> str:
    """Return the account that a bucket must belong to; empty for any.

    Raises:
        StoreError: If ``ETRAIN_BUCKET_OWNERS`` is invalid.
    """
    # The environment takes precedence over a pool. Parsed for each request, so that a change takes
    # effect.
    named = parse_owners(os.environ.get(VARIABLE, ""))
    owner = named.get(bucket) or _registered.get(bucket, "")
    return "" if owner == ANY else owner


def named_owner(bucket: str) -> str:
    """Return the owner in ``ETRAIN_BUCKET_OWNERS``, or ``any``; empty if it is not listed."""
    return parse_owners(os.environ.get(VARIABLE, "")).get(bucket, "")


def expect_owner(bucket: str, owner: str) -> None:
    """Require this owner in this process from now on, unless the environment names another one."""
    _registered[bucket] = owner


def parse_owners(text: str) -> dict[str, str]:
    """Parse the environment variable.

    >>> parse_owners("my-bucket=111122223333, other=any")
    {'my-bucket': '111122223333', 'other': 'any'}

    Raises:
        StoreError: If it is invalid, with the correct form.
    """
    owners = {}
    for part in filter(None, (one.strip() for one in text.split(","))):
        bucket, _, owner = (field.strip() for field in part.partition("="))
        if not bucket or not (owner == ANY or ACCOUNT.fullmatch(owner)):
            raise StoreError(
                f"{VARIABLE} has {part!r}, which is not BUCKET=ACCOUNT. No request was sent to "
                f"S3. Write {bucket or 'my-bucket'}=111122223333 (the 12 digits of the account "
                f"that owns the bucket), or {bucket or 'my-bucket'}=any to skip the check"
            )
        owners[bucket] = owner
    return owners


def with_owner(text: str, bucket: str, owner: str) -> str:
    """Return the variable's text with one more bucket, unless the bucket is already in it."""
    # The user's own entries come last, so that they take precedence.
    owners = {bucket: owner, **parse_owners(text)} if owner else parse_owners(text)
    return ",".join(f"{name}={account}" for name, account in owners.items())
