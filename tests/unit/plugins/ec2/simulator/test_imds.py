"""The metadata service of the fake cloud: what EC2's answers, and its faults."""

from __future__ import annotations

import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from botocore.utils import InstanceMetadataFetcher

from etrain_jupyter.plugins.ec2.simulator.imds import ImdsServer, instance_pages, timestamp

TTL = "X-aws-ec2-metadata-token-ttl-seconds"
TOKEN = "X-aws-ec2-metadata-token"


@pytest.fixture
def imds() -> Iterator[ImdsServer]:
    pages = instance_pages(
        instance_id="i-0abc", zone="eu-west-1b", tags={"etrain:cluster": "c-7"}, user_data="#!x"
    )
    with ImdsServer(pages) as server:
        yield server


def ask(imds: ImdsServer, path: str, *, timeout_s: float = 30, **headers: str) -> str:
    method = "PUT" if path == "api/token" else "GET"
    words = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(f"{imds.url}/latest/{path}", headers=words, method=method)
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        text: str = answer.read().decode()
    return text


def token(imds: ImdsServer, ttl_s: str = "60") -> dict[str, str]:
    return {TOKEN: ask(imds, "api/token", **{TTL: ttl_s})}


def status(imds: ImdsServer, path: str, **headers: str) -> int:
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(imds, path, **headers)
    caught.value.close()
    return caught.value.code


def test_instance_reads_its_identity_and_placement(imds: ImdsServer) -> None:
    held = token(imds)

    identity = json.loads(ask(imds, "dynamic/instance-identity/document", **held))

    assert ask(imds, "meta-data/instance-id", **held) == "i-0abc"
    assert ask(imds, "meta-data/instance-life-cycle", **held) == "spot"
    assert ask(imds, "meta-data/placement/region", **held) == "eu-west-1"
    assert ask(imds, "meta-data/tags/instance/etrain%3Acluster", **held) == "c-7"
    assert ask(imds, "user-data", **held) == "#!x"
    assert (identity["region"], identity["availabilityZone"]) == ("eu-west-1", "eu-west-1b")


def test_a_folder_is_listed(imds: ImdsServer) -> None:
    assert ask(imds, "meta-data/placement/", **token(imds)) == "availability-zone\nregion"
    assert ask(imds, "", **token(imds)) == "dynamic/\nmeta-data/\nuser-data"


def test_requests_without_a_valid_token_are_refused(imds: ImdsServer) -> None:
    assert status(imds, "meta-data/instance-id") == 401
    assert status(imds, "meta-data/instance-id", **{TOKEN: "invented"}) == 401


@pytest.mark.parametrize("ttl", ["0", "21601", "long", ""])
def test_invalid_token_lifetime_is_refused(imds: ImdsServer, ttl: str) -> None:
    assert status(imds, "api/token", **{TTL: ttl}) == 400


def test_a_proxy_gets_no_token(imds: ImdsServer) -> None:
    assert status(imds, "api/token", **{TTL: "60", "X-Forwarded-For": "10.0.0.9"}) == 403


def test_notices_return_404_until_they_are_set(imds: ImdsServer) -> None:
    held = token(imds)
    rebalance, action = (
        "meta-data/events/recommendations/rebalance",
        "meta-data/spot/instance-action",
    )
    assert [status(imds, path, **held) for path in (rebalance, action)] == [404, 404]
    at = time.time() + 120

    imds.recommend_rebalance(at)
    imds.interrupt(at)

    assert json.loads(ask(imds, rebalance, **held)) == {"noticeTime": timestamp(at)}
    assert json.loads(ask(imds, action, **held)) == {"action": "terminate", "time": timestamp(at)}


def test_expired_tokens_are_refused_and_new_ones_are_valid(imds: ImdsServer) -> None:
    held = token(imds)

    imds.expire_tokens()

    assert status(imds, "meta-data/instance-id", **held) == 401
    assert ask(imds, "meta-data/instance-id", **token(imds)) == "i-0abc"


def test_errors_and_expired_tokens_last_until_the_fault_is_cleared(imds: ImdsServer) -> None:
    imds.break_("500")
    assert status(imds, "api/token", **{TTL: "60"}) == 500
    imds.break_("expired")
    assert status(imds, "meta-data/instance-id", **token(imds)) == 401

    imds.break_("")

    assert ask(imds, "meta-data/instance-id", **token(imds)) == "i-0abc"
    with pytest.raises(ValueError, match="no fault 'tired'"):
        imds.break_("tired")  # type: ignore[arg-type]


def test_hanging_service_does_not_respond_until_the_fault_is_cleared(imds: ImdsServer) -> None:
    held = token(imds)
    imds.break_("hang")
    with pytest.raises(TimeoutError):
        ask(imds, "meta-data/instance-id", timeout_s=0.2, **held)

    imds.break_("")

    assert ask(imds, "meta-data/instance-id", **held) == "i-0abc"


def test_boto_takes_the_credentials_of_the_role(
    imds: ImdsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED", raising=False)
    credentials = {
        "Code": "Success",
        "AccessKeyId": "ASIA1",
        "SecretAccessKey": "secret",
        "Token": "session",
        "Expiration": timestamp(time.time() + 3600),
    }
    fetcher = InstanceMetadataFetcher(
        config={"ec2_metadata_service_endpoint": f"{imds.url}/"}, num_attempts=1, timeout=30
    )
    assert fetcher.retrieve_iam_role_credentials() == {}

    imds.set_role("etrain-node", lambda: json.dumps(credentials))

    taken = fetcher.retrieve_iam_role_credentials()
    assert (taken["role_name"], taken["access_key"]) == ("etrain-node", "ASIA1")
    assert imds.requests()[-1] == "meta-data/iam/security-credentials/etrain-node"


def test_closing_ends_open_connections(imds: ImdsServer) -> None:
    host, port = imds.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(f"GET /latest/ HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 401")

        imds.close()

        while connection.recv(100):
            pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=30).close()
