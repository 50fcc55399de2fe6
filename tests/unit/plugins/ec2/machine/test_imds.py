"""The client of the metadata service, against a server that fails in every way that it knows."""

from __future__ import annotations

import time

import pytest

from etrain_jupyter.plugins.ec2.machine import imds as imds_module
from etrain_jupyter.plugins.ec2.machine.imds import Imds, ImdsError, is_ec2
from etrain_jupyter.plugins.ec2.simulator.imds import ImdsServer, instance_pages


@pytest.fixture
def server():
    with ImdsServer(instance_pages(instance_id="i-1", launched_at=time.time() - 600)) as found:
        yield found


def test_page_is_read_and_a_missing_one_is_none(server):
    imds = Imds(server.url)
    assert imds.get("meta-data/instance-id") == "i-1"
    assert imds.get("meta-data/spot/instance-action") is None


def test_identity_has_id_type_zone_lifecycle_and_age(server):
    found = Imds(server.url).identity()
    assert (found.instance_id, found.type, found.region) == ("i-1", "g5.xlarge", "us-east-1")
    assert (found.zone, found.lifecycle, found.private_ip) == ("us-east-1a", "spot", "127.0.0.1")
    assert 599 <= found.age_s < 700


def test_token_is_requested_once_and_again_after_it_expires(server):
    imds = Imds(server.url)
    for _ in range(3):
        imds.get("meta-data/instance-id")
    assert len(server._tokens) == 1
    server.expire_tokens()
    assert imds.get("meta-data/instance-id") == "i-1"


def test_token_is_renewed_before_it_expires(server, monkeypatch):
    monkeypatch.setattr(imds_module, "RENEW_S", imds_module.TOKEN_S)
    imds = Imds(server.url)
    for _ in range(3):
        imds.get("meta-data/instance-id")
    assert len(server._tokens) == 3


@pytest.mark.parametrize("how", ["500", "hang", "expired"])
def test_failing_service_is_an_error_and_works_again_after_its_recovery(server, how):
    imds = Imds(server.url, timeout_s=0.2)
    server.break_(how)
    with pytest.raises(ImdsError):
        imds.get("meta-data/instance-id")
    server.break_("")
    assert imds.get("meta-data/instance-id") == "i-1"


def test_proxy_settings_are_ignored(server, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert Imds(server.url).get("meta-data/instance-id") == "i-1"


def test_machine_of_another_cloud_is_reported_as_no_ec2_instance():
    with ImdsServer() as server, pytest.raises(ImdsError, match="this is not an EC2 instance"):
        Imds(server.url).identity()


def test_endpoint_comes_from_the_environment_as_with_boto3(server, monkeypatch):
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", server.url + "/")
    assert Imds().get("meta-data/instance-id") == "i-1"


@pytest.mark.parametrize(
    ("environment", "vendor", "expected"),
    [
        ({}, "Amazon EC2\n", True),
        ({}, "QEMU\n", False),
        ({"ETRAIN_NOTICES": "imds"}, "QEMU\n", True),
        ({"ETRAIN_NOTICES": "off"}, "Amazon EC2\n", False),
        ({"AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:1"}, "QEMU\n", True),
        ({"AWS_EC2_METADATA_DISABLED": "true"}, "Amazon EC2\n", False),
    ],
)
def test_ec2_is_detected_by_the_vendor_file_or_the_environment(
    environment, vendor, expected, monkeypatch, tmp_path
):
    (tmp_path / "vendor").write_text(vendor)
    monkeypatch.setattr(imds_module, "VENDOR_FILE", tmp_path / "vendor")
    for name in (
        "AWS_EC2_METADATA_SERVICE_ENDPOINT",
        "AWS_EC2_METADATA_DISABLED",
        "ETRAIN_NOTICES",
    ):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert is_ec2() is expected
