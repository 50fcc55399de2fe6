"""Parser for the S3 form of ``checkpoint.to``: ``s3://bucket/prefix``."""

from __future__ import annotations

import re

S3 = "s3://"

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX = re.compile(r"[A-Za-z0-9!_.*'()=+@,: /-]*")


def split_s3_url(url: str) -> tuple[str, str]:
    """Return bucket and prefix, without ``/`` at either end of the prefix.

    Raises:
        ValueError: If the URL is invalid. The message continues a sentence that begins with the
            key, and omits any text that could be a secret.

    >>> split_s3_url("s3://my-bucket/runs/mine/")
    ('my-bucket', 'runs/mine')
    """
    bucket, _, prefix = url.removeprefix(S3).partition("/")
    prefix = prefix.strip("/")
    # As in s3://KEY:SECRET@bucket. Do not repeat the text in the message.
    if "@" in bucket:
        raise ValueError("contains credentials; set them in AWS_PROFILE or ~/.aws instead")
    if not bucket:
        raise ValueError("names no bucket")
    if not _BUCKET.fullmatch(bucket) or ".." in bucket:
        raise ValueError(
            f"names the bucket '{bucket}', but the name of a bucket has 3 to 63 "
            "lower-case letters, digits, dots and dashes"
        )
    if not _PREFIX.fullmatch(prefix):
        raise ValueError("has characters after the bucket that are not allowed in a key")
    if any(name in ("", ".", "..") for name in prefix.split("/")) and prefix:
        raise ValueError("has an empty name, '.' or '..' after the bucket")
    return bucket, prefix
