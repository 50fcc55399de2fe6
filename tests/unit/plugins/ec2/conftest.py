"""AWS in this process: moto, with credentials that are none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from moto import mock_aws

from etrain_jupyter.plugins.ec2.ec2_api import Clients
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec

AMI = "ami-12c6146b"
"""One that moto knows."""


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let boto3 reach moto and nothing else."""
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with mock_aws():
        yield


@pytest.fixture
def spec() -> AwsSpotSpec:
    return AwsSpotSpec.parse(
        {
            "region": "us-east-1",
            "bucket": "my-bucket",
            "capacity": {"types": ["g5.xlarge", "g6.xlarge"]},
            "image": {"ami": AMI},
            "owner": "me",
        }
    )


@pytest.fixture
def clients(aws: None, spec: AwsSpotSpec) -> Clients:
    made = Clients(spec)
    made._open().client("s3").create_bucket(Bucket=spec.bucket)
    return made
