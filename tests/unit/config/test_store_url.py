"""What is no ``s3://bucket/prefix`` is refused in words, and secrets are not repeated."""

from __future__ import annotations

import pytest

from etrain_jupyter.config.store_url import split_s3_url


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://", "names no bucket"),
        ("s3:///runs", "names no bucket"),
        ("s3://My_Bucket", "names the bucket 'My_Bucket', but the name of a bucket has 3 to 63"),
        ("s3://ab", "names the bucket 'ab'"),
        ("s3://a..b/x", "names the bucket 'a..b'"),
        ("s3://AKIAKEY:secret@bucket/x", "contains credentials; set them in AWS_PROFILE"),
        ("s3://bucket/a//b", "has an empty name"),
        ("s3://bucket/../x", "'..' after the bucket"),
        ("s3://bucket/a?b", "has characters after the bucket"),
        ("s3://bucket/a\nb", "has characters after the bucket"),
    ],
)
def test_invalid_url_is_refused(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("..", r"\.\.")) as caught:
        split_s3_url(url)
    assert "secret" not in str(caught.value)


def test_bucket_without_a_prefix_is_valid() -> None:
    assert split_s3_url("s3://my-bucket") == ("my-bucket", "")
    assert split_s3_url("s3://my.bucket/a b/c") == ("my.bucket", "a b/c")
